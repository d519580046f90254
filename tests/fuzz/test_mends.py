"""Damage that once ended in another error, or in none: what the fuzzed inputs found, each by hand."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest
import scipy.io

from jaxpfl import JaxpflError
from jaxpfl.algorithms.parts.optimizers import resolve as resolve_optimizer
from jaxpfl.core.settings import literal, parse_value
from jaxpfl.data.sources.matlab import read_cells
from jaxpfl.data.sources.npz import read_npy
from jaxpfl.engine.model_files import FORMAT, MANIFEST, load_models
from jaxpfl.engine.streamed import disk as undo
from jaxpfl.engine.streamed.disk import Disk
from jaxpfl.runs.config import RunConfig
from jaxpfl.runs.records import Journal, Record
from jaxpfl.runs.reports.folders import check
from jaxpfl.runs.reports.page import page
from jaxpfl.runs.results import count_missing
from jaxpfl.runs.sweep.grid import parse
from jaxpfl.studies.bernoulli import parse_prior
from jaxpfl.support import files


def cells(*arrays: np.ndarray) -> np.ndarray:
    made = np.empty((1, len(arrays)), object)
    made[0, :] = arrays
    return made


@pytest.mark.parametrize("compressed", [True, False])
def test_matlab_cells_are_those_of_scipy(tmp_path: Path, compressed: bool) -> None:
    rng = np.random.default_rng(0)
    kinds = ("f8", "f4", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "?")
    arrays = [rng.integers(0, 90, (3, 2)).astype(kind) for kind in kinds]
    arrays += [rng.normal(size=(4, 1)), np.zeros((0, 3)), rng.normal(size=(2, 3, 2))]
    path = tmp_path / "a.mat"
    content = {"X": cells(*arrays), "note": "text", "Y": cells(np.ones((1, 1)))}
    scipy.io.savemat(path, content, do_compression=compressed)
    found = read_cells(path, ("Y", "X"))
    assert list(found) == ["Y", "X"]
    theirs = scipy.io.loadmat(path)["X"].reshape(-1)
    for ours, other in zip(found["X"], theirs, strict=True):
        np.testing.assert_array_equal(ours, other)


@pytest.mark.parametrize("wrong", [cells(np.ones(2) + 1j), cells(np.array(["text"])), np.ones((2, 2)), {"a": 1}])
def test_matlab_files_of_anything_but_numbers_are_refused(tmp_path: Path, wrong) -> None:
    scipy.io.savemat(tmp_path / "a.mat", {"X": wrong})
    with pytest.raises(JaxpflError, match=r"a\.mat is damaged or not a MATLAB 5 file: X "):
        read_cells(tmp_path / "a.mat", ("X",))


def test_matlab_file_that_inflates_to_more_than_it_says(tmp_path: Path) -> None:
    matrix = b"\x0e\0\0\0" + (2**31).to_bytes(4, "little") + bytes(64)
    packed = zlib.compress(matrix)
    element = b"\x0f\0\0\0" + len(packed).to_bytes(4, "little") + packed
    (tmp_path / "a.mat").write_bytes(bytes(124) + b"\x00\x01IM" + element)
    with pytest.raises(JaxpflError, match="bytes that claims to contain 2147483648"):
        read_cells(tmp_path / "a.mat", ("X",))


def test_an_array_that_is_larger_than_its_file_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    with path.open("wb") as file:
        head = {"descr": "<f8", "fortran_order": False, "shape": (2**50,)}
        np.lib.format.write_array_header_1_0(file, head)
        file.write(bytes(64))
    with pytest.raises(JaxpflError, match=r"its shape \(.*\) requires"):
        read_npy(path)


def test_an_undo_record_of_another_number_of_rows_is_none(tmp_path: Path) -> None:
    path = tmp_path / "undo-0"
    journal = undo.Journal(path, 4, 24)
    journal.keep(np.array([1, 3]), lambda numbers: [np.ones((2, 3))])
    journal.close()
    content = bytearray(path.read_bytes())
    content[0] ^= 1  # three rows for two, which the checksum of the body does not cover
    path.write_bytes(content)
    assert list(undo.records(path, 4, 24)) == []


@pytest.mark.parametrize("head", [(2**32 - 1, 2**62, 0), (2**31, 8, 0)])
def test_a_torn_undo_record_takes_no_memory(tmp_path: Path, head: tuple[int, int, int]) -> None:
    path = tmp_path / "undo-0"
    with_one = undo.Journal(path, 4, 24)
    with_one.keep(np.array([1, 3]), lambda numbers: [np.ones((2, 3))])
    with_one.close()
    with path.open("ab") as file:
        file.write(undo._HEAD.pack(*head) + bytes(40))
    assert [numbers.tolist() for numbers, _ in undo.records(path, 4, 24)] == [[1, 3]]


@pytest.mark.parametrize("row", [4, -1, 2**40])
def test_an_undo_record_of_a_row_that_is_not_there_is_refused(tmp_path: Path, row: int) -> None:
    path = tmp_path / "undo-0"
    body = np.array([row], "<i8").tobytes() + bytes(24)
    path.write_bytes(undo._HEAD.pack(1, len(body), zlib.crc32(body)) + body)
    with pytest.raises(JaxpflError, match=rf"undo-0 is damaged: it names row {row}, expected 0 to 3"):
        list(undo.records(path, 4, 24))
    with pytest.raises(JaxpflError, match="is damaged"):
        undo.Journal(path, 4, 24)


def test_other_files_among_the_states_of_clients(tmp_path: Path) -> None:
    """A note of a pending checkpoint that is no object, and a journal of no round: going back does without them."""
    shapes = {"n": jax.ShapeDtypeStruct((1, 2), np.int32)}
    disk = Disk(tmp_path / "s", shapes, ["a"])
    disk.tree["n"][:] = 0
    disk.complete()
    disk.commit(1)
    disk.put(0, np.array([1]), {"n": np.array([5], np.int32)})
    (tmp_path / "s" / "pending.json").write_text("[]")
    (tmp_path / "s" / "undo-x").touch()
    disk.recover(1)
    assert disk.tree["n"].tolist() == [[0, 0]]
    with pytest.raises(JaxpflError, match="cannot go back to round 2"):
        Disk(tmp_path / "s", shapes, ["a"]).recover(2)


@pytest.mark.parametrize(
    ("told", "trouble"),
    [
        (["\n"], "is missing"),
        (["9" * 300], "is missing"),
        (None, "'files' must list names"),
        ([1], "'files' must list names"),
        ("a", "'files' must list names"),
    ],
)
def test_files_of_a_study_that_its_summary_names_wrongly(tmp_path: Path, told, trouble: str) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"study": "when", "files": told}))
    (found,) = check(tmp_path).troubles
    assert trouble in found
    assert found.isprintable()


@pytest.mark.parametrize(
    "change", [{"seed": "0"}, {"rounds": -1}, {"status": "fine"}, {"settings": {"lr": []}}, {"more": 1}, {"metrics": 3}]
)
def test_records_of_other_types_are_refused_though_their_checksum_fits(tmp_path: Path, change: dict) -> None:
    Journal(tmp_path).append([Record("local", {"lr": 0.1}, 0)])
    path = tmp_path / "journal" / "main.jsonl"
    values = json.loads(path.read_text().partition(" ")[2]) | change
    text = json.dumps(values)
    path.write_text(f"{zlib.crc32(text.encode()):08x} {text}\n")
    with pytest.raises(JaxpflError, match=r"main\.jsonl line 1 is damaged or is not the record of a run"):
        Journal(tmp_path).read()


def test_texts_in_messages_stay_one_short_line() -> None:
    nested = "(" * 5000
    assert literal(nested) == nested
    for call in (
        lambda: parse_value("x", "9\n" * 500, int),
        lambda: parse("l\nr=1,2"),
        lambda: parse("lr=log:1:" + "9" * 5000),
        lambda: parse_prior(f"beta:{'9' * 5000},x"),
        lambda: resolve_optimizer(f"fedadam:tau={'9' * 5000}"),
    ):
        with pytest.raises(JaxpflError) as error:
            call()
        assert len(str(error.value).splitlines()) == 1
        assert len(str(error.value)) < 500


def test_lost_rounds_are_counted_without_a_list_of_all() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        rounds, step = int(rng.integers(1, 9)), int(rng.integers(1, 5))
        held = set(rng.integers(-1, 12, rng.integers(0, 12)).tolist())
        due = [at for at in range(1, rounds + 1) if at % step == 0 or at == rounds]
        missing = [at for at in due if at not in held]
        records = [{"method": "local", "kind": "evaluation", "round": at} for at in held]
        config = RunConfig(eval_every=step)
        assert count_missing(records, "local", {"rounds": rounds}, config)["evaluation"] == len(missing)
    records = [{"method": "local", "kind": "round", "round": at} for at in (1, 2, 4)]
    assert count_missing(records, "local", {"rounds": 10**15}, RunConfig())["round"] == 10**15 - 3


def test_half_of_a_surrogate_pair_is_shown_as_a_question_mark() -> None:
    assert "<pre>a?b</pre>" in page("title", ["<pre>a\ud800b</pre>"], [])


def test_a_manifest_that_says_nothing_of_a_global_model_is_damage(tmp_path: Path) -> None:
    manifest = {"format": FORMAT, "methods": {"local": {"groups": []}}}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    files.write_checksums(tmp_path)
    with pytest.raises(
        JaxpflError, match=r"manifest\.json is damaged or is not a manifest of exported models .KeyError: 'global'.$"
    ):
        load_models(tmp_path)
