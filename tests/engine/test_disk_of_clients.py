"""Memory-mapped states: they go back to the last checkpoints, whatever was written since, torn records included.

Rows of a file: what calls write, its map shows; types that NumPy's format does not know; damage."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl import JaxpflError
from jaxpfl.engine.streamed import disk as disk_module
from jaxpfl.engine.streamed.disk import Disk, RowFile, records
from jaxpfl.engine.streamed.rows import Pages
from jaxpfl.support import files

SHAPES = {"w": jax.ShapeDtypeStruct((2, 6, 3), np.float32), "n": jax.ShapeDtypeStruct((2, 6), np.int32)}
KEYS = ["a", "b"]


def opened(folder: Path) -> Disk:
    return Disk(folder, SHAPES, KEYS)


def begun(folder: Path) -> Disk:
    disk = opened(folder)
    disk.tree["w"][:], disk.tree["n"][:] = 0, 0
    disk.complete()
    return disk


def write(disk: Disk, value: int, run: int, *rows: int) -> None:
    of = np.array(rows)
    disk.put(run, of, {"w": np.full((len(of), 3), value, np.float32), "n": np.full(len(of), value, np.int32)})


def content(disk: Disk) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(disk.tree)]


def checkpoint(disk: Disk, round: int) -> list[np.ndarray]:
    disk.prepare(round)
    disk.commit(round)
    return content(disk)


def assert_holds(disk: Disk, wanted: list[np.ndarray]) -> None:
    for a, b in zip(content(disk), wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_kill_leads_back_to_the_last_checkpoint_or_the_one_before(tmp_path: Path) -> None:
    disk = begun(tmp_path / "s")
    write(disk, 1, 0, 0, 2)
    one = checkpoint(disk, 5)
    write(disk, 2, 0, 2, 3)
    write(disk, 3, 1, 2)
    two = checkpoint(disk, 10)
    write(disk, 4, 0, 0, 1, 2)
    write(disk, 5, 0, 2)  # a second time: its first content counts
    shutil.copytree(tmp_path / "s", tmp_path / "other")

    again = opened(tmp_path / "s")
    again.recover(10)
    assert_holds(again, two)
    write(again, 6, 1, 5)  # and goes on from there
    again = opened(tmp_path / "s")
    again.recover(10)
    assert_holds(again, two)

    other = opened(tmp_path / "other")
    other.recover(5)  # the checkpoint of round 10 is damaged, say
    assert_holds(other, one)
    with pytest.raises(JaxpflError, match="cannot go back to round 0: delete this folder and the checkpoints"):
        other.recover(0)


def test_without_a_checkpoint_it_begins_anew(tmp_path: Path) -> None:
    disk = begun(tmp_path / "s")
    zero = content(disk)
    write(disk, 1, 1, 0, 5)
    again = opened(tmp_path / "s")
    assert not again.is_new
    again.recover(0)
    assert_holds(again, zero)


def test_a_kill_between_the_checkpoint_and_its_commit(tmp_path: Path) -> None:
    disk = begun(tmp_path / "s")
    zero = content(disk)
    write(disk, 1, 0, 1)
    now = content(disk)
    disk.prepare(3)
    shutil.copytree(tmp_path / "s", tmp_path / "unsaved")
    again = opened(tmp_path / "s")
    again.recover(3)  # the checkpoint of round 3 is there
    assert_holds(again, now)
    unsaved = opened(tmp_path / "unsaved")
    unsaved.recover(0)  # it is not
    assert_holds(unsaved, zero)
    write(unsaved, 2, 0, 1)
    with pytest.raises(JaxpflError, match="cannot go back to round 3"):
        unsaved.recover(3)


class Killed(BaseException):
    """As no code of the package would handle."""


def killed(monkeypatch: pytest.MonkeyPatch, at: int, does: Callable[[], object]) -> bool:
    """True if a function came as far as the call of that number by which files change, and was stopped before it."""
    count = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count > at:
                raise Killed
            return call(*args, **kwargs)

        return instead

    with monkeypatch.context() as patched:
        for of, name in ((Path, "unlink"), (os, "truncate"), (files, "write_json"), (disk_module, "Journal")):
            patched.setattr(of, name, counted(getattr(of, name)))
        try:
            does()
        except Killed:
            return True
    return False


def test_a_kill_anywhere_in_the_way_back_leads_to_the_same_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = begun(tmp_path / "s")
    for round in (5, 10, 15):
        write(disk, round, 0, 0, 2)
        checkpoint(disk, round)
    for target in (10, 15):
        at = 0
        while True:
            folder = Path(shutil.copytree(tmp_path / "s", tmp_path / f"{target}-{at}"))
            if not killed(monkeypatch, at, lambda folder=folder, target=target: opened(folder).recover(target)):
                break
            again = opened(folder)
            again.recover(target)
            assert content(again)[1][0, 0, 0] == target
            at += 1
        assert at >= 2


def test_a_kill_anywhere_in_the_making_leaves_nothing_or_the_first_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = 0
    while killed(monkeypatch, at, lambda folder=tmp_path / str(at): begun(folder)):
        folder, at = tmp_path / str(at), at + 1
        again = opened(folder)
        if again.is_new:
            again = begun(folder)
        again.recover(0)
        assert not content(again)[1].any()
    assert at >= 2


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_torn_record_belongs_to_rows_that_were_not_written(tmp_path: Path, cut: int) -> None:
    disk = begun(tmp_path / "s")
    zero = content(disk)
    write(disk, 1, 0, 1, 2)
    first = (tmp_path / "s" / "undo-0").stat().st_size
    write(disk, 2, 0, 3)
    whole = (tmp_path / "s" / "undo-0").read_bytes()
    disk.tree["w"][0, 3], disk.tree["n"][0, 3] = 0, 0  # killed before the rows were written
    (tmp_path / "s" / "undo-0").write_bytes(whole[: max(first, len(whole) - cut)])
    assert sum(len(numbers) for numbers, _ in records(tmp_path / "s" / "undo-0", disk._rows, disk._size)) == 2
    again = opened(tmp_path / "s")
    again.recover(0)
    assert_holds(again, zero)


def test_records_that_the_system_writes_piece_by_piece_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = {}
    for name, most in (("whole", None), ("pieces", 5)):
        disk = begun(tmp_path / name)
        write(disk, 1, 0, 0, 2)
        if most is not None:
            monkeypatch.setattr(os, "writev", lambda file, parts, most=most: os.write(file, parts[0][:most]))
        write(disk, 2, 1, 3, 4, 5)
        written[name] = (tmp_path / name / "undo-0").read_bytes()
    assert written["pieces"] == written["whole"]
    numbers = [list(of) for of, _ in records(tmp_path / "pieces" / "undo-0", 12, 16)]
    assert numbers == [[0, 2], [9, 10, 11]]


@pytest.mark.parametrize("size", [0, 30])
def test_a_full_disk_names_the_journal_and_loses_nothing(tmp_path: Path, size: int) -> None:
    disk = begun(tmp_path / "s")
    zero = content(disk)
    write(disk, 1, 0, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    room = (tmp_path / "s" / "undo-0").stat().st_size + size
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(JaxpflError, match=f"^cannot write to {tmp_path / 's' / 'undo-0'}: File too large$"):
            write(disk, 2, 0, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    again = opened(tmp_path / "s")
    again.recover(0)
    assert_holds(again, zero)


def test_half_made_files_are_made_anew(tmp_path: Path) -> None:
    opened(tmp_path / "s").tree["w"][:] = 7  # killed before `made`
    again = opened(tmp_path / "s")
    assert again.is_new
    np.testing.assert_array_equal(again.tree["w"], 0)


def test_other_states_are_refused(tmp_path: Path) -> None:
    begun(tmp_path / "s")
    with pytest.raises(JaxpflError, match="contains the clients' states of other runs: delete it to start anew"):
        Disk(tmp_path / "s", SHAPES, ["a", "c"])


def test_pages_of_files_do_not_stay_in_the_process(tmp_path: Path) -> None:
    leaf = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (16, 2**20))  # 64 MiB
    pages = Pages({"x": leaf})
    leaf[:] = 1
    before = resident_file_bytes()
    pages.were_read(leaf[0, : 2**18])
    assert resident_file_bytes() > before - 2**25
    pages.were_read(leaf)
    assert resident_file_bytes() < before - 48 * 2**20
    assert (leaf[::5, ::4096] == 1).all()  # what was written is still there


def resident_file_bytes() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines["RssFile"].split()[0])


def test_rows_of_nobody_are_those_of_the_last_client(tmp_path: Path) -> None:
    disk = begun(tmp_path / "deep" / "s")
    for run in (0, 1):
        for row in range(6):
            write(disk, 10 * run + row, run, row)
    for run in (0, 1):
        taken = disk.take(run, np.array([0, 4, 5, 6, 6, 9]))
        np.testing.assert_array_equal(taken["n"], 10 * run + np.array([0, 4, 5, 5, 5, 5]))
        np.testing.assert_array_equal(taken["w"], np.repeat(taken["n"][:, None], 3, axis=1))


SHAPE = (2, 5, 3)


def made(folder: Path, dtype=np.float32, shape=SHAPE) -> Path:
    np.lib.format.open_memmap(folder / "rows.npy", "w+", dtype, shape)
    return folder / "rows.npy"


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8, jnp.bfloat16])
@pytest.mark.parametrize("most", [None, 5])
def test_rows_are_those_of_the_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype, most: int | None):
    if most:  # a system that takes a few bytes at a time
        monkeypatch.setattr(os, "preadv", lambda file, parts, at, read=os.preadv: read(file, [parts[0][:most]], at))
        monkeypatch.setattr(os, "pwrite", lambda file, part, at, write=os.pwrite: write(file, part[:most], at))
    file = RowFile.existing(made(tmp_path, dtype), SHAPE, np.dtype(dtype))
    rng, wanted = np.random.default_rng(0), np.zeros(SHAPE, dtype)
    for _ in range(20):
        numbers = rng.permutation(10)[: rng.integers(0, 11)]
        if rng.random() < 0.5:
            numbers.sort()  # with neighbours, which are read and written at once
        rows = rng.integers(0, 100, (len(numbers), 3)).astype(dtype)
        wanted.reshape(10, 3)[numbers] = rows
        file.put(numbers, rows)
        np.testing.assert_array_equal(file.array, wanted)
        again = np.append(numbers, numbers[:1])  # a row may be read twice
        np.testing.assert_array_equal(file.take(again), wanted.reshape(10, 3)[again])
    assert file.array.dtype == file.take(np.arange(2)).dtype == dtype


@pytest.mark.parametrize(("shape", "dtype"), [((2, 5, 4), np.float32), (SHAPE, np.float64)])
def test_another_array_is_refused(tmp_path: Path, shape: tuple[int, ...], dtype):
    with pytest.raises(JaxpflError, match=r"rows.npy is damaged: it contains \(2, 5, 3\) of float32$"):
        RowFile.existing(made(tmp_path), shape, np.dtype(dtype))


def test_a_file_that_became_shorter(tmp_path: Path):
    path = made(tmp_path)
    file = RowFile.existing(path, SHAPE, np.dtype(np.float32))
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(JaxpflError, match=r"rows\.npy is damaged: it ends at byte"):
        file.take(np.array([0, 9]))
