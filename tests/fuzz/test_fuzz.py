"""Damaged inputs: every reader, many of them, each reader in a process of its own with a gibibyte to spare.

No data executes code, and no name in data leads out of its folder."""

from __future__ import annotations

import ast
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folder_targets import FOLDERS
from forks import Forked, script
from fuzz import TARGETS
from fuzz_target import MOST, outcome
from planted import Payload

from jaxpfl import JaxpflError, load_models
from jaxpfl.data.sources.npz import load_npz, read_npy, read_npz
from jaxpfl.data.sources.pickles import read_pickle
from jaxpfl.engine.model_files import FORMAT, MANIFEST, write_npz
from jaxpfl.runs import config, export, records, stored_run
from jaxpfl.runs.checkpoint import Checkpoints
from jaxpfl.runs.reports import report
from jaxpfl.runs.reports.folders import check
from jaxpfl.support import files

COUNT = int(os.environ.get("JAXPFL_MUTATIONS", "500"))
"""Damaged inputs a reader of files in the slow run, fewer of dear ones; a change of a reader is worth 100,000."""

FEWER = 3 / 5
"""Share of them that readers of folders read, and fits, which take milliseconds and seconds."""
DEAR = {*FOLDERS, "normal means"}
FILES = sorted({*TARGETS} - DEAR)
PARTS = {f"files {part}": (FILES[part::4], COUNT) for part in range(4)}  # none so long that CI could end within it
PARTS |= {f"folders {part}": (sorted(DEAR)[part::2], int(FEWER * COUNT)) for part in range(2)}

UNREFUSED = ("run", "undo")
"""Readers that tell of damage by a value, or read what is left of it."""


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_only_our_own_error_leaves_a_reader(part: str, record_property: Callable[[str, object], None]) -> None:
    """Damaged inputs are either read, as what the reader promises, or refused in one line of bounded length.

    There is no other error, no signal, none takes the CPU of a hang, and none a gibibyte.
    """
    names, count = PARTS[part]
    process = Forked(",".join(names), count, code=script(Path(__file__).with_name("fuzz.py")))
    out, err = process.communicate()
    assert process.returncode == 0, err[-2000:]
    found = {one["target"]: one for one in map(json.loads, out.splitlines())}
    assert sorted(found) == names
    assert {name: one["failures"] for name, one in found.items() if one["number"]} == {}
    for name, one in found.items():
        counts, number = one["outcomes"], sum(one["outcomes"].values())
        assert counts.get("read", 0) > 0 or number < 100, name
        assert counts.get("refused", 0) > number / 10 or number < 8 or name in UNREFUSED, name
        record_property("counts", f"{name}: {counts}")


def test_what_counts_as_a_failure() -> None:
    def raised(error: BaseException) -> Any:
        def read() -> None:
            raise error

        return outcome(read)

    def hang() -> None:
        while True:
            pass

    assert outcome(lambda: None) == ("read", None)
    assert raised(JaxpflError("one line")) == ("refused", None)
    for text in ("", "two\nlines", "x" * (MOST + 1)):
        assert raised(JaxpflError(text))[1], text
    assert raised(KeyError("x"))[1].startswith("KeyError at test_fuzz.py:")
    assert raised(MemoryError())[0] == "MemoryError"
    kind, failure = outcome(hang, slowest=0.01)
    assert kind == "Slow"
    assert failure


ROOT = Path(__file__).parents[2] / "jaxpfl"


def objects(mark: Path) -> np.ndarray:
    made = np.empty(2, object)
    made[:] = [Payload(mark), Payload(mark)]
    return made


def _archive(path: Path, mark: Path) -> None:
    np.savez(path, x_train=objects(mark), y_train=np.zeros(2, int), a=objects(mark))


def _yaml(path: Path, mark: Path) -> None:
    path.write_text(f'rounds: !!python/object/apply:os.mkdir ["{mark}"]\n')


CASES: dict[str, tuple[str, Callable[[Path, Path], object], Callable[[Path], Any]]] = {
    "npz data": ("a.npz", _archive, lambda path: load_npz("npz:a", path)),
    "npz in files": ("a.npz", _archive, lambda path: load_npz("npz:a", path, in_files=True)),
    "npz of a run or of models": ("a.npz", _archive, read_npz),
    "npz of a warm start": ("a.npz", _archive, lambda path: export.read_parameters(str(path))),
    "npy of a federation": ("a.npy", lambda path, mark: np.save(path, objects(mark)), read_npy),
    "mapped npy": ("a.npy", lambda path, mark: np.save(path, objects(mark)), lambda path: read_npy(path, mode="r")),
    "pickle": ("a", lambda path, mark: path.write_bytes(pickle.dumps({"data": Payload(mark)})), read_pickle),
    "yaml": ("a.yaml", _yaml, config.read),
}


@pytest.mark.parametrize("name", CASES)
def test_what_would_run_is_refused(tmp_path: Path, name: str) -> None:
    file, write, read = CASES[name]
    mark = tmp_path / "ran"
    write(tmp_path / file, mark)
    with pytest.raises(JaxpflError) as error:
        read(tmp_path / file)
    assert len(str(error.value).splitlines()) == 1
    assert not mark.exists()


