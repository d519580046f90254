"""Seeded damage to files: odd numbers, types, shapes and nesting in what they say, or damage to their bytes."""

from __future__ import annotations

import copy
import io
import pickle
import random
import zipfile
from typing import Any

import numpy as np

ODD_NUMBERS = (0, 1, -1, 255, 256, 2**31 - 1, 2**31, 2**32, 2**32 + 1, -(2**31) - 1, 2**63, 2**64 + 1, 10**400)
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, "", "x", "\ud800", "\n", "é", 0.5, float("nan"), float("inf"), 1e308, -1e308),
    *([], [[]], [[1], [1, 2]], {}, {"a": 1}, [None], ["a"], [0.5], [[[[1]]]], {"target_tokens": [[0, "a"]]}),
    *ODD_NUMBERS[:-1],
)
ODD_TEXT = (
    *(",", ";", "\t", "|", ":", "=", "\n", "\r", "\0", '"', "'", "#", " ", "-", "+", ".", "\ufeff", "٣", "é", "😀"),
    *("nan", "inf", "1e999", "-1", "0", "99999999999999999999", "1e-400", "0x10", "1_000", "1,5", "NA", "qid:1", "1:"),
    *("[", "]", "{", "}", "&a ", "*a", "- ", "? ", "!!python/object:os.system ", "!!binary x", "[[x]]", '"""', "\\u00"),
    *("true", "null", "2020-01-01", "9" * 5000, "0" * 20 + "9" * 300, "a" * 140_000),
)


def damaged(rng: random.Random, content: bytes) -> bytes:
    """Some bytes changed, taken out, doubled, moved, or made a large number."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        size = len(data)
        at, length = rng.randrange(size + 1), rng.choice((1, 1, 2, 4, 8, rng.randint(0, 64)))
        kind = rng.randrange(7)
        if kind == 0 and size:
            data[at % size] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at : at + length] = rng.randbytes(length)
        elif kind == 2:
            del data[at : at + length]
        elif kind == 3:
            data[at:at] = data[at : at + length] * rng.choice((1, 2, 50))
        elif kind == 4:
            del data[at:]
        elif kind == 5:
            number = rng.choice((0, 1, 2**7, 2**8 - 1, 2**15, 2**31 - 1, 2**32 - 1, 2**63 - 1))
            width = rng.choice((1, 2, 4, 8))
            data[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, rng.choice(("little", "big")))
        else:
            other = rng.randrange(size + 1)
            data[at : at + length] = data[other : other + length]
    return bytes(data)


def damaged_text(rng: random.Random, content: bytes) -> bytes:
    """Odd tokens put in or in place of some characters; lines taken out, doubled or joined."""
    text = content.decode()
    for _ in range(rng.randint(1, 3)):
        at, length = rng.randrange(len(text) + 1), rng.choice((0, 1, 3, 10))
        odd = ODD_TEXT[-1] if rng.random() < 0.002 else rng.choice(ODD_TEXT[:-1])
        text = text[:at] + odd + text[at + length :]
        if rng.random() < 0.2:
            lines = text.splitlines(keepends=True)
            place = rng.randrange(len(lines))
            lines[place : place + 1] = rng.choice(([], [lines[place]] * 2, [lines[place].strip()]))
            text = "".join(lines)
    return text.encode()


def odd_tree(rng: random.Random, tree: Any) -> Any:
    """A tree of lists and dictionaries with some parts replaced by odd ones, doubled, or left out."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.randint(1, 3)):
        node, depth = tree, rng.randint(1, 8)
        while depth and isinstance(node, list | dict) and node:
            keys = list(node) if isinstance(node, dict) else range(len(node))
            key = rng.choice(keys)
            depth -= 1
            if depth and isinstance(node[key], list | dict) and node[key]:
                node = node[key]
                continue
            kind = rng.randrange(4)
            if kind < 2:
                node[key] = copy.deepcopy(rng.choice(ODD_VALUES))
            elif kind == 2:
                del node[key]
            elif isinstance(node, list):
                node.insert(rng.randrange(len(node) + 1), copy.deepcopy(node[key]))
            else:
                node[str(rng.choice(ODD_VALUES))] = copy.deepcopy(node[key])
            break
    return tree


_KINDS = "? i1 u1 i2 u2 i4 u4 i8 u8 >i8 f2 f4 f8 >f4 g c8 c16 m8[s] M8[D] S3 U3 V4 O i4,f8"


def odd_array(rng: random.Random, array: np.ndarray) -> np.ndarray:
    """An array of another type or shape, or with numbers at the ends of the range."""
    kind = rng.randrange(5)
    if kind == 0:
        dtype = np.dtype(rng.choice(_KINDS.split()))
        return np.zeros(array.shape, dtype) if rng.random() < 0.5 else np.ones(array.shape).astype(dtype)
    if kind == 1:
        return np.resize(array, [rng.choice((0, 1, 2, 3, 5)) for _ in range(rng.randint(0, 5))])
    if array.dtype.kind not in "biuf":
        return array[:-1] if array.ndim else array
    wide = array.astype(rng.choice(("i8", "u8", "f8")))
    if wide.size:
        number = rng.choice(ODD_NUMBERS[:-2])
        flat = wide.reshape(-1)
        flat[rng.randrange(wide.size)] = number if wide.dtype.kind == "f" else number % 2**63
    if kind == 2 and wide.dtype.kind == "f" and wide.size:
        wide.reshape(-1)[0] = rng.choice((np.nan, np.inf, 1e300, -np.inf))
    return wide


def npy(array: np.ndarray) -> bytes:
    """An .npy file of it."""
    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=True)
    return file.getvalue()


def archive(rng: random.Random, arrays: dict[str, np.ndarray]) -> bytes:
    """An .npz file of them, some odd, in any compression, its headers perhaps untrue."""
    arrays = dict(arrays)
    for _ in range(rng.randint(0, 2)):
        key = rng.choice(list(arrays))
        if rng.random() < 0.15:
            del arrays[key]
        else:
            arrays[key] = odd_array(rng, arrays[key])
        if not arrays:
            break
    file = io.BytesIO()
    methods = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
    (method,) = rng.choices(methods, (10, 10, 1, 1))
    with zipfile.ZipFile(file, "w", method) as out:
        for key, array in arrays.items():
            content = npy(array)
            if rng.random() < 0.1:
                content = damaged(rng, content[:128]) + content[128:]
            if rng.random() < 0.1:
                content = content.replace(b"(", rng.choice((b"(9", b"(-", b"((", b"(0x", b"(4000000000, ")), 1)
            out.writestr(f"{key}.npy", content)
    return file.getvalue()


def pickled(rng: random.Random, value: Any) -> bytes:
    """In any protocol; what is odd may be held many times, or hold itself."""
    if rng.random() < 0.6:
        value = odd_tree(rng, value)
        if rng.random() < 0.1:
            twice: Any = [1]
            for _ in range(rng.choice((5, 60))):
                twice = rng.choice((list, tuple))((twice, twice))
            value = rng.choice((twice, {"labels": twice, "data": 1}, [value, twice]))
        if rng.random() < 0.05:
            loop: list[Any] = []
            loop.append(loop)
            value = {"data": loop}
    return pickle.dumps(value, rng.randint(0, 5))
