"""LEAF's JSON and other data sets with natural clients: ragged users, schools, counties, token counts."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import IRC, real
from scipy.io import savemat

from jaxpfl.benchmarks.studies.elections import load_elections
from jaxpfl.benchmarks.studies.histogram import simulated_users, token_counts
from jaxpfl.benchmarks.studies.histogram.token_counts import TokenCounts
from jaxpfl.data import available, federate, federate_unseen, load, seen
from jaxpfl.data.sources.leaf import ALL_LETTERS, PAD
from jaxpfl.runs.data_sets import preset
from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError, JaxpflWarning

RNG = np.random.default_rng(5)
SIZES = {"f0003_41": 5, "f0001_12": 1, "f0002_07": 8}
"""Ragged writers, not in alphabetical order, one with a single example."""


def write(path: Path, users: dict[str, tuple[list, Any]], **more: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(users),
        "num_samples": [len(x) for x, _ in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }
    path.write_text(json.dumps(content | more))


def writers(sizes: dict[str, int] = SIZES, d: int = 784) -> dict[str, tuple[list, list]]:
    """Images whose first pixel tells the example."""
    made = {}
    for user, n in sizes.items():
        x = RNG.uniform(size=(n, d)).round(3)
        made[user] = (x.tolist(), RNG.integers(62, size=n).tolist())
    return made


@pytest.mark.parametrize("in_files", [False, True])
def test_whole_numbers_are_numbers_and_classes_keep_their_names(tmp_path: Path, in_files: bool) -> None:
    users = {"a": ([[0, 1], [1, 1]], [5, 10**6]), "b": ([[0.5, 1], [1, 0]], [7, 5])}
    write(tmp_path / "own" / "train" / "a.json", users)
    source = load("leaf:own", str(tmp_path), in_files=in_files)
    assert (source.inputs, source.x_train.dtype, source.num_classes) == ("features", np.float32, 3)
    np.testing.assert_array_equal(source.y_train, [0, 2, 1, 0])
    assert source.class_names.tolist() == [5, 7, 10**6]
    with pytest.raises(JaxpflError, match="user 'b': tokens must be integers, got float64"):
        load("leaf:own", str(tmp_path), in_files=in_files, tokens=True)
    write(tmp_path / "own" / "train" / "a.json", {"a": users["a"]})
    assert load("leaf:own", str(tmp_path), in_files=in_files, tokens=True).inputs == "tokens"


def test_femnist_in_several_files(tmp_path: Path) -> None:
    train, test = writers(), writers({"f0003_41": 2, "f0002_07": 1})
    first = dict(list(train.items())[:1])
    write(tmp_path / "femnist" / "train" / "b.json", first)
    write(tmp_path / "femnist" / "train" / "a.json", {u: v for u, v in train.items() if u not in first})
    write(tmp_path / "femnist" / "test" / "a.json", test)
    source = load("femnist", str(tmp_path), standardize=False)
    names = sorted(SIZES)
    assert source.user_names.tolist() == names
    assert (source.x_train.shape, source.x_train.dtype) == ((14, 28, 28, 1), np.float32)
    assert (source.num_classes, source.inputs) == (62, "pixels")
    for part, users in (("train", train), ("test", test)):
        x, y, who = (getattr(source, f"{field}_{part}") for field in ("x", "y", "users"))
        for number, name in enumerate(names):
            own = users.get(name, ([], []))
            np.testing.assert_allclose(x[who == number].reshape(-1, 784), np.reshape(own[0], (-1, 784)), rtol=1e-6)
            np.testing.assert_array_equal(y[who == number], own[1])
    assert {entry.name: entry.present for entry in available(str(tmp_path))}["femnist"]


@pytest.mark.parametrize("shared", [{}, {"u": 1, "w": 2}])
def test_test_users_that_are_not_trained_are_said_and_come_unseen(tmp_path: Path, shared: dict[str, int]) -> None:
    write(tmp_path / "own" / "train" / "a.json", writers({"u": 3, "w": 5}, d=7))
    write(tmp_path / "own" / "test" / "a.json", writers({"v": 4, "x": 2} | shared, d=7))
    for in_files in (False, True):
        source = load("leaf:own", str(tmp_path), in_files=in_files)
        instead = "left out; --" if shared else "left out, so each client is tested on part of its own examples; --"
        said = rf"2 of {2 + len(shared)} test users have no training examples, and their 6 examples are {instead}"
        with pytest.warns(JaxpflWarning, match=said):
            federation = federate(source, partition="natural")
        assert federation.train.size.tolist() == ([3, 5] if shared else [1, 2])
        assert federation.test.size.tolist() == ([1, 2] if shared else [2, 3])
        trained = federate(seen(source), partition="natural", test_share=0.0)
        others = federate_unseen(source, partition="natural", test_share=0.25)
        assert (trained.train.size.tolist(), others.client_ids.tolist()) == ([3, 5], [2, 3])
        assert (others.train.size.tolist(), others.test.size.tolist()) == ([3, 1], [1, 1])
        assert source.users_test is not None
        own = np.concatenate([others.train.examples.x, others.test.examples.x])
        wanted = source.x_test[np.isin(source.users_test, [1, 3])]
        np.testing.assert_array_equal(np.sort(own, axis=0), np.sort(wanted, axis=0))


@pytest.mark.parametrize("place", ["own", "own/data", "own/all_data"])
def test_any_folder_with_or_without_a_test_part(tmp_path: Path, place: str) -> None:
    folder = tmp_path / place
    write(folder / ("a.json" if "all" in place else "train/a.json"), writers({"u": 3, "v": 2}, d=7))
    source = load("leaf:own", str(tmp_path))
    assert source.x_train.shape == (5, 7)
    assert (source.x_test, source.users_test, source.inputs) == (None, None, "features")
    np.testing.assert_array_equal(source.users_train, [0, 0, 0, 1, 1])
    assert federate(source, partition="natural", test_share=0.5).num_clients == 2


SONG = "To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer The slings"


def test_shakespeare(tmp_path: Path) -> None:
    assert (len(ALL_LETTERS), len(set(ALL_LETTERS))) == (80, 80)
    speaker = {"HAMLET_HAMLET": ([SONG[i : i + 80] for i in range(6)], [SONG[i + 80] for i in range(6)])}
    for part in ("train", "test"):
        # LEAF's own test files state num_samples wrongly; it is not read.
        write(tmp_path / "shakespeare" / part / "a.json", speaker, num_samples=[999], hierarchies=["Hamlet"])
    source = load("shakespeare", str(tmp_path))
    assert (source.x_train.shape, source.x_train.dtype) == ((6, 80), np.int32)
    assert (source.num_classes, source.inputs) == (80, "tokens")
    for i in range(6):
        assert "".join(ALL_LETTERS[token] for token in source.x_train[i]) == SONG[i : i + 80]
        assert ALL_LETTERS[source.y_train[i]] == SONG[i + 80]
    federation = federate(source, partition="natural")
    assert federation.train.x.dtype == np.int32
    np.testing.assert_array_equal(federation.train.x[0], source.x_train)


WORDS = ["<BOS>", "the", "cat", "sat", "on", "the", "mat", "<EOS>"]


def comment(words: list[str], length: int = 5) -> tuple[list, dict]:
    """A comment as LEAF's preprocess.py cuts it: sequences of tokens, targets one place on, and counts."""

    def cut(tokens: list, fill: Any) -> list:
        tokens = tokens + [fill] * (-len(tokens) % length)
        return [tokens[i : i + length] for i in range(0, len(tokens), length)]

    counts = cut([1.0] * len(words), 0.0)
    label = {"target_tokens": cut([*words[1:], "<PAD>"], "<PAD>"), "count_tokens": counts, "subreddit": "cats"}
    return cut(words, "<PAD>"), label


