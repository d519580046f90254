"""Histograms of a Dirichlet mixture at the reference setting: every row within the spread that starts and noise give.

The reference is one run of another implementation (d = 1000, k = 10, m = 500, alpha = 200, s = 1e-6, centers about
Zipf's law with a spread of 1). Rows without clusters depend on the centers' draw alone (a few hundredths); clusterings
also on which clusters their start merges (up to a tenth).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.benchmarks.studies.histogram import dirichlet as histogram_dirichlet
from jaxpfl.benchmarks.studies.histogram import simulated_users, starts
from jaxpfl.estimators.histograms import base as histogram
from jaxpfl.estimators.histograms import clusters as histogram_clusters
from jaxpfl.estimators.histograms import private as histogram_private
from jaxpfl.estimators.histograms.tuning import finetuned, fixed, local, loss

K, FLOOR, RADIUS, RUNS = 10, 1e-6, 0.25, 3

EXACT = {
    "local": (0.669, 0.03),
    "fedavg": (1.081, 0.03),
    "fedavg + ft": (0.280, 0.015),
    "algorithm 2": (0.709, 0.06),
    "algorithm 2 + ft": (0.231, 0.015),
    "bayes": (0.230, 0.01),
}
PRIVATE = {
    "fedavg, eps 15": (1.071, 0.03),
    "algorithm 2, eps 15": (0.752, 0.08),
    "algorithm 2 + ft, eps 15": (0.240, 0.02),
}


def scores(users: int, epsilons: tuple[float, ...]) -> dict[str, np.ndarray]:
    """The loss in each run, [RUNS], of every row."""
    rng = np.random.default_rng(0)
    population = simulated_users.zipf_mixture(rng, 1000, K, 200.0)
    drawn = simulated_users.draw_users(rng, population, np.full(users, 500))
    counts = drawn.counts
    own = histogram.from_sparse(counts.indptr, counts.indices, counts.counts, 1000)
    truth = histogram.arrange(drawn.histograms, own)
    noises = {
        e: (histogram_private.calibrated(e, 1e-10, 1), histogram_private.calibrated(e, 1e-10, 6)) for e in epsilons
    }
    known = histogram_dirichlet.around(jnp.asarray(population.centers, jnp.float32), 200.0)

    @jax.jit
    @partial(jax.vmap, in_axes=(0, None, None))
    def exact(key, own, truth):
        of_start, _ = jax.random.split(key)
        mean = histogram.floored(histogram.mean(own), FLOOR)
        start = starts.far_apart(of_start, own, K, temperature=0.5, floor=FLOOR)
        centers = histogram_clusters.cluster(own, start, 20, floor=FLOOR).centers
        rows = {
            "local": local(FLOOR),
            "fedavg": finetuned(mean[None], fixed(1.0), FLOOR),
            "fedavg + ft": finetuned(mean[None], fixed(0.2), FLOOR),
            "algorithm 2": finetuned(centers, fixed(1.0), FLOOR),
            "algorithm 2 + ft": finetuned(centers, fixed(0.3), FLOOR),
            "bayes": histogram_dirichlet.posterior(known, FLOOR),
        }
        return {name: loss(own, truth, personal) for name, personal in rows.items()}

    @jax.jit  # one program for every eps: it takes longer to compile than to run
    @partial(jax.vmap, in_axes=(0, None, None, None, None))
    def private(key, own, truth, e, noise):
        _, of_noise = jax.random.split(key)
        alone, rounds = noise
        of_alone, of_first, of_rounds = jax.random.split(jax.random.fold_in(of_noise, e), 3)
        single = histogram_private.release_of_all(of_alone, own, radius=RADIUS, noise=alone)
        first = histogram_private.release_of_all(of_first, own, radius=RADIUS, noise=rounds)
        found = histogram_private.cluster(
            of_rounds, own, first, K, 5, radius=RADIUS, noise=rounds, first_noise=rounds, floor=FLOOR
        )
        rows = {
            "fedavg": finetuned(histogram_private.private_mean(single, FLOOR)[None], fixed(1.0), FLOOR),
            "algorithm 2": finetuned(found, fixed(1.0), FLOOR),
            "algorithm 2 + ft": finetuned(found, fixed(0.3), FLOOR),
        }
        return {name: loss(own, truth, personal) for name, personal in rows.items()}

    keys = jax.random.split(jax.random.key(0), RUNS)
    found = exact(keys, own, truth)
    for e, noise in noises.items():
        rows = private(keys, own, truth, e, noise)
        found |= {f"{name}, eps {e:g}": row for name, row in rows.items()}
    return jax.tree.map(np.asarray, found)


@pytest.mark.slow
def test_rows_that_need_few_users():
    """Rows that do not depend on n: local, and Bayes with the population known; FedAvg by a thousand users."""
    found = scores(1000, ())
    for name in ("local", "fedavg", "bayes"):
        mean, tolerance = EXACT[name]
        assert found[name].mean() == pytest.approx(mean, abs=tolerance), name


@pytest.mark.slow
def test_the_reference_table():
    found = scores(20_000, (15.0, 8.0, 3.0, 1.0))
    for name, (mean, tolerance) in (EXACT | PRIVATE).items():
        assert found[name].mean() == pytest.approx(mean, abs=tolerance), (name, found[name])
    for name in ("fedavg", "algorithm 2", "algorithm 2 + ft"):
        by_eps = [found[f"{name}, eps {e}"].mean() for e in (15, 8, 3, 1)]
        assert by_eps == sorted(by_eps), name  # more privacy, more loss
