"""What cannot be read, split, stacked or drawn from is refused in one line that names it."""

from __future__ import annotations

import gzip
import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import IRC, source_of

from jaxpfl import JaxpflError, federate, load, stack_clients
from jaxpfl.benchmarks.studies.elections import load_elections
from jaxpfl.benchmarks.studies.histogram import token_counts
from jaxpfl.data import TableOptions, plan_batches, pooled, set_apart, unseen
from jaxpfl.data.sources.planted import draw_planted, parse

PRICE, TAGS = TableOptions("price", "city"), TableOptions("calm,dry", "site")
HEAD = "city,area,heating,price\n"
ROWS = f"{HEAD}Bern,80,gas,10.5\nZug,60,oil,9.25\nBern,40,gas,7\nZug,90,gas,12\n"
TAG = "site,x,calm,dry,y\na,1,0,1,2.5\na,2,1,1,3\nb,3,0,0,4\nb,4,1,0,5\n"


def put(path: Path, content: Any) -> None:
    """Write bytes or text; an archive of arrays, JSON, or a pickle by the file's name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes | str):
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    elif path.suffix == ".npz":
        np.savez(path, **content)
    elif path.suffix == ".json":
        path.write_text(json.dumps(content))
    else:
        path.write_bytes(pickle.dumps(content, 2))


def idx(shape: tuple[int, ...], code: int = 8, cut: int = 0, more: bytes = b"") -> bytes:
    header = bytes((0, 0, code, len(shape))) + struct.pack(f">{len(shape)}I", *shape)
    return header + bytes(int(np.prod(shape)) - cut) + more


IDX = {"own/train-images-idx3-ubyte": idx((6, 4, 3)), "own/train-labels-idx1-ubyte": idx((6,))}
CIFAR = {f"cifar-10-batches-py/data_batch_{i}": {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 1]}
         for i in range(1, 6)}  # fmt: skip
X, Y = np.arange(96, dtype=np.uint8).reshape(6, 4, 4), np.array([0, 1, 2, 0, 1, 2])


def leaf(x: Any, y: Any) -> dict[str, Any]:
    return {"own/train/a.json": {"users": ["u"], "user_data": {"u": {"x": x, "y": y}}}}


def npz(**arrays: Any) -> dict[str, Any]:
    return {"a.npz": {"x_train": X, "y_train": Y} | arrays}


def tokens(path: Path) -> Any:
    return token_counts.read_counts_csv(path / "a.csv")


def irc(path: Path) -> Any:
    return token_counts.load_irc(str(path))


def counties(path: Path) -> Any:
    return load_elections(str(path))


def of(name: str, **how: Any) -> Callable[[Path], Any]:
    return lambda path: load(name, str(path), **how)


def table(options: TableOptions = PRICE, task: str | None = "regression") -> Callable[[Path], Any]:
    return of("csv:own.csv", table=options, task=task)


OF_LEAF, OF_NPZ, OF_IDX = of("leaf:own"), of("npz:a.npz"), of("idx:own")
FILES: list[tuple[dict[str, Any], Callable[[Path], Any], str]] = [
    ({"own.csv": ",\n"}, table(), "own.csv: the file is empty: no line has any value"),
    (
        {"own.csv": ROWS},
        table(TableOptions()),
        "set target to the column of the labels; the columns are city, area, heating",
    ),
    ({"own.csv": ROWS}, table(TableOptions("prize", "city")), "column of .*own.csv 'prize': did you mean 'price'"),
    ({"own.csv": ROWS}, table(PRICE._replace(encoding="base64")), "unknown encoding 'base64': use, for example, lat"),
    ({"own.csv": ROWS}, table(task="binary"), "column 'price' has 4 different values, not two classes"),
    ({"own.csv": ROWS}, table(task="multilabel"), "for one column, use classification, binary, ranking or"),
    ({"own.csv": ROWS + "Bern,1,gas,1e39\n"}, table(), "column 'price' contains a number beyond float32's range"),
    ({"own.csv": ROWS + "Bern,nan,gas,2\n"}, table(), "line 6: no value in column 'area': .* --missing drop"),
    ({"own.csv": ROWS + "Bern,1,gas,inf\n"}, table(), "line 6: column 'price' contains 'inf', but most other"),
    (
        {"own.csv": HEAD + "a,1,$1,2\nb,3,-$2.50,3\n"},
        table(),
        r"'heating' contains numbers with a percent or currency sign, .*'\$1'",
    ),
    (
        {"own.csv": HEAD + "".join(f"a,1,note {i},2\nb,1,note {i}b,3\n" for i in range(5))},
        table(),
        "column 'heating' has 10 different values in 10 rows, too many for categories",
    ),
    ({"own.csv": TAG}, table(TableOptions("calm,dry,calm"), None), "target names the column 'calm' twice"),
    (
        {"own.csv": "y,client\n1,a\n2,b\n"},
        table(TableOptions("y", "client"), "regression"),
        "no feature columns, only labels and clients: y, client",
    ),
    ({"own.csv": TAG}, table(TableOptions("calm,y"), "multilabel"), "line 2: 'multilabel' requires .* 0 or 1, .* 2.5"),
    ({}, of("digits", table=PRICE), "target applies to csv:FILE, not to digits"),
    ({"a.csv": "who,token,count\na,b,1\n"}, tokens, "user, token, count in any order, got header 'who,token,count'"),
    ({"a.csv": "user,token,count\n"}, tokens, "a.csv has a header but no counts below it"),
    ({"a.csv": "user,token,count\nann,a\n"}, tokens, "line 2 must have a user, a token and a count, got 'ann,a'"),
    ({"a.csv": "user,token,count\nann,a,0\n"}, tokens, "line 2: count must be a whole number from 1 to 2147483647"),
    ({"a.csv": "user,token,count\nann,a,3\nann,a,4\n"}, tokens, "line 3: user 'ann' has the token 'a' twice"),
    ({}, irc, r"file .* of data set 'irc' not found: put it there"),
    *(
        ({"irc/ubuntu_irc_user_counts.npz": IRC | change}, irc, message)
        for change, message in (
            ({"indptr": np.array([0, 2, 1, 3])}, "no token counts in compressed rows: .* non-decreasing"),
            ({"indices": np.array([0, 3, 1])}, "no token counts in compressed rows: .* < 3"),
            ({"indices": np.array([0, 0, 1])}, "a user has a token twice"),
        )
    ),
    *(
        ({"elections/county_winners_2000_2020.csv": text}, counties, message)
        for text, message in (
            ("fips,win_2016,win_2000\n01001,R,X\n", "line 2: win_2000 must be R or D, got 'X'"),
            ("fips,win_2016,win_2000\n1001,R,D\n", "line 2: fips must be five digits, got '1001'"),
            ("fips,win_2016,win_2000\n01001,R,D\n01001,R,D\n", "line 3: fips must be distinct"),
            ("county,win_2000,win_2004\n1,R,D\n", "needs a header with fips"),
            (b"\xff\xfd\x00fips,\x00", "line 1: byte 0xff is not UTF-8"),
        )
    ),
    ({}, of("femnist"), r"data set 'femnist' has no LEAF file \(\*.json\) in"),
    ({"own/train/a.json": '{"users": ['}, OF_LEAF, "a.json is truncated or not valid JSON"),
    ({"own/train/a.json": [1]}, OF_LEAF, "not a LEAF file: it has no 'user_data'"),
    ({"own/train/a.json": '{"user_data": {"a": 1, "a": 2}}'}, OF_LEAF, "'a' occurs twice in one object"),
    ({"own/train/a.json": {"users": ["a"], "user_data": {}}}, OF_LEAF, "user 'a' is listed but has no data"),
    (leaf([[1]], [0]) | {"own/train/b.json": leaf([[1]], [0])["own/train/a.json"]}, OF_LEAF, "user 'u' is in .*a.json"),
    ({"own/train/a.json": {"users": [], "user_data": {"a": 1}}}, OF_LEAF, "user 'a' has data but is not listed in"),
    (leaf([], []), OF_LEAF, "none of the users has any examples"),
    (leaf([[0.5, 1.0]], [1, 2]), OF_LEAF, "user 'u': 1 inputs but 2 labels"),
    (leaf([[0.5, float("nan")]], [1]), OF_LEAF, "user 'u': an input of example 0 is NaN"),
    (leaf([[1], [2**32]], [0, 1]), OF_LEAF, "inputs must be numbers, .*do not fit in 32 bits"),
    *((leaf([[1.0]], [y]), OF_LEAF, "labels must be integers (>= 0|from 0)") for y in (1.5, -1, [1], 10**30)),
    (leaf(["ab", "abc"], ["c", "d"]), OF_LEAF, "user 'u': inputs must be equally long, got 2 to 3 characters"),
    (leaf(["ab"], ["é"]), OF_LEAF, "the character 'é' is not in LEAF's alphabet of 80"),
    (
        leaf([[["w"]]], [{"target_tokens": [["w", "v"]]}]),
        OF_LEAF,
        "target_tokens and any count_tokens must be sequences of equal lengths",
    ),
    (leaf([[["w"]], "w"], [{"target_tokens": [["w"]]}] * 2), OF_LEAF, "must be lists of sequences"),
    (leaf([[["a"]]], [{"target_tokens": [["b"]], "count_tokens": [["x"]]}]), OF_LEAF, "count_tokens must be numbers"),
    (leaf([[[1, 2]]], [{"target_tokens": [[2, -3]]}]), OF_LEAF, r"tokens must be integers from 0 to 2"),
    (leaf([[0.5] * 9], [62]), of("leaf:own", task="next-token"), "images, but the task 'next-token' requires text"),
    (IDX | {"own/train-images-idx3-ubyte": idx((6, 4, 3), cut=5)}, OF_IDX, "is truncated: .* requires 72 bytes"),
    (IDX | {"own/train-images-idx3-ubyte": idx((6, 4, 3), more=b"x")}, OF_IDX, "is too long: .* requires 72 bytes"),
    (IDX | {"own/train-images-idx3-ubyte": b""}, OF_IDX, r"magic number is \(empty file\)"),
    (IDX | {"own/train-images-idx3-ubyte": gzip.compress(idx((6, 4, 3)))[:-12]}, OF_IDX, "truncated: its gzip stream"),
    (IDX | {"own/train-images-idx3-ubyte": b"\x1f\x8b" + b"\xff" * 40}, OF_IDX, "is damaged: "),
    (IDX | {"own/t10k-images-idx3-ubyte": idx((6, 4, 3))}, OF_IDX, r"no file t10k-labels-idx1-ubyte \(or .gz\) in"),
    ({}, of("mnist"), "no file train-images-idx3-ubyte .*mnist.*JAXPFL_DATA_DIR or --data-dir"),
    ({}, of("cifar10"), "it is a folder cifar-10-batches-py, a folder cifar-10-batches-bin, or a file cifar10.npz"),
    ({"cifar-10-python.tar.gz": b""}, of("cifar10"), "is still packed: run tar -xzf .*cifar-10-python.tar.gz -C"),
    (CIFAR, of("cifar10"), r"cannot read .*test_batch: No such file"),
    *(
        (CIFAR | {"cifar-10-batches-py/data_batch_2": batch}, of("cifar10"), message)
        for batch, message in (
            (pickle.dumps([1, 2])[:9], r"data_batch_2 is truncated or damaged \(\d+ bytes\)"),
            ([1, 2], "it contains a list, expected a dictionary"),
            ({b"labels": [1]}, r"has no 'data' \(it contains labels\)"),
            ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [10] * 2}, "labels are 10 to 10, expected 0 to 9"),
        )
    ),
    ({"cifar10.npz": {"x_train": X[:, :3, :3], "y_train": Y}}, of("cifar10"), r"must be uint8 \[N, 32, 32, 3\], got"),
    *(
        ({"own": text}, of("libsvm:own"), message)
        for text, message in (
            ("", "the file has no examples|not LIBSVM text"),
            ("+1 1:1e300\n-1 1:0\n", "an input of example 0 is NaN"),
            ("nan 1:1\n", "the label of example 0 is NaN, infinite"),
            ("1 2147483000:1\n2 1:1\n", "its contents need 48 GiB of memory"),
        )
    ),
    ({"own": "1 1:1\n2 1:2\n", "own.t": "3 1:1\n"}, of("libsvm:own"), "label 3 is not among the training labels"),
    ({"a.npz": {"a\nb": X}}, OF_NPZ, r"no array 'x_train' \(it contains 'a\\nb'\)"),
    ({"a.npz": b"no archive"}, OF_NPZ, "damaged or is not an .npz archive"),
    (npz(x_test=X), OF_NPZ, "must have both x_test and y_test"),
    (
        npz(y_train=Y[:3]),
        OF_NPZ,
        r"x_train must be numbers \[N, ...\] and y_train must be \[N\] or \[N, d\], got \(6, 4, 4\)",
    ),
    (npz(y_train=np.where(Y == 2, np.inf, 0.5)), OF_NPZ, r"y_train: the label of example \d is NaN, infinite"),
    (npz(y_train=np.zeros((6, 0), int)), OF_NPZ, r"a\.npz, y_train: labels must have shape .*got \(6, 0\)"),
    (npz(y_train=Y - 1), OF_NPZ, "y_train must be integers >= 0"),
    (npz(x_train=np.array([[1.7e9 + i, 1e300 * i] for i in range(6)])), OF_NPZ, "x_train: an input of example 1"),
    (npz(x_train=np.full((6, 3), 2**31), vocabulary=np.array(9)), OF_NPZ, "tokens in x_train must fit in 32 bits"),
    (
        npz(x_test=X[:, :2], y_test=Y),
        OF_NPZ,
        r"shape \(2, 4\) and type uint8 in x_test, but \(4, 4\) and uint8 in x_train",
    ),
    (npz(users_train=Y[:2]), OF_NPZ, r"must have a user \(integer or string\) for each of 6 examples"),
    ({"own/a": b"four"}, of("text:own", window=4), "a has 4 bytes, but a window of 4 requires 5: use a shorter window"),
    ({"own/a": b"caf\xe9 noir"}, of("text:own", window=4), r"a: byte 3 is not UTF-8, b'\\xe9 no': save the file"),
    ({}, of("text:own", window=0), "window must be >= 1, got 0"),
    ({}, of("digits", tokens=True), "tokens applies to npz:FILE and leaf:FOLDER, not to digits"),
    ({}, of("school"), "school.mat is missing: put it there"),
    ({"school/school.mat": b"MATLAB 5.0 MAT-file" + bytes(200)}, of("school"), r"school\.mat is not"),
    ({}, of("mnst"), "unknown data set 'mnst': did you mean 'mnist'"),
]


@pytest.mark.parametrize(("files", "read", "message"), FILES)
def test_files(tmp_path: Path, files: dict[str, Any], read: Callable[[Path], Any], message: str) -> None:
    for name, content in files.items():
        put(tmp_path / name, content)
    with pytest.raises(JaxpflError, match=message) as error:
        read(tmp_path)
    assert "\n" not in str(error.value)


TOY = source_of(np.arange(60) % 3)
USERS = np.repeat(np.arange(6), np.arange(1, 7))
OF_USERS = source_of(USERS % 3, users=USERS)
SUPER = source_of(np.arange(60) % 6, superclasses=np.array([2, 0, 1, 1, 0, 2]))


def split(source: Any = TOY, **how: Any) -> Callable[[], Any]:
    return lambda: federate(source, **{"partition": "iid", "clients": 4} | how)


def stacked(x: Any = None, y: Any = None, **how: Any) -> Callable[[], Any]:
    clients = [(np.full((n, 2), i + 1.0), np.arange(n) % 3) for i, n in enumerate((3, 5, 2))]
    clients[1] = (clients[1][0] if x is None else x, clients[1][1] if y is None else y)
    return lambda: stack_clients(clients, **how)


def trees(**change: Any) -> Callable[[], Any]:
    clients = [({"a": np.zeros((n, 4), int), "b": np.zeros(n)}, np.arange(n) % 3) for n in (3, 5)]
    clients[1] = clients[1][0] | change, clients[1][1]
    return lambda: stack_clients(clients)


def batches(*given: Any) -> Callable[[], Any]:
    return lambda: plan_batches(np.array(given[0]), *given[1:])


def drawn(text: str) -> Callable[[], Any]:
    return lambda: draw_planted(parse(f"planted:{text}"))


CLASSES, NATURAL = {"partition": "classes"}, {"partition": "natural", "clients": None}
CALLS: list[tuple[Callable[[], Any], str]] = [
    (split(partition="nearest"), "unknown partition 'nearest'"),
    (split(**CLASSES), "requires the number of classes per client"),
    (split(**CLASSES, classes_per_client=5), r"classes per client must be from 1 to 3 \(the number of classes\), got"),
    (split(**CLASSES, classes_per_client=1, clients=2), "2 clients with 1 classes each cannot hold all 3 classes"),
    (split(**CLASSES, classes_per_client=2, clients=59), r"class \d has 20 examples, too few for \d+ clients"),
    (split(**CLASSES, classes_per_client=2, min_examples=3), "takes min_examples only with sigma"),
    (split(clients=0), "clients must be at least 1, got 0"),
    (split(clients=61), "1 of 61 clients have no training data .* drop_empty"),
    (split(clients=None), "the partition 'iid' requires the number of clients"),
    (split(alpha=1.0), "the partition 'iid' does not take alpha = 1.0: it takes no options"),
    (split(partition="shards", clients=7, shards_per_client=9), "7 clients with 9 shards each require 63 examples"),
    (split(partition="dirichlet"), "requires alpha"),
    (split(partition="dirichlet", alpha=0.0), "alpha must be > 0.*, got 0"),
    (
        split(partition="dirichlet-class", alpha=1.0, min_examples=16),
        r"must be from 0 to 15 for 4 clients and 60 examples",
    ),
    (  # of one class, so that the thousand draws take little time
        split(source_of(np.zeros(60, int)), partition="dirichlet-class", alpha=1e-3, min_examples=14),
        "none of 1000 Dirichlet splits gave each",
    ),
    (split(partition="lognormal", sigma=-1.0), "sigma must be >= 0.*, got -1"),
    (
        split(SUPER, partition="superclasses", superclasses_per_client=4),
        r"superclasses per client must be from 1 to 3 \(the number of superclasses\), got 4",
    ),
    (split(SUPER._replace(superclasses=np.zeros(3, int))), r"superclasses must have shape \[6\]"),
    (split(partition="clusters", clusters=5), r"clusters must be from 1 to 4 \(the number of clients\), got 5"),
    (
        split(source_of(np.arange(9) % 2), partition="clusters", clusters=3),
        r"2 \(the number of permutations of 2 classes\), got",
    ),
    (split(OF_USERS, partition="natural", clients=7), "require 7 users, but there are only 6: use at most 6 clients"),
    (split(OF_USERS, **NATURAL, users_per_client=0), "users_per_client must be at least 1, got 0"),
    (split(OF_USERS._replace(users_train=np.arange(3))), "users must be integers, one for each example"),
    (split(OF_USERS._replace(persons=np.arange(3))), "train: persons must be integers, one for each example"),
    (split(TOY._replace(persons=np.arange(60), ordered=True)), "persons cannot be kept together with ordered examples"),
    (
        split(TOY._replace(persons=np.arange(60), x_test=TOY.x_train, y_test=TOY.y_train)),
        "persons cannot be kept together with a test set whose persons are unknown",
    ),
    (split(test_share=1.0), "test_share must be >= 0 and < 1, got 1"),
    (split(split_seed=-1), "split_seed must be at least 0, got -1"),
    (split(TOY._replace(num_classes=2)), r"labels must be from 0 to 1"),
    (split(TOY._replace(y_train=np.stack([TOY.y_train] * 2, 1))), r"must be integers \[N\], got int\d+ \[60, 2\]"),
    (split(TOY._replace(x_test=TOY.x_train)), "give both x_test and y_test, or neither"),
    (split(TOY._replace(y_train=TOY.y_train[:5])), "60 inputs but 5 labels"),
    (split(TOY._replace(x_train=np.where(TOY.x_train == 17, np.nan, 1))), "toy', train: an input of example 17 is NaN"),
    (split(TOY._replace(inputs="tokens"), standardize=True), "standardize applies to features: toy contains tokens"),
    (
        lambda: unseen(source_of(USERS, USERS, users=USERS, users_test=USERS)),
        "all its test users have training examples",
    ),
    (lambda: set_apart(split()(), 4), "at least 1 and fewer than all 4, got 4"),
    (stacked(x=np.ones((5, 3))), r"client 1, train: one input has shape \(3,\).*\(2,\)"),
    (stacked(x=np.ones((4, 2))), "client 1, train: 4 inputs but 5 labels"),
    (stacked(x=np.full((5, 2), "a")), "client 1, train: inputs must be real numbers"),
    (stacked(x=[[1.0], [1.0, 2.0]]), "client 1, train: cannot convert inputs or labels to an array"),
    (stacked(x=np.where(np.arange(10).reshape(5, 2) == 7, np.inf, 1)), "client 1, train: an input of example 3 is NaN"),
    (stacked(y=np.full(5, True)), "client 1, train: labels must be integers >= 0, or floats for regression, got bool"),
    (stacked(y=np.array([0.5, 1e300, 2, 3, 4])), "client 1, train: the label of example 1 is NaN, infinite"),
    (stacked(y=np.array([0, 1, -2, 0, 1])), "client 1, train: labels must be integers .*got -2"),
    (stacked(y=np.zeros((5, 1), int)), r"client 1, train: one label has shape \(1,\).*have \(\)"),
    (stacked(x=np.zeros((0, 2)), y=[]), r"1 of 3 clients have no training data \(namely 1\): .*--drop-empty"),
    (stacked(x=np.zeros((5, 2)) + np.nan, client_ids=[7, 40, 2]), "client 40, train: an input of example 0"),
    (stacked(test=[(np.ones((1, 2)), [0])]), "test must have an entry for each of 3 clients, as train has, got 1"),
    (trees(a=np.full((5, 4), 2**31)), "client 1, train: integer inputs must fit in 32 bits"),
    (lambda: stack_clients([({}, np.zeros(2, int))]), "client 0, train: inputs must contain an array"),
    (batches([5], 1, 3, "epochs"), "unknown draw 'epochs': did you mean 'epoch'"),
    (batches([0, 0], 1, 3), "no client has training examples"),
    (batches([2**23 + 1], 1, 3), "8388609 examples; at most 8388608"),
    (drawn("cluster=2"), "unknown setting of planted 'cluster': did you mean 'clusters'"),
    (drawn("clusters"), "the data set must be NAME or NAME:argument=value,..., with each argument once"),
    (drawn("clients=3"), r"planted:clusters must be at most planted:clients = 3, got 5"),
    (lambda: token_counts.groups(np.random.default_rng(), 9, 0.6, 0.5), "shares of users set apart must be > 0"),
    (lambda: token_counts.groups(np.random.default_rng(), 2, 0.2, 0.1), "2 users cannot be divided into 3 groups"),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_calls(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(JaxpflError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_a_pooled_source_is_not_pooled_again() -> None:
    together = pooled(source_of(USERS % 3, USERS % 3, users=USERS, users_test=USERS + 6))
    assert (len(together.y_train), together.x_test, len(np.unique(together.users_train))) == (42, None, 12)
    assert pooled(together) is together