def write_reddit(folder: Path, **more: tuple[list, list]) -> None:
    """A user's comment of two sequences, and one to be tested on that has another word."""
    (x, y), (other, label) = comment(WORDS), comment(["<BOS>", "the", "dog", "sat", "<EOS>"])
    write(folder / "reddit" / "train" / "a.json", {"12": ([x], [y])} | more)
    write(folder / "reddit" / "test" / "a.json", {"12": ([other], [label])})


def test_reddit(tmp_path: Path) -> None:
    write_reddit(tmp_path, silent=([], []))
    with pytest.warns(JaxpflWarning, match="without examples"):
        source = load("reddit", str(tmp_path))
    # By frequency, then alphabetically, after <PAD> and <UNK>.
    vocabulary = ["<PAD>", "<UNK>", "the", "<BOS>", "<EOS>", "cat", "mat", "on", "sat"]
    assert source.num_classes == len(vocabulary)
    assert (source.x_train.dtype, source.inputs) == (np.int32, "tokens")
    pairs = zip(source.x_train, source.y_train, strict=True)
    read = [([vocabulary[t] for t in x if t != PAD], vocabulary[y]) for x, y in pairs]
    # Every place of both sequences whose target is a word: contexts do not cross the cut.
    assert read == [(WORDS[:i], WORDS[i]) for i in range(1, 6)] + [(WORDS[5:i], WORDS[i]) for i in (6, 7)]
    np.testing.assert_array_equal(source.x_train[0], [0, 0, 0, 0, 3])  # the window ends at the latest token
    # "dog" is unknown: no target, but part of contexts.
    assert [vocabulary[y] for y in source.y_test] == ["the", "sat", "<EOS>"]
    np.testing.assert_array_equal(source.x_test[2], [0, 3, 2, 1, 8])
    assert source.user_names.tolist() == ["12"]


