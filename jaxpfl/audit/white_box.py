r"""White-box tests that a run's noise and cohorts match the accountant's assumptions.

Without access to the clients' updates, an audit needs thousands of simulated runs to detect that a tenth of the noise
is missing (`jaxpfl.audit.games`). The tests in this module record each client's upload (divided by its weight) before
it is clipped, and recompute the sum without noise in float64. The release minus this sum must be noise of the claimed
size (`jaxpfl.privacy.audit`). The tests work equally well on any data.

In some runs the noise cannot be separated from the sum (`why_no_noise_check`). In every run, the noise draws recorded
by `jaxpfl.privacy.record` are also tested. Each draw must have its own key, and the number of draws must agree with the
claim. If the clients add the noise, the standard deviations of the draws must agree with the claim too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.audit.subject import Subject, leaf_vectors, only, recorded, rounds
from jaxpfl.core import trees
from jaxpfl.core.participation import Availability, Participation
from jaxpfl.core.protocol import Algorithm, Client, Reduction, Upload
from jaxpfl.core.types import Array, PyTree
from jaxpfl.privacy import CentralNoise, FixedSize, PerStepNoise, Poisson, SiloMechanism, record
from jaxpfl.privacy.audit import Finding, check_noise
from jaxpfl.privacy.descriptions import Sampling
from jaxpfl.privacy.private_sum import Guarded

FALSE_ALARM = 1e-6
"""Largest probability that the tests together reject a correct claim."""
# Largest number of cohorts drawn, and limit on cohorts times clients.
_DRAWS, _SCORES = 4000, 2**26
_COUNT = "count below the clipping norm"


class Noise(NamedTuple):
    """Test results for the noise.

    Attributes:
      scale: standard deviation of the noise, relative to the claimed standard deviation.
      error: standard error of ``scale``.
      findings: result of each test.
    """

    scale: float
    error: float
    findings: list[Finding]


def faults(findings: list[Finding]) -> list[Finding]:
    """Select the findings that are significant at the level `FALSE_ALARM` after a Bonferroni correction."""
    # A p-value that is NaN counts as significant.
    return [finding for finding in findings if not finding.p_value >= FALSE_ALARM / len(findings)]


def why_no_noise_check(subject: Subject) -> str | None:
    """Reason why the run's noise cannot be separated from the sum; None if it can be separated."""
    if subject.silo is not None:
        return "noise on gradients of examples is part of what a client computes"
    if subject.mechanism.noise == "per_step":
        return "noise in every step is part of what a client computes"
    if subject.run.spec.compress is not None:
        return "uploads are compressed after the noise is added"
    if subject.run.spec.method.releases is not None:
        return f"{subject.run.spec.method.name} releases its sums within a round"
    return None


def noise(subject: Subject, *, seed: int = 0, runs: int = 2) -> Noise:
    """Test the noise of a few runs, and test that rounds with too few uploads release nothing.

    Args:
      subject: private run for which `why_no_noise_check` returns None.
      seed: first seed of the runs.
      runs: number of runs.
    """
    upload = subject.upload()
    simulation = subject.simulation(lambda algorithm, work: recorded(_keeping(algorithm, upload), upload))
    state = simulation.init(range(seed, seed + runs))
    before = np.asarray(simulation.trim(state).counts.uploads)
    residuals, sums, due = [], [], []
    adapts = subject.mechanism.quantile is not None
    for t, seen in enumerate(rounds(simulation, state, subject.run.spec.rounds)):
        trimmed = simulation.trim(seen.state)
        after = np.asarray(trimmed.counts.uploads)
        limit = np.asarray(seen.history["clipping_norm"] if adapts else np.full(runs, subject.unit), np.float64)
        exact = _exact_sum(subject, trimmed.clients, t, after > before, limit)
        stddev = _stddev(subject, (after - before).sum(axis=1), limit)
        leaves = seen.leaves
        residuals.append({name: (leaf - exact[name]) / stddev[:, None] for name, leaf in leaves.items()})
        noisy, released = (np.concatenate([*each.values()], axis=1) for each in (residuals[-1], leaves))
        nothing = (seen.weight == 0) & ~released.any(axis=1)
        due.append(np.where(np.isnan(stddev), nothing, np.isfinite(noisy).all(axis=1)).all())
        if adapts:
            count = _count(subject, limit, trimmed.server)
            residuals[-1][_COUNT] = (count - exact[_COUNT]) / subject.mechanism.count_stddev
        sums.append(exact)
        before = after
    by_leaf = {name: np.stack([each[name] for each in residuals], axis=1) for name in residuals[0]}
    of_sums = {name: np.stack([each[name] for each in sums], axis=1) for name in sums[0]}
    values = np.concatenate([leaf[np.isfinite(leaf)] for leaf in by_leaf.values()])
    scale = float(np.sqrt((values**2).mean())) if values.size else float("nan")
    findings = [*check_noise(by_leaf, of_sums), Finding("what is released", float(all(due)))]
    return Noise(scale, scale / np.sqrt(2 * max(values.size, 1)), findings)


