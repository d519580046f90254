"""Robust rules against float64 NumPy written from their definitions: ties, even counts, slots that do not count."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.uploads.robust import aggregation, resolve

VALID = {
    "all": np.ones(9, bool),
    "an even number": np.arange(9) != 3,
    "some": np.array([0, 1, 1, 0, 1, 1, 1, 0, 1], bool),
    "two": np.array([0, 1, 0, 0, 0, 0, 1, 0, 0], bool),
    "one": np.arange(9) == 4,
    "none": np.zeros(9, bool),
}


pytestmark = pytest.mark.usefixtures("x64")


def stacked(seed: int = 0) -> dict[str, np.ndarray]:
    """Nine vectors of seven numbers, with ties in one coordinate and between two vectors."""
    rng = np.random.default_rng(seed)
    rows = {"w": rng.normal(size=(9, 2, 3)) * np.linspace(1, 30, 9)[:, None, None], "b": rng.normal(size=9)}
    rows["w"][:, 0, 0] = [2, 1, 2, 2, 0, 1, 2, 1, 5]
    rows["w"][6], rows["b"][6] = rows["w"][5], rows["b"][5]
    return rows


def flat(rows: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([rows["w"].reshape(9, -1), rows["b"].reshape(9, -1)], axis=1)


def got(rule, rows: dict[str, np.ndarray], valid: np.ndarray) -> np.ndarray:
    """Estimate with garbage in the slots that do not count, as one vector."""
    spoiled = {name: np.where(valid.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, np.nan) for name, leaf in rows.items()}
    found = jax.jit(rule)(spoiled, jnp.asarray(valid))
    return np.concatenate([np.ravel(found["w"]), np.ravel(found["b"])])


def trimmed(x: np.ndarray, cut: int) -> np.ndarray:
    ordered = np.sort(x, axis=0)
    return ordered[cut : len(x) - cut].mean(axis=0)


def krum_scores(x: np.ndarray, f: int) -> np.ndarray:
    distances = ((x[:, None] - x[None]) ** 2).sum(axis=2)
    neighbours = max(len(x) - f - 2, 1)
    return np.array([np.sort(np.delete(row, i))[:neighbours].sum() for i, row in enumerate(distances)])


def weiszfeld(x: np.ndarray, steps: int, smoothing: float) -> np.ndarray:
    z = np.median(x, axis=0)
    for _ in range(steps):
        w = 1 / np.maximum(smoothing, np.linalg.norm(x - z, axis=1))
        z = (w[:, None] * x).sum(axis=0) / w.sum()
    return z


def bounded(x: np.ndarray, bound: float | None) -> np.ndarray:
    norms = np.linalg.norm(x, axis=1)
    bound = np.median(norms) if bound is None else bound
    return np.mean([row * min(1, bound / norm) for row, norm in zip(x, norms, strict=True)], axis=0)


RULES = {
    "median": (aggregation.median, lambda x: np.median(x, axis=0)),
    "trimmed mean": (partial(aggregation.trimmed_mean, fraction=0.3), lambda x: trimmed(x, len(x) * 3 // 10)),
    "krum": (partial(aggregation.krum, attackers=2), lambda x: x[krum_scores(x, 2).argmin()]),
    "multi-krum": (
        partial(aggregation.multi_krum, attackers=2),
        lambda x: x[np.argsort(krum_scores(x, 2), kind="stable")[: max(len(x) - 4, 1)]].mean(axis=0),
    ),
    "multi-krum of 3": (
        partial(aggregation.multi_krum, attackers=1, select=3),
        lambda x: x[np.argsort(krum_scores(x, 1), kind="stable")[:3]].mean(axis=0),
    ),
    "geometric median": (
        partial(aggregation.geometric_median, steps=7, smoothing=0.01, tolerance=1e-30),
        lambda x: weiszfeld(x, 7, 0.01),
    ),
    "norm bound": (partial(aggregation.norm_bound, bound=3.0), lambda x: bounded(x, 3.0)),
    "median norm": (aggregation.norm_bound, lambda x: bounded(x, None)),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_its_definition(name):
    rule, reference = RULES[name]
    for seed in (0, 1):
        rows = stacked(seed)
        for valid in VALID.values():
            x = flat(rows)[valid]
            want = reference(x) if len(x) else np.zeros(7)
            np.testing.assert_allclose(got(rule, rows, valid), want, rtol=1e-12, atol=1e-14)


def test_an_even_number_has_the_mean_of_the_two_middle_values():
    rows, valid = jnp.asarray([1.0, 7.0, 3.0, 100.0, jnp.nan]), jnp.asarray([True] * 4 + [False])
    assert float(aggregation.median(rows, valid)) == 5.0


def test_equal_scores_go_to_the_first_slot():
    rows = jnp.asarray([[9.0], [1.0], [1.5], [5.0], [5.5]])  # two pairs at the same distance: one neighbour counts
    assert float(aggregation.krum(rows, jnp.ones(5, bool), attackers=2)[0]) == 1.0


def test_distances_of_near_vectors_keep_their_digits():
    """In float32 at a norm of 1e4, products of the vectors would have no digit of these distances."""
    rows = jnp.float32(1e4) + jnp.asarray([[0.0], [0.5], [0.75], [3.0], [8.0]], jnp.float32)
    assert float(aggregation.krum(rows, jnp.ones(5, bool), attackers=1)[0]) == 1e4 + 0.5


def test_a_vector_beyond_all_bounds_moves_no_rule_far():
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(9, 4)).astype(np.float32)
    rows[2] = 3e37  # its squared norm overflows
    estimates = jax.jit(lambda rows: {name: rule(rows, jnp.ones(9, bool)) for name, (rule, _) in RULES.items()})(rows)
    for name, estimate in estimates.items():
        assert np.isfinite(estimate).all(), name
        assert np.abs(estimate).max() < 5, name


def test_the_geometric_median_of_a_triangle():
    """From the Fermat point of an equilateral triangle all corners are seen under the same angles: its centre."""
    corners = jnp.asarray([[0.0, 0.0], [1.0, 0.0], [0.5, 3**0.5 / 2], [0.5, 3**0.5 / 2 + 1e6]])
    valid = jnp.asarray([True, True, True, False])
    found = aggregation.geometric_median(corners, valid, steps=100, smoothing=1e-9, tolerance=1e-12)
    np.testing.assert_allclose(found, [0.5, 3**0.5 / 6], atol=1e-9)


@pytest.mark.parametrize("far", [1e2, 1e4, 1e9])
def test_the_geometric_median_is_the_minimiser_however_far_attackers_are(far):
    """Forces of length one from every vector balance there; the mean of them all is where the attackers are."""
    x = np.random.default_rng(5).normal(size=(20, 6))
    x[:8] += far * np.array([1, -1, 1, 1, 0, 2])
    found = np.asarray(resolve("geometric-median").rule(jnp.asarray(x), jnp.ones(20, bool)))
    toward = x - found
    forces = toward / np.linalg.norm(toward, axis=1, keepdims=True)
    assert np.linalg.norm(forces.sum(axis=0)) < 1e-3
    assert np.linalg.norm(found) < 10


def test_a_fraction_is_taken_as_it_is_written():
    assert [aggregation.trimmed(0.29, 100), aggregation.trimmed(0.1, 30), aggregation.trimmed(0.1, 9)] == [29, 3, 0]
