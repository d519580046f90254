"""Damages files on purpose, seeded, and reads them in a process of little memory: only a `JaxpflError` may come out.

``python mutations.py READER COUNT [FIRST]`` reads so many damaged files, and prints what came out as JSON. A file is
damaged in what it says (odd numbers, types, shapes, nesting), in its bytes, or in both. Case i depends on i alone.
"""

from __future__ import annotations

import collections
import copy
import functools
import gzip
import io
import json
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpfl.data import stack_clients, stored
from jaxpfl.data.sources import idx, leaf, libsvm, npz, pickles, token_files
from jaxpfl.data.sources.cifar import load_cifar
from jaxpfl.data.sources.elections import FILE, load_elections
from jaxpfl.engine import model_files
from jaxpfl.errors import JaxpflError
from jaxpfl.experiment import config_file, graph_file, warm_start
from jaxpfl.studies.own_data import client_csv

SPARE = 2**30
"""Bytes of address space that a reader may take beside what its libraries have."""

SLOWEST = 10.0
"""Seconds of CPU for one file of some kilobytes; a hang is a failure."""

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


class Slow(BaseException):
    """The alarm: not an Exception, which a reader may catch."""


class Reader(NamedTuple):
    """A reader under test.

    Attributes:
      make: ``rng -> content`` of a file that may be odd in what it says, or good.
      read: ``path -> anything``.
      name: the file's, below the case's folder.
      text: whether bytes are damaged as text is.
    """

    make: Callable[[random.Random], bytes]
    read: Callable[[Path], Any]
    name: str
    text: bool = False


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


def some_dtype(rng: random.Random) -> np.dtype:
    kinds = [
        "?",
        "i1",
        "u1",
        "i2",
        "u2",
        "i4",
        "u4",
        "i8",
        "u8",
        ">i8",
        "f2",
        "f4",
        "f8",
        ">f4",
        "g",
        "c8",
        "c16",
        "m8[s]",
        "M8[D]",
        "S3",
        "U3",
        "V4",
        "O",
        "i4,f8",
    ]
    return np.dtype(rng.choice(kinds))


def odd_array(rng: random.Random, array: np.ndarray) -> np.ndarray:
    """An array of another type or shape, or with numbers at the ends of the range."""
    kind = rng.randrange(5)
    if kind == 0:
        dtype = some_dtype(rng)
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
            member = io.BytesIO()
            np.lib.format.write_array(member, array, allow_pickle=True)
            content = member.getvalue()
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