def draws(subject: Subject, *, seed: int = 0) -> list[Finding]:
    """Test the recorded noise draws of two runs: their keys, their number and their standard deviations.

    If examples are protected, the draws of the personalized models are included. This function does not test the
    standard deviation of noise that the server adds. `noise` measures that standard deviation, unless
    `why_no_noise_check` gives a reason why it cannot.
    """
    spec, noise = subject.run.spec, subject.claim.noise
    silos = subject.run.mechanism if isinstance(subject.run.mechanism, SiloMechanism) else None
    # Run clients one after another and without failures, so that no draw is for padding and no step is left out.
    plan = replace(spec.plan, devices=1, clients="map", runs="map")
    alone = Subject(replace(subject.run, spec=replace(spec, plan=plan)))
    simulation = alone.simulation(lambda algorithm, work: algorithm, Availability())
    with record() as entered:
        state, _ = simulation.advance(simulation.init([seed, seed + 1]), spec.rounds)
        if silos is not None:
            simulation.personal_models(state)
    found = [draw for draw in entered if not draw.protects.startswith("nothing")]
    if silos is not None:
        batches = [silo.clients * silos.plan(silo).rounds * silos.releases for silo in silos.silos]
        each = np.repeat([silo.noise_multiplier * silos.clipping_norm for silo in silos.silos], batches).tolist()
    elif isinstance(noise, CentralNoise):
        each = [np.nan] * (noise.releases + (noise.count_stddev is not None))
    elif isinstance(noise, PerStepNoise):
        each = [*noise.stddevs] * round(noise.steps * subject.run.cohorts.expected_cohort)
    else:
        share = subject.unit * noise.noise_multiplier / np.sqrt(noise.min_uploads)
        each = [share] * round(subject.run.cohorts.expected_cohort)
    expected = np.sort(each * 2 * (1 if silos else spec.rounds))
    seen = np.sort([draw.stddev for draw in found])
    alike = seen.shape == expected.shape and (np.isnan(expected) | np.isclose(seen, expected, rtol=1e-5)).all()
    return [
        Finding("keys of draws", float(len({draw.key for draw in found}) == len(found))),
        Finding("number and deviations of draws", float(alike)),
    ]


def cohorts(participation: Participation, sampling: Sampling, *, seed: int = 0) -> list[Finding]:
    """Draw cohorts with the run's own function, and test their sizes and how often each client is drawn.

    Args:
      participation: participation scheme of the run.
      sampling: sampling that the accountant assumes.
      seed: seed of the draws.
    """
    from scipy.stats import binom

    m = participation.num_clients
    draws = max(100, min(_DRAWS, _SCORES // m))
    keys = jax.random.split(jax.random.key(seed), draws)
    rows = np.asarray(jax.jit(lambda keys: jax.lax.map(lambda k: participation.sample(k, jnp.arange(m)), keys))(keys))
    expected = _sizes(sampling, m)
    sizes = np.bincount((rows < m).sum(axis=1), minlength=m + 1)
    mean = float(np.arange(m + 1) @ expected) / m
    taken = np.bincount(rows[rows < m], minlength=m)
    each = 2 * np.minimum(binom.cdf(taken, draws, mean), binom.sf(taken - 1, draws, mean))
    return [
        Finding("cohort sizes", _chi_squared(sizes, draws * expected)),
        Finding("who is drawn", float(min(1.0, m * each.min()))),
    ]


class _Kept(NamedTuple):
    """Client state of the method, with the client's id, the last upload before clipping, and its round."""

    state: PyTree
    client_id: Array
    round: Array
    change: PyTree


def _keeping(algorithm: Algorithm, upload: Upload) -> Algorithm:
    """Wrap an algorithm so that client states contain the last upload before clipping."""

    def keeping(usual: Client) -> Client:
        def init(key, hp, ctx, message) -> _Kept:
            nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), upload.total)
            return _Kept(usual.init(key, hp, ctx, message), ctx.client_id, jnp.int32(-1), nothing)

        def update(key, hp, ctx, message, kept: _Kept, splits):
            state, sent, metrics = usual.update(key, hp, ctx, message, kept.state, splits)
            change = trees.prefix_divide(sent.total, sent.weight)
            return _Kept(state, ctx.client_id, ctx.round, change), sent, metrics

        def idle(key, hp, ctx, kept: _Kept, splits):
            assert usual.idle is not None
            state, metrics = usual.idle(key, hp, ctx, kept.state, splits)
            return kept._replace(state=state), metrics

        return usual._replace(init=init, update=update, idle=usual.idle and idle, cluster=None)

    assert algorithm.reduction is Reduction.SUM
    return algorithm._replace(clients=tuple(map(keeping, algorithm.clients)))


