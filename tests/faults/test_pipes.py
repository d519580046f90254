"""A pipe, or a link to a device, in the place of any file that a user names: refused in one line, at once."""

from __future__ import annotations

import ast
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxpfl
from jaxpfl import JaxpflError
from jaxpfl.data import load
from jaxpfl.data.sources import csv_text, matlab
from jaxpfl.data.sources.idx import read_idx
from jaxpfl.data.sources.npz import read_npy, read_npz
from jaxpfl.data.sources.pickles import read_pickle
from jaxpfl.runs import config
from jaxpfl.runs.records import Journal
from jaxpfl.support import files

ROOT = Path(jaxpfl.__file__).parent

READERS: dict[str, Callable[[Path], Any]] = {
    "text/a/poem": lambda path: load(f"text:{path.parents[1]}"),
    "leaf/train/a.json": lambda path: load(f"leaf:{path.parents[1]}"),
    "leaf in files/train/a.json": lambda path: load(f"leaf:{path.parents[1]}", in_files=True),
    "own.csv": lambda path: load(f"csv:{path}"),
    "cells.csv": csv_text.text_of,
    "config.toml": config.read,
    "config.json": config.read,
    "run/summary.json": files.read_json,
    "run/metrics.jsonl": lambda path: files.Records(path).read(),
    "sweep/journal/main.jsonl": lambda path: Journal(path.parents[1]).read(),
    "checked/SHA256SUMS": lambda path: files.check_checksums(path.parent),
    "images": lambda path: read_idx(path, 3),
    "batch": read_pickle,
    "school.mat": lambda path: matlab.read_cells(path, ("X",)),
    "a.npz": read_npz,
    "a.npy": lambda path: refused(lambda: read_npy(path)),
}


def refused(read: Callable[[], Any]) -> None:
    """What callers make of the system's errors."""
    try:
        read()
    except OSError as error:
        raise JaxpflError(str(error.strerror)) from error


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError("the reader waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_regular_file_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(JaxpflError) as error:
        READERS[name](path)
    assert "not a regular file" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_libsvm_text_that_becomes_a_pipe_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipes are passed over where files are looked for: this one takes a file's place after that."""
    monkeypatch.setattr(Path, "is_file", lambda self: self.name != "a.t")
    os.mkfifo(tmp_path / "a")
    with pytest.raises(JaxpflError, match="not a regular file"):
        load(f"libsvm:{tmp_path / 'a'}")


@pytest.mark.parametrize("write", [files.Records, lambda path: Journal(path.parent)])
def test_a_pipe_is_not_appended_to(tmp_path: Path, write: Callable[[Path], Any]) -> None:
    kept = write(tmp_path / "a.jsonl")
    kept.path.parent.mkdir(exist_ok=True)
    os.mkfifo(kept.path)
    with pytest.raises(JaxpflError, match=r"cannot write to .*\.jsonl"):
        kept.append([])


OWN = {
    "support/distributed.py",  # /proc
    "engine/programs.py",  # /proc
    "engine/streamed/disk.py",  # what it has just made
    "runs/compile_cache.py",  # /proc, and a folder of one's own
    "support/files.py",
    "support/host_memory.py",  # /proc and /sys
    "runs/reports/page.py",  # the package's own
    "deploy/flower.py",  # the package's own
}
"""Modules that open files in other ways, none of which a user names."""


def test_nothing_else_opens_files_to_be_read() -> None:
    found = set()
    for path in sorted(ROOT.rglob("*.py")):
        if path.is_relative_to(ROOT / "benchmarks"):  # where the package is installed, not only linked
            continue
        text = path.read_text(encoding="utf-8")
        if not re.search(r"\bopen\(|read_text|read_bytes|fromfile", text):
            continue
        for node in ast.walk(ast.parse(text)):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            modes = {one.value for one in ast.walk(node) if isinstance(one, ast.Constant)} if name == "open" else set()
            reads = name == "open" and not any(re.fullmatch("[wax]b?[+]?", str(mode)) for mode in modes)
            if reads or name.rpartition(".")[2] in ("read_text", "read_bytes", "fromfile"):
                found.add(path.relative_to(ROOT).as_posix())
    assert found == OWN
