"""Outputs of every command: what was there stays, unless the same command wrote it."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from command import SMALL, jaxpfl

from jaxpfl import JaxpflError
from jaxpfl.cli.estimate import Output, claim, write

WHEN = ["estimate", "when", "--clients", "50", "--samples", "5"]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(capsys, *args) -> str:
    result = jaxpfl(capsys, *args)
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    return result.err


def study(names: list[str], value: int = 0) -> Callable[..., None]:
    """A command of ``jaxpfl estimate`` that computes nothing and writes these files."""

    def draw(folder: Path) -> list[Path]:
        for name in names:
            (folder.parent / name).write_text(f"{name} {value}")
        return [folder.parent / name for name in names if name.startswith("plots/")]

    def of_nothing(to: Output) -> None:
        claim(to.output, "of-nothing")
        write({"study": "of-nothing", "value": value}, to, draw)

    return of_nothing


def test_a_study_replaces_its_own_results_only(tmp_path):
    out = tmp_path / "out"
    study(["plots/a.png", "estimates.csv"])(to=Output(output=out))
    study(["plots/a.png", "plots/b.png"], 1)(to=Output(output=out))
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["value"], summary["plots"]) == (1, ["plots/a.png", "plots/b.png"])
    assert (out / "plots" / "a.png").read_text() == "plots/a.png 1"

    (out / "notes.txt").write_text("of the user's")
    before = contents(out)
    with pytest.raises(JaxpflError, match=r"notes\.txt exists and is not an earlier result: choose another --output"):
        study(["plots/a.png", "notes.txt"], 2)(to=Output(output=out))
    assert contents(out) == before
    study(["plots/a.png"], 3)(to=Output(output=out))
    assert contents(out)["notes.txt"] == b"of the user's"


def test_a_study_that_fails_leaves_its_earlier_results(tmp_path):
    study(["plots/a.png"])(to=Output(output=tmp_path))
    before = contents(tmp_path)
    with pytest.raises(FileNotFoundError):
        study(["plots/a.png", "no-folder/b"], 1)(to=Output(output=tmp_path))
    assert contents(tmp_path) == before


class Killed(BaseException):
    """As no code of the package would handle."""


def test_a_study_that_is_killed_leaves_no_half_for_whole_and_may_write_there_again(tmp_path, monkeypatch):
    names = ["plots/a.png", "plots/b.png", "estimates.csv"]

    def killed(at: int, folder: Path) -> bool:
        """Whether the results were stopped before the move of that number."""
        count, move = 0, os.replace

        def counted(source: Path, target: Path) -> None:
            nonlocal count
            count += 1
            if count > at:
                raise Killed
            move(source, target)

        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", counted)
            try:
                study(names, 1)(to=Output(output=folder))
            except Killed:
                return True
        return False

    for earlier in (False, True):
        at = 0
        while True:
            folder = tmp_path / f"{earlier}-{at}"
            if earlier:
                study(names)(to=Output(output=folder))
            if not killed(at, folder):
                break
            before = contents(folder)
            if "summary.json" in before:
                assert {before[name] for name in names} == {f"{name} 0".encode() for name in names}
            study(names, 2)(to=Output(output=folder))
            now = contents(folder)
            assert {name: now.pop(name) for name in names} == {name: f"{name} 2".encode() for name in names}
            assert list(now) == ["summary.json"]
            at += 1
        assert at > len(names)


@pytest.mark.parametrize(
    "files",
    [
        {"notes.txt": "of the user's"},
        {"summary.json": "{}"},
        {"summary.json": "["},
        {"summary.json": '["when"]'},
        {"config.json": "{}", "summary.json": '{"methods": {}, "rounds": 3}', "metrics.jsonl": ""},  # as of a run
    ],
)
@pytest.mark.parametrize("command", [WHEN, ["run", "local", *SMALL]])
def test_folders_of_others_are_refused_and_kept(tmp_path, capsys, files, command):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    before = contents(tmp_path)
    assert "choose another" in refused(capsys, *command, "--output", tmp_path)
    assert contents(tmp_path) == before


DESCRIBE = ["data", "describe", "--data", "digits", "--clients", "4"]


def test_a_picture_is_replaced_by_its_own_command_only(tmp_path, capsys):
    picture, others = tmp_path / "p.png", tmp_path / "others.png"
    for _ in range(2):
        assert jaxpfl(capsys, *DESCRIBE, "--plot", picture).status == 0
    whole = picture.read_bytes()
    assert "was not written by jaxpfl privacy audit" in refused(capsys, "privacy", "audit", "fedavg", "--plot", picture)
    for content in (b"of the user's", b"", b"\x89PNG\r\n\x1a\n"):
        others.write_bytes(content)
        assert "exists but was not written by" in refused(capsys, *DESCRIBE, "--plot", others)
        assert others.read_bytes() == content
    assert picture.read_bytes() == whole


def test_a_record_of_another_benchmark_is_kept(tmp_path, capsys):
    record = tmp_path / "record.json"
    for text in ('{"benchmark": "sweep"}', "[]", "of the user's"):
        record.write_text(text)
        for name, flag in (("clients", "--json"), ("clients", "--plot"), ("histograms", "--plot")):
            result = jaxpfl(capsys, "bench", name, "--quick", flag, record)
            assert result.status == 2
            assert f"was not written by {name}" in result.err
        assert record.read_text() == text
