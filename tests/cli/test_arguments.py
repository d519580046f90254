"""Every command's arguments, from its own list of flags: one line for what does not parse, JSON, help, completion."""

import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import tyro
from command import jaxpfl

from jaxpfl.cli import folders, parsing, training
from jaxpfl.cli.app import GROUPS, commands_of
from jaxpfl.cli.parsing import REGISTRY, Flag, check_arguments, flags_of
from jaxpfl.runs.names_elsewhere import NAMES_ELSEWHERE
from jaxpfl.support.errors import JaxpflError

COMMANDS: dict[str, Callable[..., None]] = {
    f"{group} {command.__name__}".strip().replace("_", "-"): command
    for group, commands in {
        "": (*training.commands([]), *folders.commands()),
        **{name: commands_of(name) for name in GROUPS},
    }.items()
    for command in commands
}
FLAGS = {name: flags_of(command) for name, command in COMMANDS.items()}
every = pytest.mark.parametrize("name", COMMANDS)


def taking(name: str, *kinds: type) -> list[Flag]:
    """The flags of a command that take such values."""
    return [f for f in FLAGS[name] if f.kind in kinds and not f.positional and not f.choices]


def refusal(name: str, *args: str) -> str:
    """Error message for the arguments of a command."""
    with pytest.raises(JaxpflError) as error:
        check_arguments(FLAGS[name], args, f"jaxpfl {name}")
    assert "\n" not in str(error.value)
    return str(error.value)


def a_value(flag: Flag) -> str:
    if isinstance(flag.default, str):
        return flag.default or "x"
    return flag.choices[0] if flag.choices else {int: "3", float: "0.5"}.get(flag.kind, "x")


@every
def test_the_list_is_that_of_the_parser(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    flags = {flag.name: flag for flag in FLAGS[name] if not flag.positional}
    switches = [flag for flag in flags.values() if flag.kind is bool]
    with redirect_stdout(StringIO()) as shown, pytest.raises(SystemExit):
        tyro.cli(COMMANDS[name], args=["--help"], registry=REGISTRY)
    assert set(re.findall(r"(?m)^ {1,2}(--[a-z][\w.-]*)", shown.getvalue())) == flags.keys()
    given = [f"{f.name}={a_value(f)}" for f in flags.values() if f.kind is not bool] + [f.name for f in switches]
    given += [a_value(flag) for flag in FLAGS[name] if flag.positional]
    assert parsing.bind_arguments(COMMANDS[name], name, check_arguments(FLAGS[name], given, name))


@every
def test_flags_that_are_not_known(name):
    for flag in FLAGS[name]:
        if len(flag.name) > 6 and not flag.positional:
            typo = flag.name[:-2] + flag.name[-1]
            said = refusal(name, f"{typo}=1")
            assert f"unknown flag {typo} of jaxpfl {name}: did you mean --" in said
    assert "unknown flag --xyzzyx of" in refusal(name, "--xyzzyx")


@every
def test_values_that_are_missing_or_empty(name):
    for flag in taking(name, int, float, str, Path):
        if not flag.many:
            assert f"{flag.name} requires a value" in refusal(name, flag.name)
        assert f"{flag.name} must be " in refusal(name, f"{flag.name}=")
        assert refusal(name, flag.name, " ").endswith("got ' '")


@every
@pytest.mark.parametrize("text", ["ten", "nan", "1e30", "1.5.2", "9" * 5000])
def test_numbers_that_are_none(name, text):
    for flag in taking(name, int) + (taking(name, float) if text not in ("1e30", "9" * 5000) else []):
        said = refusal(name, f"{flag.name}={text}")
        assert said.startswith(f"{flag.name} must be a ")
        assert len(said) < 200
        assert text[:10] in said


@every
def test_choices(name):
    for flag in FLAGS[name]:
        if flag.choices:
            wrong = flag.choices[-1][:-1]
            said = refusal(name, wrong) if flag.positional else refusal(name, flag.name, wrong)
            assert said.startswith(f"{flag.name} must be ")
            assert f"got {wrong!r}" in said
            assert all(choice in said for choice in flag.choices)
            if len(wrong) > 2:
                assert "did you mean" in said


@every
def test_switches_take_no_value(name):
    for flag in FLAGS[name]:
        if flag.kind is bool:
            assert refusal(name, f"{flag.name}=yes") == f"{flag.name} takes no value, got 'yes'"


@every
def test_places_that_cannot_be_written(name, tmp_path):
    (tmp_path / "file").write_text("")
    for flag in taking(name, Path):
        if flag.place is None:
            continue
        below = refusal(name, flag.name, str(tmp_path / "file" / "inner"))
        assert f"{flag.name} must be in a folder, and {tmp_path / 'file'} is not a folder" in below
        wrong = tmp_path if flag.place.metavar == "FILE" else tmp_path / "file"
        assert f"{flag.name} must be a f" in refusal(name, flag.name, str(wrong))
        if flag.place.metavar == "FILE":
            for device in ("/", "/dev/null"):
                assert f": '{device}'" in refusal(name, flag.name, device)


@every
def test_every_command_takes_json(name):
    others = ("completion", "predict", "deploy", "new")  # a script, a table, an app, a project
    assert name in others or any(flag.name == "--json" for flag in FLAGS[name])


@every
@pytest.mark.parametrize("columns", [60, 80])
def test_help_fits(capsys, monkeypatch, name, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    result = jaxpfl(capsys, *name.split(), "--help-all")
    assert (result.status, result.err) == (0, "")
    assert result.out.isascii()
    assert max(map(len, result.out.splitlines())) <= columns
    for flag in FLAGS[name]:
        assert f"\n  {flag.name}" in result.out or f"\n  {flag.off}" in result.out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "jaxpfl requires a command: compare, run, data"),
        (["privacy"], "jaxpfl privacy requires a command: epsilon"),
        (["--rounds", "3"], "jaxpfl requires a command before --rounds"),
        (["run", "local", "fedavg"], "jaxpfl run takes only METHOD, but also got 'fedavg'"),
        (["run", "local", "--strict", "yes"], "--strict takes no value, got 'yes'"),
        (["run", "local", "--epsilon", "3"], "did you mean --privacy.epsilon?"),
        (["run", "local", "--learning-rate", "0.1"], "flag --learning-rate of jaxpfl run: did you mean --lr?"),
        (["sweep", "--num_clients", "9"], "flag --num-clients of jaxpfl sweep: did you mean --clients?"),
        (["run", "local", "--join_ratio", "0.1"], "did you mean --cohort (a number of clients)?"),
        (["compare", "--methods", "local"], "give methods without a flag, such as jaxpfl compare fedavg"),
        (["run", "local", "--zebra", "1"], "flag --zebra of jaxpfl run: jaxpfl run --help-all lists all flags"),
        (["privacy", "epsilon"], "jaxpfl privacy epsilon requires --noise-multiplier, --rounds and --delta"),
        (["comparre"], "unknown command of jaxpfl 'comparre': did you mean 'compare'?"),
        (["zzz", "--help"], "unknown command of jaxpfl 'zzz' (known: bench, check, compare"),
        (["privacy", "audits"], "unknown command of jaxpfl privacy 'audits': did you mean 'audit'?"),
        (["estimate", "regression_mixtures"], "did you mean 'regression-mixture'?"),
        (["completion", "fish"], "must be bash, zsh or tcsh, got 'fish'"),
        (["bench", "overhead", "--quik"], "overhead: unknown argument --quik: did you mean --quick?"),
        (["bench", "overhead", "--method", "x"], "invalid choice: 'x' (choose from "),
    ],
)
def test_one_line_from_end_to_end(capsys, args, said):
    result = jaxpfl(capsys, *args)
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith("error: ")
    assert said in result.err


