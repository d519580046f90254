"""Mis-clustering rates: matched labels, the bound's rate, and separated clusters that Algorithm 2 finds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxpfl.data.sources.token_counts import DirichletMixture
from jaxpfl.studies.histograms import convergence as histogram_convergence
from jaxpfl.studies.histograms import data as histogram_data
from jaxpfl.studies.histograms.settings import HistogramSettings


def test_labels_are_matched_before_they_are_counted():
    true = np.array([0, 0, 0, 1, 1, 2, 2, 2])
    assert histogram_convergence.wrong(np.array([2, 2, 2, 0, 0, 1, 1, 1]), true, 3) == 0
    assert histogram_convergence.wrong(np.array([2, 2, 1, 0, 0, 1, 1, 1]), true, 3) == pytest.approx(1 / 8)
    assert histogram_convergence.wrong(np.zeros(8, int), true, 3) == pytest.approx(5 / 8)


def test_the_bound():
    """Two centers (.6, .4) and (.4, .6), alpha = 99, m = 50: Delta^2 = .08, sigma^2 = .24 (1/100 + 99/5000)."""
    population = DirichletMixture(np.array([[0.6, 0.4], [0.4, 0.6]]), np.full(2, 0.5), 99.0)
    expected = math.exp(-0.08 / (8 * 0.24 * (0.01 + 0.99 / 50)))
    assert histogram_convergence.rate(population, 50) == pytest.approx(expected)


def test_separated_clusters_are_found_and_ifca_is_slower():
    """Users of 200 tokens at two centers of a spread of 1.5: at most 1 % are wrong after six rounds."""
    population = {"users": 120, "tokens": 40, "components": 2, "samples": 200, "spread": 1.5, "block": 64}
    dimred = {"kept_tokens": 10, "candidates": 20}
    given = HistogramSettings(**population, **dimred, clusters=2, rounds=6, repetitions=3)
    found = histogram_convergence.study(histogram_data.prepare(given), given)["wrong"]
    assert found["Algorithm 2"][-1] <= 0.01
    assert sum(found["IFCA"]) >= sum(found["Algorithm 2"])
