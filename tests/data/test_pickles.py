"""Pickles: what arrays need is read, whoever wrote it; anything else is refused before it runs."""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpfl.data.sources.pickles import read_pickle
from jaxpfl.support.errors import JaxpflError

ARRAYS = {
    "bytes": np.arange(12, dtype=np.uint8).reshape(3, 4),
    "fortran": np.asfortranarray(np.arange(12, dtype=np.int64).reshape(3, 4)),
    "big endian": np.arange(5, dtype=">i4"),
    "floats": np.linspace(0, 1, 7, dtype=np.float32),
    "flags": np.array([True, False]),
    "empty": np.zeros((0, 3)),
    "slice": np.arange(10)[::3],
}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_every_protocol(tmp_path: Path, protocol: int, name: str) -> None:
    path = tmp_path / "a.pkl"
    content = {"x": ARRAYS[name], "n": np.int64(7), "names": ["a", ("b", 1.5)], "none": None, "raw": b"\xff\0"}
    content["counts"] = collections.Counter("aab")
    path.write_bytes(pickle.dumps(content, protocol))
    read = read_pickle(path)
    assert read["x"].dtype == ARRAYS[name].dtype
    np.testing.assert_array_equal(read["x"], ARRAYS[name])
    assert read["counts"] == {"a": 2, "b": 1}
    assert (read["n"], read["names"], read["none"], read["raw"]) == (7, ["a", ("b", 1.5)], None, b"\xff\0")


def python2_pickle(data: np.ndarray, labels: list[int]) -> bytes:
    """A dictionary as Python 2's cPickle wrote it, protocol 2: byte strings, and NumPy's old module names."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R"
    dtype += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) * 2 + number(0) + b"tb"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n" + number(0) + b"\x85" + text(b"b") + b"\x87R"
    )
    shape = number(data.shape[0]) + number(data.shape[1]) + b"\x86"
    array += b"(" + number(1) + shape + dtype + b"\x89" + text(data.tobytes()) + b"tb"
    items = text(b"data") + array + text(b"labels") + b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}(" + items + b"u."


def test_a_pickle_of_python_2(tmp_path: Path) -> None:
    data = np.arange(600, dtype=np.uint8).reshape(2, 300)
    (tmp_path / "batch").write_bytes(python2_pickle(data, [3, 4]))
    read = read_pickle(tmp_path / "batch")
    np.testing.assert_array_equal(read[b"data"], data)
    assert read[b"labels"] == [3, 4]


class Evil:
    """Pickles as a call of anything."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    ("function", "mode"), [(os.system, ()), (eval, ()), (open, ("w",))], ids=["system", "eval", "open"]
)
def test_a_malicious_pickle_is_refused_and_does_nothing(
    tmp_path: Path, protocol: int, function: Any, mode: tuple[str, ...]
) -> None:
    path, trace = tmp_path / "data_batch_1", tmp_path / "trace"
    argument = {"system": f"touch {trace}", "eval": f"open({str(trace)!r}, 'w')"}.get(function.__name__, str(trace))
    path.write_bytes(pickle.dumps({"data": np.zeros(3), "labels": Evil(function, argument, *mode)}, protocol))
    for _ in range(2):  # no earlier file has loosened anything
        with pytest.raises(JaxpflError, match=rf"{function.__name__}.*nothing was executed") as error:
            read_pickle(path)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"cnumpy\nload\n.", "asks for numpy.load"),
        (b"cnumpy.core.multiarray\nfromfile\n.", "asks for numpy.core.multiarray.fromfile"),
        (b"cfunctools\npartial\n.", "asks for functools.partial"),
        (b"cjaxpfl.data.sources.pickles\n_Array\n.", "asks for jaxpfl.data.sources.pickles._Array"),
        (b"\x8c\x05numpy\x8c\x11ndarray.__class__\x93.", "asks for numpy.ndarray.__class__"),
        (b"Pobject 1\n.", "asks for a persistent object"),
        (b"", r"truncated or damaged \(0 bytes\)"),
        (b"no pickle at all", "truncated or damaged"),
        (pickle.dumps(ARRAYS["bytes"])[:-9], "truncated or damaged"),
        (pickle.dumps({"a": [1, 2, 3]})[:-1], "truncated or damaged"),
        (pickle.dumps(np.array([{}], dtype=object)), "elements of type 'O8'"),
        (pickle.dumps(np.zeros(2, "i4,f8")), "elements of type"),
        (b"cnumpy\nndarray\n.", "a bare type"),
        # A state that tries to change what the name leads to.
        (b"cnumpy\nndarray\n}X\x04\x00\x00\x00makeX\x01\x00\x00\x00xsb.", "truncated or damaged"),
        (b"](h\x00q\x00.", "truncated or damaged"),
    ],
)
def test_other_pickles(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    with pytest.raises(JaxpflError, match=message) as error:
        read_pickle(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("as_key", [False, True])
def test_parts_that_are_held_twice_over_and_over(tmp_path: Path, kind: type, as_key: bool) -> None:
    """Sixty levels of two are 2^60 parts: to walk through them, or to hash them as a key, never ends."""
    twice: Any = kind((1,))
    for _ in range(60):
        twice = kind((twice, twice))
    content = pickle.dumps(twice, 2)
    if as_key:  # {twice: None}, without making it here
        content = content[:2] + b"}" + content[2:-1] + b"Ns."
    path = tmp_path / "a"
    path.write_bytes(content)
    with pytest.raises(JaxpflError, match="truncated or damaged"):
        read_pickle(path)


def test_parts_that_are_held_several_times_are_the_same_ones(tmp_path: Path) -> None:
    array, names = np.arange(3), ["a", "b"]
    (tmp_path / "a").write_bytes(pickle.dumps([array, array, names, {"names": names}]))
    read = read_pickle(tmp_path / "a")
    assert read[0] is read[1]
    assert read[2] is read[3]["names"]
    np.testing.assert_array_equal(read[0], array)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02Nr\xff\xff\xff\xff.",  # a memo of 2^32 places
        b"\x80\x04\x96" + (2**33).to_bytes(8, "little") + b"x.",
        b"\x80\x04\x8e" + (2**33).to_bytes(8, "little") + b"x.",
        b"\x80\x02cnumpy.core.numeric\n_frombuffer\n(J\xff\xff\xff\x7fcnumpy\ndtype\n(U\x02u1tRK\x01\x85U\x01CtR.",
    ],
    ids=["memo", "bytearray", "bytes", "bytes(n)"],
)
def test_a_few_bytes_cannot_take_gigabytes(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    tracemalloc.start()
    with contextlib.suppress(JaxpflError):
        read_pickle(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22