def test_reddit_with_leafs_vocabulary_and_as_integers(tmp_path: Path) -> None:
    folder = tmp_path / "reddit"
    write(folder / "train" / "a.json", {"1": ([comment(WORDS)[0]], [comment(WORDS)[1]])})
    table = {"<PAD>": 0, "<UNK>": 1, "cat": 2, "sat": 3}
    (folder / "vocab").mkdir()
    vocabulary = folder / "vocab" / "reddit_vocab.pck"
    vocabulary.write_bytes(pickle.dumps({"vocab": table, "size": 10_000, "unk_symbol": 1, "pad_symbol": 0}))
    source = load("reddit", str(tmp_path))
    assert source.num_classes == 10_000
    assert source.y_train.tolist() == [2, 3]
    vocabulary.write_bytes(pickle.dumps({"vocab": {"cat": 10_000}, "size": 10_000}))
    with pytest.raises(JaxpflError, match=r"reddit_vocab.pck: its tokens must be integers from 0 to 9999"):
        load("reddit", str(tmp_path))
    vocabulary.write_bytes(pickle.dumps([1]))
    with pytest.raises(JaxpflError, match="must have a dictionary 'vocab' and a positive integer 'size'"):
        load("reddit", str(tmp_path))
    vocabulary.unlink()
    # Tokens that are integers already, one dictionary for all labels, comments of one sequence each.
    write(folder / "train" / "a.json", {"1": ([[5, 3, 9]], {"target_tokens": [[3, 9, 0]]})})
    source = load("reddit", str(tmp_path))
    np.testing.assert_array_equal(source.x_train, [[0, 0, 5], [0, 5, 3]])
    np.testing.assert_array_equal(source.y_train, [3, 9])
    assert source.num_classes == 10


