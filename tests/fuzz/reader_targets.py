"""Readers of data sets and settings, each with files that are good or odd in what they say."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.io
from fuzz_target import Target, of_file, of_folder, whole
from mutate import archive, odd_array, odd_tree, pickled

from jaxpfl.benchmarks.studies.elections import ELECTIONS_FILE, load_elections
from jaxpfl.benchmarks.studies.histogram import token_counts
from jaxpfl.data import load, stack_clients, stored
from jaxpfl.data.sources import csv_text, idx, leaf, libsvm, npz, pickles, tables
from jaxpfl.data.sources.cifar import load_cifar
from jaxpfl.data.sources.natural import load_school
from jaxpfl.engine import model_files
from jaxpfl.runs import config, export, setup
from jaxpfl.studies import normal_means, own_clients

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
DECIMAL_COMMAS = b"value;id\n1,5;a\n2,25;a\n4;b\n"
TABLE = b"city,area,heating,price\nBern,81.5,gas,512.25\nZug,64.0,pump,731.5\nBern,70,gas,600\nZug,50,gas,555.5\n"
SUMMARIES = (
    b"client,estimate,se\na,1.5,0.2\nb,-2,0.5\nc,0.25,1e-3\n",
    b"successes;trials;id\n3;10;a\n0;4;b\n7;7;c\n",
    b"id,count,exposure\na,3,1.5\nb,0,2\n",
)
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


def federation(folder: Path) -> None:
    """A good federation of three clients."""
    clients = [(np.ones((n, 2)), np.arange(n)) for n in (3, 1, 4)]
    stored.save_federation(stack_clients(clients, clients), folder / "f")


def opened(folder: Path) -> stored.Stored:
    found = stored.open_stored(folder / "f", check=True)
    for split in (found.federation.train, found.federation.test):
        split.check()
    return found


def school(rng: random.Random) -> bytes:
    """A MATLAB file of three schools, perhaps with odd arrays, or none at all."""
    cells = {name: np.empty((1, 3), object) for name in ("X", "Y")}
    for i, pupils in enumerate((2, 1, 3)):
        cells["X"][0, i] = RNG.normal(size=(pupils, 4))
        cells["Y"][0, i] = np.full((pupils, 1), 10.0 + i)
    for _ in range(rng.randint(0, 2)):
        name = rng.choice(("X", "Y"))
        odd = odd_array(rng, rng.choice(list(cells[name].flat)))
        if odd.dtype.kind in "mMgcOV":
            odd = np.array(["text"])
        if rng.random() < 0.2:
            cells[name] = odd  # no cell array
            break
        cells[name][0, rng.randrange(3)] = odd
    file = io.BytesIO()
    scipy.io.savemat(file, cells, do_compression=rng.random() < 0.5)
    return file.getvalue()


def table(path: Path) -> Any:
    """A table of one's own, by columns that most damage leaves."""
    return whole(tables.load_table("csv:a", path, tables.TableOptions("price", "city")))


def summaries(path: Path) -> Any:
    found = normal_means.read(csv_text.read(path))
    assert np.isfinite(found.first).all()
    assert (found.second > 0).all()
    assert len(found.names) == len(set(found.names)) == len(found.first) == len(found.second)
    return found


def graph(path: Path) -> Any:
    found = setup.read_graph(path, np.arange(5))
    assert (np.stack([found.first, found.second]) < 5).all()
    assert (found.first != found.second).all()
    return found


def cifar_test(folder: Path) -> None:
    (folder / "cifar-100-python").mkdir()
    (folder / "cifar-100-python" / "test").write_bytes(pickle.dumps(BATCH))


LEAVES = leaf_file(NUMBERS, LETTERS, WORDS, TOKENS)
READERS: dict[str, Target] = {
    "idx": of_file(of(IMAGES, gzip.compress(IMAGES, mtime=0)), lambda p: idx.read_idx(p, 3), "a"),
    "pickle": of_file(
        lambda r: pickled(r, BATCH | {"n": np.int64(3), "more": [{}, (1.5, None)]}), pickles.read_pickle, "a"
    ),
    "cifar": of_file(
        lambda r: pickled(r, BATCH),
        lambda p: whole(load_cifar("cifar100", p.parents[1])),
        "cifar-100-python/train",
        begin=cifar_test,
    ),
    "npz": of_file(lambda r: archive(r, ARRAYS), lambda p: whole(npz.load_npz("npz:a", p)), "a.npz"),
    "npz in files": of_file(
        lambda r: archive(r, ARRAYS), lambda p: whole(npz.load_npz("npz:a", p, in_files=True)), "a.npz"
    ),
    "irc": of_file(
        lambda r: archive(r, IRC), lambda p: token_counts.load_irc(str(p.parents[1])), "irc/ubuntu_irc_user_counts.npz"
    ),
    "model": of_file(
        lambda r: archive(r, MODEL), lambda p: model_files.nested(export.read_parameters(str(p))), "a.npz"
    ),
    "leaf": of_file(LEAVES, lambda p: whole(leaf.load_leaf("leaf:a", p.parents[1])), "train/a.json", text=True),
    "leaf in files": of_file(
        LEAVES, lambda p: whole(load(f"leaf:{p.parents[1]}", in_files=True)), "train/a.json", text=True
    ),
    "federation": of_folder(federation, opened, ("f/*",), share=0.5),
    "leaf counts": of_file(
        leaf_file(WORDS, TOKENS), lambda p: token_counts.read_leaf_counts(p.parents[1]), "train/a.json", text=True
    ),
    "libsvm": of_file(
        of(LIBSVM), lambda p: whole(libsvm.load_libsvm("libsvm:a", "a", p.parent)), "a", text=True, share=0.5
    ),
    "csv table": of_file(of(TABLE), table, "a.csv", text=True),
    "token counts": of_file(of(COUNTS), token_counts.read_counts_csv, "a.csv", text=True),
    "clients": of_file(of(CLIENTS, DECIMAL_COMMAS), own_clients.read, "a.csv", text=True),
    "summaries": of_file(of(*SUMMARIES), summaries, "a.csv", text=True),
    "graph": of_file(of(EDGES), graph, "a.csv", text=True),
    "elections": of_file(
        of(COUNTIES), lambda p: load_elections(str(p.parents[1])), f"elections/{ELECTIONS_FILE}", text=True
    ),
    "school": of_file(school, lambda p: whole(load_school(p.parents[1])), "school/school.mat"),
    "toml": of_file(of(TOML), config.read, "a.toml", text=True),
    "yaml": of_file(of(YAML, YAML, YAML, YAML, LAUGHS), config.read, "a.yaml", text=True, share=0.5),
    "json": of_file(
        lambda r: json.dumps(odd_tree(r, CONFIG | {"methods": ["local"]})).encode(), config.read, "a.json", text=True
    ),
}
