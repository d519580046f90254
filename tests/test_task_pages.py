"""The task pages: every block runs, in the order of its page, in one folder; each page is short.

The blocks run with few rounds and two seeds, the same wherever possible, so that blocks and pages share programs: what
a reader copies is tested, not how well it trains.
"""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from forks import Forked

from jaxpfl.cli import main

DOCS = Path(__file__).parents[1] / "docs"
TASK_PAGES = (
    *("first-comparison", "own-data", "own-arrays", "own-model", "own-method"),
    *("choose-settings", "private-training", "large-runs", "read-a-report", "export-a-model"),
)
_BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.S)


_ROUNDS = re.compile(r"(--rounds |\brounds ?= ?)(\d+)")
_SEEDS = re.compile(r"(--seeds |\bseeds=)\d+")
_MORE = {"--random 6": "--random 4", "for left_out in range(4)": "for left_out in range(2)"}
"""Repetitions that a run at reduced size leaves out: as many drawn settings as on a grid share its program."""
_PRESET = re.compile(r"^jaxpfl (?:run|compare|sweep) (?!.*--(?:rounds|config|help)).*", re.M)


def quicken(code: str) -> str:
    """A block with four rounds, or with a tenth of more than sixty, and two seeds."""
    few = _ROUNDS.sub(lambda found: f"{found[1]}{int(found[2]) // 10 if int(found[2]) > 60 else 4}", code)
    shorter = _SEEDS.sub(r"\g<1>2", few.replace("\\\n", ""))
    for many, fewer in _MORE.items():
        shorter = shorter.replace(many, fewer)
    return _PRESET.sub(lambda found: f"{found[0]} --rounds 4 --seeds 2", shorter)


def run_block(kind: str, code: str, folder: Path) -> None:
    """Run a block of a page in this process, which compiles a program once for all blocks.

    A block of TOML is a file that its first line names, as a block of Python may be; a loop's commands run at once.
    """
    first = code.partition("\n")[0].removeprefix("# ")
    if kind == "toml":
        (folder / first).write_text(code)
    elif kind == "python":
        file = folder / (first if first.endswith(".py") else "block.py")
        file.write_text(code)
        runpy.run_path(str(file), run_name="__main__")
    else:
        if code.startswith("for "):
            return run_at_once(code)
        for command in code.splitlines():
            if command.startswith("jaxpfl "):
                main(shlex.split(command)[1:])
            else:
                subprocess.run(["bash", "-euo", "pipefail", "-c", command], check=True)


def run_at_once(code: str) -> None:
    """Run each command of jaxpfl that a shell would, in a process of its own."""
    listed = f"""jaxpfl() {{ printf '%s\\n' "${{*@Q}}"; }}\n{code}"""
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", listed], check=True, capture_output=True, text=True)
    running = [Forked(*shlex.split(line)) for line in done.stdout.splitlines()]
    assert running
    for process in running:
        _, err = process.communicate()
        assert process.returncode == 0, err


@pytest.mark.parametrize("name", TASK_PAGES)
def test_page_is_short(name: str):
    text = (DOCS / f"{name}.md").read_text()
    assert len(text.split()) < 900
    assert {kind for kind, _ in _BLOCK.findall(text)} <= {"sh", "python", "toml", "text"}


@pytest.mark.slow
@pytest.mark.usefixtures("clients_in_turn")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", TASK_PAGES)
def test_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    blocks = [(kind, code) for kind, code in _BLOCK.findall((DOCS / f"{name}.md").read_text()) if kind != "text"]
    assert blocks
    for kind, code in blocks:
        run_block(kind, quicken(code), tmp_path)
        shown = capsys.readouterr().out
        assert kind != "python" or "print" not in code or re.search(r"\d", shown), "a block shows a result"