def test_names_of_other_packages_lead_to_flags_of_a_run():
    names = {f"--{name.replace('_', '-')}" for name in NAMES_ELSEWHERE}
    flags = {one.name for one in FLAGS["run"]}
    assert {f"--{name.replace('_', '-')}" for name in NAMES_ELSEWHERE.values()} <= flags
    assert not names & flags


def test_an_error_of_the_parser_that_no_check_foresaw_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(parsing, "check_arguments", lambda flags, args, name: list(args))
    result = jaxpfl(capsys, "run", "local", "--colour", "red")
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert "--colour" in result.err
    assert "│" not in result.err


def test_what_is_given_by_position_may_stand_anywhere():
    def order(*args: str) -> list[str]:
        return check_arguments(FLAGS["compare"], args, "jaxpfl compare")

    assert order("local", "--rounds", "3", "fedavg") == ["--rounds=3", "--", "local", "fedavg"]
    assert order("--lr", "-0.5", "--strict", "local") == ["--lr=-0.5", "--strict", "--", "local"]
    export = check_arguments(FLAGS["export"], ["--clients", "3", "7", "RUN"], "jaxpfl export")
    assert export == ["--clients=3", "7", "--", "RUN"]


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_script_is_valid_and_names_every_command_and_flag(capsys, shell: str):
    found = jaxpfl(capsys, "completion", shell)
    assert (found.status, found.err) == (0, "")
    if program := shutil.which(shell):
        told = subprocess.run([program, "-n"], input=found.out, capture_output=True, text=True, timeout=60)
        assert (told.returncode, told.stderr) == (0, "")
    for name in COMMANDS:
        assert name.split()[-1] in found.out
        given = {flag.name for flag in FLAGS[name] if not flag.positional and flag.default is not True}
        assert [flag for flag in given if flag not in found.out] == [], name