@pytest.mark.parametrize("in_files", [False, True])
def test_shakespeare_with_a_label_at_each_position(tmp_path: Path, in_files: bool) -> None:
    """Windows of 10 that follow each other by one character: each character of both runs is a label once."""
    runs = [SONG[:33], "All the world's a stage"]
    pairs = [(run[i : i + 10], run[i + 10]) for run in runs for i in range(len(run) - 10)]
    x, y = [context for context, _ in pairs], [label for _, label in pairs]
    write(tmp_path / "shakespeare" / "train" / "a.json", {"SOMEBODY": (x, y)})
    source = load("shakespeare", str(tmp_path), task="next-token", in_files=in_files)
    assert (source.task, source.num_classes, source.x_train.shape) == ("next-token", 80, (7, 10))
    assert source.x_train.dtype == source.y_train.dtype == np.int32
    labels = "".join(ALL_LETTERS[y] for y in source.y_train[source.y_train >= 0])
    assert labels == runs[0][1:] + runs[1][1:]
    assert (source.y_train < 0).sum(axis=1).tolist() == [0, 0, 0, 8, 0, 0, 8]  # the last of a run has the rest alone
    for x, y in zip(source.x_train, source.y_train, strict=True):
        for t in np.flatnonzero(y >= 0):
            text = "".join(ALL_LETTERS[token] for token in [*x[: t + 1], y[t]])
            assert any(text in run for run in runs)


def test_reddit_with_a_label_at_each_position(tmp_path: Path) -> None:
    write_reddit(tmp_path)
    source = load("reddit", str(tmp_path), task="next-token")
    words = np.array(["<PAD>", "<UNK>", "the", "<BOS>", "<EOS>", "cat", "mat", "on", "sat", "-"])
    assert words[source.x_train].tolist() == [WORDS[:5], [*WORDS[5:], "<PAD>", "<PAD>"]]
    assert words[source.y_train].tolist() == [WORDS[1:6], [*WORDS[6:], "-", "-", "-"]]
    assert source.y_test is not None
    assert words[source.y_test].tolist() == [["the", "-", "sat", "<EOS>", "-"]]  # "dog" is unknown: no label


def test_one_long_sequence_does_not_make_all_windows_as_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [1] * 20_000
    users = {"u": ([[tokens]], [{"target_tokens": [tokens]}])}
    write(tmp_path / "own" / "train" / "a.json", users)
    monkeypatch.setattr(host_memory, "free", lambda: 2**30)
    with pytest.raises(JaxpflError, match=r"longest sequence, 20000 tokens\): its contents need 2.98 GiB"):
        load("leaf:own", str(tmp_path))


NATURAL_SIZES = (4, 2, 7)


def write_school(folder, x=None, y=None, **more):
    def cells(arrays):
        found = np.empty((1, len(arrays)), object)
        found[0] = arrays
        return found

    rng = np.random.default_rng(0)
    x = [rng.integers(0, 2, (n, 3)).astype(np.uint8) for n in NATURAL_SIZES] if x is None else x
    y = [rng.integers(1, 71, (n, 1)).astype(np.uint8) for n in NATURAL_SIZES] if y is None else y
    (folder / "school").mkdir(exist_ok=True)
    savemat(folder / "school" / "school.mat", {"X": cells(x), "Y": cells(y)} | more)
    return x, y


def test_schools_are_users_and_scores_real_labels(tmp_path):
    x, y = write_school(tmp_path)
    source = load("school", str(tmp_path))
    np.testing.assert_array_equal(source.x_train, np.concatenate(x))
    np.testing.assert_array_equal(source.y_train, np.concatenate(y)[:, 0])
    assert source.x_train.dtype == source.y_train.dtype == np.float32
    assert (source.task, source.num_classes) == ("regression", 1)
    assert np.bincount(source.users_train).tolist() == list(NATURAL_SIZES)
    assert source.description == "13 pupils of 3 schools, 3 features"
    assert {entry.name: entry.present for entry in available(str(tmp_path))}["school"]
    assert preset("school", None)["partition"] == "natural"
    federation = federate(source, partition="natural", test_share=0.5)
    assert federation.num_clients == 3
    assert sorted(np.asarray(federation.train.size) + np.asarray(federation.test.size)) == sorted(NATURAL_SIZES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"y": [np.ones((n, 1)) for n in NATURAL_SIZES[:2]]}, "X has 3 schools, but Y has 2"),
        ({"y": [np.ones((n + 1, 1)) for n in NATURAL_SIZES]}, "school 0 has X of shape .4, 3. and Y of shape .5, 1."),
        ({"x": [np.full((n, 3), np.nan) for n in NATURAL_SIZES]}, "X: an input of example 0 is NaN"),
        ({"X": np.ones((3, 3))}, "X must be a cell array"),
    ],
)
def test_files_of_another_format_are_refused(tmp_path, content, message):
    write_school(tmp_path, **content)
    with pytest.raises(JaxpflError, match=message) as refused:
        load("school", str(tmp_path))
    assert "\n" not in str(refused.value)


