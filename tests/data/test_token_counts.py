"""Token counts: readers and what they refuse, vocabularies, splits of users and tokens, and synthetic users."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from data_files import real

from jaxpfl.data.sources import token_counts
from jaxpfl.data.sources.token_counts import TokenCounts
from jaxpfl.support.errors import JaxpflError

ROWS = [("ann", "a", 3), ("bob", "b", 1), ("ann", "c", 2), ("cid", "a", 5), ("bob", "a", 4), ("cid", "c", 1)]


def written(path: Path, *lines: str, header: str = "user,token,count") -> Path:
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


def of(counts: TokenCounts) -> dict[tuple[str, str], int]:
    names, words = counts.users[counts.rows], counts.vocabulary[counts.indices]
    return {(str(u), str(w)): int(c) for u, w, c in zip(names, words, counts.counts, strict=True)}


@pytest.fixture
def csv(tmp_path: Path) -> TokenCounts:
    return token_counts.read_counts_csv(written(tmp_path / "a.csv", *(f"{u},{t},{c}" for u, t, c in ROWS)))


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


def test_the_most_frequent_tokens_and_the_users_that_have_enough(csv: TokenCounts):
    top = csv.most_frequent(2)
    assert top.vocabulary.tolist() == ["a", "c"]
    assert of(top) == {(u, t): c for u, t, c in ROWS if t != "b"}
    assert csv.with_tokens(6).users.tolist() == ["cid"]
    assert of(csv.of_users(np.array([2, 0]))) == {(u, t): c for u, t, c in ROWS if u != "bob"}


def test_a_split_divides_users_and_tokens():
    rng = np.random.default_rng(0)
    population = token_counts.zipf_mixture(rng, 40, 2, 30.0)
    counts = token_counts.draw_users(rng, population, rng.integers(2, 60, 50)).counts
    made = token_counts.split(counts, validation=0.2, unseen=0.1, train_share=0.3, most=10, seed=3)
    names = [set(part.own.users.tolist()) for part in made]
    assert [len(part) for part in names] == [35, 10, 5]
    assert set.union(*names) == set(range(50))
    whole = of(counts)
    for part in made:
        own, held_out = of(part.own), of(part.held_out)
        for pair in own.keys() | held_out.keys():
            assert own.get(pair, 0) + held_out.get(pair, 0) == whole[pair]
        sizes = counts.sizes[part.own.users]
        np.testing.assert_array_equal(part.own.sizes, np.minimum(np.clip(np.rint(0.3 * sizes), 1, sizes - 1), 10))
    again = token_counts.split(counts, validation=0.2, unseen=0.1, train_share=0.3, most=10, seed=3)
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


def reddit(folder: Path, users: dict[str, list[list[str]]]) -> Path:
    data = {}
    for user, comments in users.items():
        x = [[words] for words in comments]
        y = [{"target_tokens": [[*words[1:], "<PAD>"]], "count_tokens": [[1] * len(words)]} for words in comments]
        data[user] = {"x": x, "y": y}
    (folder / "train").mkdir(parents=True)
    content = {"users": list(users), "num_samples": [len(c) for c in users.values()], "user_data": data}
    (folder / "train" / "a.json").write_text(json.dumps(content))
    return folder


def test_leaf_reddit(tmp_path: Path):
    """Words count where they are the next one; marks do not."""
    folder = reddit(
        tmp_path / "reddit",
        {"x": [["<BOS>", "the", "cat", "the", "<EOS>"], ["<BOS>", "the", "<EOS>"]], "y": [["<BOS>", "dog", "<EOS>"]]},
    )
    made = of(token_counts.read_leaf_counts(folder))
    assert made == {("x", "the"): 3, ("x", "cat"): 1, ("y", "dog"): 1}
    reddit(tmp_path / "more", {"x": [["<BOS>", "the", "cat", "<EOS>"]], "z": [["<BOS>", "the", "<EOS>"]]})
    (tmp_path / "more" / "train").rename(folder / "test")  # training and test together
    made = token_counts.read_leaf_counts(folder)
    assert made.users.tolist() == ["x", "y", "z"]
    assert of(made) == {("x", "the"): 4, ("x", "cat"): 2, ("y", "dog"): 1, ("z", "the"): 1}
    with pytest.raises(JaxpflError, match="no LEAF files"):
        token_counts.read_leaf_counts(tmp_path / "none")
    (tmp_path / "shapes" / "train").mkdir(parents=True)
    content = {"users": ["u"], "num_samples": [1], "user_data": {"u": {"x": [[0.5, 1.0]], "y": [1]}}}
    (tmp_path / "shapes" / "train" / "a.json").write_text(json.dumps(content))
    with pytest.raises(JaxpflError, match="not LEAF's Reddit"):
        token_counts.read_leaf_counts(tmp_path / "shapes")


GOOD = {
    "indptr": np.array([0, 2, 2, 3]),
    "indices": np.array([0, 2, 1]),
    "counts": np.array([4, 1, 7]),
    "vocab": np.array(["a", "b", "c"]),
}


def archive(root: Path, **arrays: np.ndarray) -> str:
    (root / "irc").mkdir()
    np.savez(root / "irc" / "ubuntu_irc_user_counts.npz", **arrays)
    return str(root)


def test_irc_archive(tmp_path: Path):
    """The user without tokens is left out."""
    made = token_counts.load_irc(archive(tmp_path, **GOOD))
    assert of(made) == {("0", "a"): 4, ("0", "c"): 1, ("2", "b"): 7}


def test_the_real_irc_users():
    made = token_counts.load_irc(real("IRC", "irc", "ubuntu_irc_user_counts.npz"))
    assert (len(made.users), len(made.vocabulary)) == (17208, 9154)  # 315 of 17523 wrote no word
    assert (int((made.sizes >= 500).sum()), int((made.sizes >= 100).sum())) == (478, 4121)


def test_synthetic_users_follow_their_mixture():
    """Means and variances of Q_u within 5 standard errors of the Dirichlet's, 2000 users of one cluster."""
    rng = np.random.default_rng(1)
    population = token_counts.zipf_mixture(rng, 8, 1, 20.0)
    drawn = token_counts.draw_users(rng, population, np.full(2000, 50))
    p, n = population.centers[0], 2000
    variance = p * (1 - p) / 21
    assert (np.abs(drawn.histograms.mean(axis=0) - p) < 5 * np.sqrt(variance / n)).all()
    np.testing.assert_allclose(drawn.histograms.var(axis=0), variance, rtol=0.25)
    np.testing.assert_array_equal(drawn.counts.sizes, 50)
    with pytest.raises(JaxpflError, match="alpha must be > 0"):
        token_counts.zipf_mixture(rng, 8, 1, 0.0)
