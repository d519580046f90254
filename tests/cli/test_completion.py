"""The completion scripts: valid, and in bash with the words that a line may go on with."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from command import jaxpfl

from jaxpfl.algorithms import METHODS
from jaxpfl.cli import app
from jaxpfl.cli.completion import script
from jaxpfl.cli.every import by_name
from jaxpfl.cli.parsing import flags_of

CASES: dict[str, set[str]] = {
    "jaxpfl com": {"compare", "compare-runs", "completion"},
    "jaxpfl papers ": {"list", "run", "show", "--help"},
    "jaxpfl papers run --q": {"--quick"},
    "jaxpfl run fedavg-": {"fedavg-ft"},
    "jaxpfl compare local --privacy.eps": {"--privacy.epsilon"},
    "jaxpfl sweep local --table ": {"md", "latex"},
    "jaxpfl sweep local --table = m": {"md"},  # as bash parts --table=m
    "jaxpfl sweep local --table =": {"md", "latex"},
    "jaxpfl run local --output x --for": {"--force"},
    "jaxpfl run local --lr ": set(),
    "jaxpfl data des": {"describe"},
    "jaxpfl completion ": {"bash", "zsh", "--help"},
    "jaxpfl bench round_": {"round_cnn"},
    "jaxpfl nonsense --js": set(),
}


@pytest.fixture(scope="module")
def bash(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "jaxpfl.bash"
    path.write_text(script("bash"))
    return path


def completed(path: Path, line: str) -> str:
    words = line.split() + [""] * line.endswith(" ")
    return (
        f"source {shlex.quote(str(path))}; COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; "
        'COMPREPLY=(); _jaxpfl; echo "${COMPREPLY[@]}"'
    )


def test_bash_completes_what_may_follow(bash: Path):
    commands = "\n".join(completed(bash, line) for line in CASES)
    told = subprocess.run(["bash", "-u", "-c", commands], capture_output=True, text=True, check=True, timeout=60)
    assert told.stderr == ""
    found = dict(zip(CASES, map(set, map(str.split, told.stdout.splitlines())), strict=True))
    assert found == CASES


def test_every_command_flag_and_method_is_there(bash: Path):
    known = set(shlex.split(bash.read_text(), comments=True))
    words = {word for one in known for word in one.split()}
    assert {*app.GROUPS, *app.ALONE, *app.FOLDERS, *METHODS} <= words
    for name, command in by_name().items():
        assert name.split()[-1] in words
        given = {flag.name for flag in flags_of(command) if not flag.positional and flag.default is not True}
        assert given <= words, name


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_script_is_valid(shell: str):
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    told = subprocess.run([program, "-n"], input=script(shell), capture_output=True, text=True, timeout=60)
    assert (told.returncode, told.stderr) == (0, "")


def test_the_command_prints_it(capsys, bash: Path):
    told = jaxpfl(capsys, "completion", "bash")
    assert (told.status, told.out, told.err) == (0, bash.read_text(), "")
    assert "must be bash or zsh, got 'fish'" in jaxpfl(capsys, "completion", "fish").err