RNG = np.random.default_rng(0)
IMAGES = bytes((0, 0, 8, 3)) + np.array([2, 3, 4], ">u4").tobytes() + bytes(range(24))
BATCH = {
    "data": RNG.integers(0, 256, (2, 3072), dtype=np.uint8),
    "fine_labels": [3, 40],
    "coarse_labels": [0, 7],
    "filenames": ["a", "b"],
}
ARRAYS = {
    "x_train": RNG.integers(0, 256, (3, 2, 2), dtype=np.uint8),
    "y_train": np.array([0, 1, 1]),
    "users_train": np.array([4, 4, 5]),
    "x_test": RNG.integers(0, 256, (2, 2, 2), dtype=np.uint8),
    "y_test": np.array([1, 0]),
    "users_test": np.array([5, 4]),
}
IRC = {
    "indptr": np.array([0, 2, 2, 3]),
    "indices": np.array([0, 2, 1], np.int32),
    "counts": np.array([3, 1, 9], np.int32),
    "vocab": np.array(["a", "b", "c"]),
}
MODEL = {"dense0/kernel": np.zeros((2, 3), np.float32), "dense0/bias": np.zeros(3, np.float32)}
NUMBERS = {"u": {"x": [[0.5, 1], [2, 3]], "y": [0, 1]}, "v": {"x": [[4, 5]], "y": [1]}}
LETTERS = {"u": {"x": ["To be", "o be "], "y": [" ", "o"]}}
WORDS = {
    "u": {
        "x": [[["<BOS>", "a", "b"], ["b", "<EOS>", "<PAD>"]]],
        "y": [
            {"target_tokens": [["a", "b", "b"], ["<EOS>", "<PAD>", "<PAD>"]], "count_tokens": [[1, 1, 1], [1, 0, 0]]}
        ],
    },
    "v": {"x": [[["a", "b"]]], "y": [{"target_tokens": [["b", "a"]]}]},
}
TOKENS = {"u": {"x": [[[1, 2, 3]]], "y": [{"target_tokens": [[2, 3, 4]]}]}}
LIBSVM = b"-1 1:0.5 3:1\n+1 2:1e-3 4:-2 # c\n-1 1:1 2:2 3:3\n"
COUNTS = b"user,token,count\nu,the,3\nu,a,1\nv,the,12\n"
CLIENTS = b"client,value\na,1.5\na,2\nb,-3e2\nc,0.25\n"
WIDE = b"a;1,5;2,25\nb;3,5;4\n"
EDGES = b"client,neighbour\n0,1\n1,2\n0,3\n"
COUNTIES = b"fips,name,win_2000,win_2004\n01001,A,R,D\n01003,B,R,R\n"
CONFIG = {"data": "digits", "rounds": 20, "lr": 0.1, "plan": {"clients": 4}, "set": {"adaped": {"lam": 0.5}}}
TOML = b'data = "digits"\nrounds = 20\nlr = 1e-1\nmethods = ["local"]\n[plan]\nclients = 4\n[set.adaped]\nlam = 0.5\n'
YAML = (
    b"data: digits\nrounds: 20\nlr: 1e-1\nmethods: [local, &a adaped]\nplan: {clients: 4}\nset:\n  adaped: {lam: 0.5}\n"
)
LAUGHS = (
    b"a: &a [x, x]\n" + b"".join(b"%c: &%c [*%c, *%c]\n" % (c, c, c - 1, c - 1) for c in range(98, 123)) + b"lr: *z\n"
)


def leaf_file(*users: dict[str, Any]) -> Callable[[random.Random], bytes]:
    def make(rng: random.Random) -> bytes:
        data = rng.choice(users)
        tree: Any = {"users": list(data), "num_samples": [1], "user_data": data}
        return json.dumps(odd_tree(rng, tree) if rng.random() < 0.8 else tree).encode()

    return make


def of(*contents: bytes) -> Callable[[random.Random], bytes]:
    return lambda rng: rng.choice(contents)


def folder_of(path: Path, levels: int) -> Path:
    return path.parents[levels]


@functools.cache
def saved() -> tuple[tempfile.TemporaryDirectory[str], Path]:
    """A good federation, in a folder that goes with the process."""
    folder = tempfile.TemporaryDirectory()
    clients = [(np.ones((n, 2)), np.arange(n)) for n in (3, 1, 4)]
    stored.save_federation(stack_clients(clients, clients), Path(folder.name) / "f")
    return folder, Path(folder.name) / "f"


def manifest(rng: random.Random) -> bytes:
    tree = json.loads((saved()[1] / stored.MANIFEST).read_text())
    return json.dumps(odd_tree(rng, tree) if rng.random() < 0.9 else tree).encode()


def opened(path: Path) -> stored.Stored:
    """The federation whose manifest is the damaged one."""
    for file in saved()[1].glob("*.npy"):
        shutil.copyfile(file, path.with_name(file.name))
    return stored.open_stored(path.parent)