@pytest.mark.slow
def test_no_file_of_a_checkpoint_runs_as_code(tmp_path: Path) -> None:
    """Each file in turn is a pickle, with checksums that fit; and orbax's metadata name a class of a module nearby."""
    process = Forked(tmp_path, code=script(Path(__file__).with_name("planted.py")))
    out, err = process.communicate()
    assert process.returncode == 0, err[-2000:]
    found = json.loads(out)
    assert found["files"] > 3
    assert found["named"]
    assert found["refused"]
    assert found["ran"] == 0


RUNS = {"eval", "exec", "compile", "__import__", "system", "popen", "unsafe_load", "full_load", "loadmat"}
TRUSTED = {
    "engine/programs.py": {"pickle.loads"},  # the user's own cache of programs, which are code anyhow
    "support/own_code.py": {"exec", "compile"},  # files that the user names as FILE.py:NAME
}
"""Calls that could run data as code, by file, each for its reason; anything new must be named here."""


def test_nothing_else_unpickles_or_evaluates() -> None:
    found: dict[str, set[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            last = name.rpartition(".")[2]
            bad = name in RUNS or (last in RUNS and name.startswith(("os.", "yaml.", "scipy.", "io.", "builtins.")))
            bad |= last in ("load", "loads", "Unpickler") and name.startswith(
                ("pickle.", "cloudpickle.", "marshal.", "joblib.")
            )
            if name == "np.load" or last in ("read_array", "write_array"):
                default = "False" if last == "load" else "True"
                options = {one.arg: ast.unparse(one.value) for one in node.keywords}
                bad |= options.get("allow_pickle", default) != "False"
            if bad:
                found.setdefault(path.relative_to(ROOT).as_posix(), set()).add(name)
    assert found == TRUSTED


@pytest.mark.parametrize("name", ["../secret", "a/../../secret", "/etc/hostname", "", "..", "link", "\0"])
def test_names_that_lead_out_of_a_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "secret").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(JaxpflError, match="refers to a file outside the folder"):
        files.inside(folder, name)
    assert files.inside(folder, "plots/a.png") == folder / "plots" / "a.png"


@pytest.mark.parametrize("name", ["../outside.npz", "link.npz"])
def test_exported_models_of_another_folder_are_not_read(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "models"
    write_npz(folder / "own.npz", {"w": np.ones(2)})
    write_npz(tmp_path / "outside.npz", {"w": np.zeros(2)})
    (folder / "link.npz").symlink_to(tmp_path / "outside.npz")
    entry = {"groups": [], "global": {"file": name, "parameters": {}}}
    manifest = {"format": FORMAT, "methods": {"fedavg": entry}, "config": {}, "data": 0}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    files.write_checksums(folder)
    (folder / files.CHECKSUMS).write_bytes((folder / files.CHECKSUMS).read_bytes() + files._line(folder, name) + b"\n")
    with pytest.raises(JaxpflError, match="refers to a file outside the folder"):
        _ = load_models(folder).global_model


@pytest.mark.parametrize("name", ["../secret.png", "/etc/hostname", "link.png"])
def test_a_report_shows_no_file_of_another_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "study"
    folder.mkdir()
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "summary.json").write_text(json.dumps({"study": "gaussian", "plots": [name], "files": [name]}))
    with pytest.raises(JaxpflError, match="refers to a file outside the folder"):
        report.write([folder], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
    assert "outside the folder" in check(folder).troubles[0]


@pytest.mark.parametrize("method", ["../local", "a/b", "/local", ".."])
def test_names_of_methods_are_no_paths(tmp_path: Path, method: str) -> None:
    record = {"config": {}, "methods": [method], "data": 0, "hyper": {}}
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(JaxpflError, match=r"config\.json is damaged: 'methods' must list"):
        stored_run.open_run(tmp_path)


def test_members_of_an_archive_are_written_nowhere(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    with zipfile.ZipFile(inner / "a.npz", "w") as archive, archive.open("../../out.npy", "w") as member:
        np.lib.format.write_array(member, np.ones(2), allow_pickle=False)
    before = sorted(tmp_path.rglob("*"))
    for in_files in (False, True):
        assert list(read_npz(inner / "a.npz", in_files=in_files)) == ["../../out"]
    assert sorted(tmp_path.rglob("*")) == before


def test_journals_and_records_are_not_written_through_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine\n")
    (tmp_path / "journal").mkdir()
    for name in ("journal/main.jsonl", "metrics.jsonl"):
        (tmp_path / name).symlink_to(outside)
    with pytest.raises(JaxpflError, match="cannot write to"):
        records.Journal(tmp_path).append([records.Record("local", {}, 0)])
    with pytest.raises(JaxpflError, match="cannot write to"):
        files.Records(tmp_path / "metrics.jsonl").append([{"kind": "round", "method": "local", "round": 1}])
    assert outside.read_text() == "mine\n"


def test_old_checkpoints_that_are_links_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "3").symlink_to(outside)
    Checkpoints(tmp_path / "checkpoints").keep_only(5)
    assert (outside / "file").read_text() == "mine"