def _exact_sum(
    subject: Subject, groups: tuple[_Kept, ...], round: int, arrived: np.ndarray, limit: np.ndarray
) -> dict[str, np.ndarray]:
    """Sum the clipped uploads that arrived, separately in each of S runs.

    Args:
      subject: private run.
      groups: client states of each group of clients.
      round: index of the round.
      arrived: whether each client's upload arrived, [S, m].
      limit: clipping norm C, [S].

    Returns:
      The sum of each leaf of the uploads, [S, entries], by the leaf's name. A further array `_COUNT`, [S, 1], is a sum
      over the same clients of 1/2 for an upload whose norm is at most C, and -1/2 otherwise.
    """
    row_of = np.argsort(subject.ids)
    total: dict[str, np.ndarray] = {}
    for kept in groups:
        rows = row_of[np.searchsorted(subject.ids[row_of], np.asarray(kept.client_id))]
        there = (np.asarray(kept.round) == round) & np.take_along_axis(arrived, rows, axis=1)
        shape = jax.tree.leaves(kept.change)[0].shape[:2]
        leaves = {name: leaf.reshape(*shape, -1) for name, leaf in leaf_vectors(kept.change, runs=True).items()}
        size = np.sqrt(sum((leaf**2).sum(axis=2) for leaf in leaves.values()))
        factor = np.where(there, np.minimum(1, limit[:, None] / np.maximum(size, np.finfo(float).tiny)), 0)
        below = np.where(there, np.where(size <= limit[:, None], 0.5, -0.5), 0).sum(axis=1)[:, None]
        total[_COUNT] = total.get(_COUNT, 0) + below
        for name, leaf in leaves.items():
            total[name] = total.get(name, 0) + np.einsum("sm,smd->sd", factor, leaf)
    return total


def _stddev(subject: Subject, uploads: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Claimed standard deviation of the noise on the sum, [S]; NaN if nothing may be released.

    Args:
      subject: private run.
      uploads: number of uploads that arrived, [S].
      limit: clipping norm C, [S].
    """
    mechanism = subject.mechanism
    if mechanism.noise == "central":
        return float(mechanism.noise_multiplier_of_sum) * limit
    least = mechanism.least_uploads(subject.run.cohorts.expected_cohort)
    # Every upload contains a share of the noise, so uploads beyond K_min add to it.
    enough = np.where(uploads >= least, uploads, np.nan)
    return float(np.asarray(mechanism.noise_multiplier)) * limit * np.sqrt(enough / least)


def _count(subject: Subject, limit: np.ndarray, server: PyTree) -> np.ndarray:
    """Recover the noisy value of the entry `_COUNT` of `_exact_sum` from the adapted clipping norm, [S, 1]."""
    rate, quantile = subject.mechanism.quantile_lr, subject.mechanism.quantile
    assert quantile is not None
    adapted = np.asarray(only(Guarded, server).clipping_norm, np.float64)
    below = quantile - np.log(adapted / limit) / rate
    return ((below - 0.5) * subject.run.cohorts.expected_cohort)[:, None]


def _sizes(sampling: Sampling, m: int) -> np.ndarray:
    """Probabilities of the cohort sizes 0 ... m."""
    from scipy.stats import binom

    if isinstance(sampling, Poisson):
        sizes = binom.pmf(np.arange(m + 1), m, sampling.rate)
        cap = m if sampling.cap is None else sampling.cap
        sizes[cap] += sizes[cap + 1 :].sum()
        sizes[cap + 1 :] = 0
        return sizes
    sizes = np.zeros(m + 1)
    sizes[sampling.cohort if isinstance(sampling, FixedSize) else m] = 1
    return sizes


def _chi_squared(counts: np.ndarray, expected: np.ndarray) -> float:
    """p-value of Pearson's chi-squared test, after merging neighboring sizes into cells of about five expected draws.

    The p-value is 0 if an impossible size occurs.
    """
    from scipy.stats import chi2

    if counts[expected == 0].any():
        return 0.0
    edges = np.unique((np.cumsum(expected) / 5).astype(int), return_index=True)[1]
    seen, meant = (np.add.reduceat(values, edges) for values in (counts, expected))
    meant = np.maximum(meant, np.finfo(float).tiny)
    return float(chi2.sf(((seen - meant) ** 2 / meant).sum(), len(edges) - 1)) if len(edges) > 1 else 1.0