READERS: dict[str, Reader] = {
    "idx": Reader(of(IMAGES, gzip.compress(IMAGES, mtime=0)), lambda p: idx.read_idx(p, 3), "a"),
    "pickle": Reader(
        lambda r: pickled(r, BATCH | {"n": np.int64(3), "more": [{}, (1.5, None)]}), pickles.read_pickle, "a"
    ),
    "cifar": Reader(
        lambda r: pickled(r, BATCH), lambda p: load_cifar("cifar100", folder_of(p, 1)), "cifar-100-python/train"
    ),
    "npz": Reader(lambda r: archive(r, ARRAYS), lambda p: npz.load_npz("npz:a", p), "a.npz"),
    "npz in files": Reader(lambda r: archive(r, ARRAYS), lambda p: npz.load_npz("npz:a", p, in_files=True), "a.npz"),
    "irc": Reader(
        lambda r: archive(r, IRC),
        lambda p: token_files.load_irc(str(folder_of(p, 1))),
        "irc/ubuntu_irc_user_counts.npz",
    ),
    "model": Reader(lambda r: archive(r, MODEL), lambda p: model_files.nested(warm_start.read(str(p))), "a.npz"),
    "leaf": Reader(
        leaf_file(NUMBERS, LETTERS, WORDS, TOKENS),
        lambda p: leaf.load_leaf("leaf:a", folder_of(p, 1)),
        "train/a.json",
        True,
    ),
    "leaf in files": Reader(
        leaf_file(NUMBERS, LETTERS, WORDS, TOKENS),
        lambda p: leaf.load_leaf("leaf:a", folder_of(p, 1), in_files=True),
        "train/a.json",
        True,
    ),
    "federation": Reader(manifest, opened, "f/federation.json", True),
    "leaf counts": Reader(
        leaf_file(WORDS, TOKENS), lambda p: token_files.read_leaf_counts(folder_of(p, 1)), "train/a.json", True
    ),
    "libsvm": Reader(of(LIBSVM), lambda p: libsvm.load_libsvm("libsvm:a", "a", folder_of(p, 0)), "a", True),
    "token counts": Reader(of(COUNTS), token_files.read_counts_csv, "a.csv", True),
    "clients": Reader(of(CLIENTS, WIDE), client_csv.read, "a.csv", True),
    "graph": Reader(of(EDGES), lambda p: graph_file.read(p, np.arange(5)), "a.csv", True),
    "elections": Reader(of(COUNTIES), lambda p: load_elections(str(folder_of(p, 1))), f"elections/{FILE}", True),
    "toml": Reader(of(TOML), config_file.read, "a.toml", True),
    "yaml": Reader(of(YAML, YAML, YAML, YAML, LAUGHS), config_file.read, "a.yaml", True),
    "json": Reader(
        lambda r: json.dumps(odd_tree(r, CONFIG | {"methods": ["local"]})).encode(), config_file.read, "a.json", True
    ),
}


def content_of(reader: Reader, case: int) -> bytes:
    """The file of one case."""
    rng = random.Random(case)
    content = reader.make(rng)
    if rng.random() < 0.7:
        content = damaged_text(rng, content) if reader.text and rng.random() < 0.7 else damaged(rng, content)
    return content


def run(name: str, count: int, first: int) -> dict[str, Any]:
    """Outcomes of ``count`` cases: read, refused, and failures."""

    def alarm(number: int, frame: Any) -> None:
        raise Slow

    reader, outcomes = READERS[name], collections.Counter()
    failures: list[str] = []
    signal.signal(signal.SIGPROF, alarm)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE, resource.getrlimit(resource.RLIMIT_AS)[1]))
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "here") / reader.name
        path.parent.mkdir(parents=True)
        if name == "cifar":
            path.with_name("test").write_bytes(pickle.dumps(BATCH))
        for case in range(first, first + count):
            path.write_bytes(content_of(reader, case))
            signal.setitimer(signal.ITIMER_PROF, SLOWEST)
            try:
                reader.read(path)
                outcomes["read"] += 1
            except JaxpflError as error:
                outcomes["refused"] += 1
                if "\n" in str(error) or len(str(error)) > 1000:
                    failures.append(f"case {case}: no line of text: {str(error)[:200]!r}")
            except (Exception, Slow) as error:
                outcomes[type(error).__name__] += 1
                failures.append(f"case {case}: {type(error).__name__}: {str(error)[:200]}")
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
    return {"outcomes": dict(outcomes), "failures": failures[:10], "number": len(failures)}


if __name__ == "__main__":
    started = time.process_time()
    found = run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    print(json.dumps(found | {"seconds": round(time.process_time() - started, 1)}))