HEADER = "fips,win_2016,win_2000,dem_2000,rep_2000"


def test_reads_winners_by_year(tmp_path: Path):
    (tmp_path / "elections").mkdir()
    lines = (HEADER, "01001,R,D,5,4", "56045,D,D,1,0", "")
    (tmp_path / "elections" / "county_winners_2000_2020.csv").write_text("\n".join(lines))
    found = load_elections(str(tmp_path))
    assert found.counties.tolist() == ["01001", "56045"]
    assert found.years.tolist() == [2000, 2016]
    np.testing.assert_array_equal(found.republican, [[0, 1], [0, 0]])


ROWS = [("ann", "a", 3), ("bob", "b", 1), ("ann", "c", 2), ("cid", "a", 5), ("bob", "a", 4), ("cid", "c", 1)]


def written(path: Path, *lines: str, header: str = "user,token,count") -> Path:
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


def of(counts: TokenCounts) -> dict[tuple[str, str], int]:
    names, words = counts.users[counts.rows], counts.vocabulary[counts.indices]
    return {(str(u), str(w)): int(c) for u, w, c in zip(names, words, counts.counts, strict=True)}


def test_csv_in_any_order(tmp_path: Path):
    """Users' rows lie anywhere in the file."""
    rng = np.random.default_rng(0)
    pairs = rng.permutation([(u, t) for u in range(12) for t in range(9)])[:80]
    rows = [(f"u{u}", f"t{t}", int(c)) for (u, t), c in zip(pairs, rng.integers(1, 50, 80), strict=True)]
    found = token_counts.read_counts_csv(written(tmp_path / "a.csv", *(f"{u},{t},{c}" for u, t, c in rows)))
    assert of(found) == {(u, t): c for u, t, c in rows}
    assert found.users.tolist() == list(dict.fromkeys(u for u, _, _ in rows))
    assert found.vocabulary.tolist() == list(dict.fromkeys(t for _, t, _ in rows))
    assert all((np.diff(found.indices[a:b]) > 0).all() for a, b in zip(found.indptr, found.indptr[1:], strict=False))


def test_the_most_frequent_tokens_and_the_users_that_have_enough(tmp_path: Path):
    csv = token_counts.read_counts_csv(written(tmp_path / "a.csv", *(f"{u},{t},{c}" for u, t, c in ROWS)))
    top = csv.most_frequent(2)
    assert top.vocabulary.tolist() == ["a", "c"]
    assert of(top) == {(u, t): c for u, t, c in ROWS if t != "b"}
    assert csv.active_users(6).users.tolist() == ["cid"]
    assert of(csv.select_users(np.array([2, 0]))) == {(u, t): c for u, t, c in ROWS if u != "bob"}


def test_a_split_divides_users_and_tokens():
    rng = np.random.default_rng(0)
    population = simulated_users.zipf_mixture(rng, 40, 2, 30.0)
    counts = simulated_users.draw_users(rng, population, rng.integers(2, 60, 50)).counts
    made = token_counts.split(counts, validation=0.2, unseen=0.1, train_share=0.3, seed=3)
    names = [set(part.own.users.tolist()) for part in made]
    assert [len(part) for part in names] == [35, 10, 5]
    assert set.union(*names) == set(range(50))
    whole = of(counts)
    for part in made:
        own, held_out = of(part.own), of(part.held_out)
        for pair in own.keys() | held_out.keys():
            assert own.get(pair, 0) + held_out.get(pair, 0) == whole[pair]
        sizes = counts.sizes[part.own.users]
        np.testing.assert_array_equal(part.own.sizes, np.clip(np.rint(0.3 * sizes), 1, sizes - 1))
    again = token_counts.split(counts, validation=0.2, unseen=0.1, train_share=0.3, seed=3)
    assert of(again.users.own) == of(made.users.own)


def test_a_split_draws_tokens_without_replacement():
    """A user of 30, 20 and 10 tokens gives half: hypergeometric means within 5 standard errors over 500 seeds."""
    counts = token_counts.build(
        np.zeros(3, int), np.arange(3), np.array([30, 20, 10]), np.array(["u"]), np.array(list("abc"))
    )
    drawn = np.zeros((500, 3))
    for seed in range(500):
        own, _ = counts.divided(np.random.default_rng(seed), np.array([30]))
        drawn[seed, own.indices] = own.counts
    share = np.array([0.5, 1 / 3, 1 / 6])
    stddev = np.sqrt(30 * share * (1 - share) * 30 / 59 / 500)
    assert (np.abs(drawn.mean(axis=0) - 30 * share) < 5 * stddev).all()


def said(*comments: str) -> tuple[list, list]:
    """Inputs and labels of a user's comments, each of one sequence."""
    cut = [comment(["<BOS>", *text.split(), "<EOS>"], length=9) for text in comments]
    return [x for x, _ in cut], [y for _, y in cut]


def test_leaf_reddit(tmp_path: Path):
    """Words count where they are the next one; marks do not."""
    write(tmp_path / "train" / "a.json", {"x": said("the cat the", "the"), "y": said("dog")})
    made = of(token_counts.read_leaf_counts(tmp_path))
    assert made == {("x", "the"): 3, ("x", "cat"): 1, ("y", "dog"): 1}
    write(tmp_path / "test" / "a.json", {"x": said("the cat"), "z": said("the")})  # training and test together
    made = token_counts.read_leaf_counts(tmp_path)
    assert made.users.tolist() == ["x", "y", "z"]
    assert of(made) == {("x", "the"): 4, ("x", "cat"): 2, ("y", "dog"): 1, ("z", "the"): 1}
    with pytest.raises(JaxpflError, match="no LEAF file"):
        token_counts.read_leaf_counts(tmp_path / "none")


def test_irc_archive(tmp_path: Path):
    """The user without tokens is left out."""
    (tmp_path / "irc").mkdir()
    np.savez(tmp_path / "irc" / "ubuntu_irc_user_counts.npz", **IRC)
    made = token_counts.load_irc(str(tmp_path))
    assert of(made) == {("0", "a"): 4, ("0", "c"): 1, ("2", "b"): 7}


def test_the_real_irc_users():
    made = token_counts.load_irc(real("IRC", "irc", "ubuntu_irc_user_counts.npz"))
    assert (len(made.users), len(made.vocabulary)) == (17208, 9154)  # 315 of 17523 wrote no word
    assert (int((made.sizes >= 500).sum()), int((made.sizes >= 100).sum())) == (478, 4121)


def test_synthetic_users_follow_their_mixture():
    """Means and variances of Q_u within 5 standard errors of the Dirichlet's, 2000 users of one cluster."""
    rng = np.random.default_rng(1)
    population = simulated_users.zipf_mixture(rng, 8, 1, 20.0)
    drawn = simulated_users.draw_users(rng, population, np.full(2000, 50))
    p, n = population.centers[0], 2000
    variance = p * (1 - p) / 21
    assert (np.abs(drawn.histograms.mean(axis=0) - p) < 5 * np.sqrt(variance / n)).all()
    np.testing.assert_allclose(drawn.histograms.var(axis=0), variance, rtol=0.25)
    np.testing.assert_array_equal(drawn.counts.sizes, 50)
    with pytest.raises(JaxpflError, match="alpha must be > 0"):
        simulated_users.zipf_mixture(rng, 8, 1, 0.0)
