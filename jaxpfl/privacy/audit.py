r"""Empirical lower bounds on epsilon, from many runs or from one, and tests of the noise that a run added.

**Many worlds.** A world is one independent run, with or without a canary: a client whose upload, of norm C and
direction c, is chosen to be easy to detect. The canary's score in a world is the component of the released sums S in
that direction, :math:`\langle S, c \rangle / (C \|c\|)`. Without the canary the score is noise. Each round in which the
canary takes part adds 1. Anyone who sees the release can compute the score, so a privacy claim limits how well the
score separates the two kinds of world. If the score separates them better, the claim is wrong. A bound below the claim
proves nothing.

With K worlds of each kind, the bound cannot exceed about log K, and it is weak at the small deltas of typical claims.
Because an accountant gives an epsilon for every delta, audit a claim at a delta of 0.01 ... 0.2, and compare the bound
with ``plan.epsilon`` at this delta.

Reference: Jagielski, Ullman and Oprea 2020, "Auditing Differentially Private Machine Learning".

**One run.** A coin decides for each of n canaries whether it is included. The auditor scores every canary, guesses that
the highest scores belong to included canaries and the lowest scores to excluded ones, and makes no guess for the other
canaries. Let W of the r guesses be correct. For an (eps, delta)-DP mechanism, a large W is hardly more probable than a
large :math:`\check W \sim \operatorname{Binomial}(r, e^\epsilon / (1 + e^\epsilon))`, the number of correct guesses
under randomized response. For every v (Steinke et al. 2023, Theorem 5.2),

.. math:: P(W \ge v) \le P(\check W \ge v)
   + 2 n \delta \max_{1 \le i \le n} \frac{P(v > \check W \ge v - i)}{i}

The coin may choose between any two neighboring data sets. For example, a client takes part or not, a client's data are
kept or zeroed, or they are kept or negated. Canaries from several independent runs are counted together. Because of the
term with delta, a useful bound requires a delta far below 1 / n, as in typical claims.

Reference: Steinke, Nasr and Jagielski 2023, "Privacy Auditing with One (1) Training Run", arXiv:2305.08846.

**Noise.** Let S_t be the sum that round t releases, and z C the claimed standard deviation of its noise. If the uploads
:math:`\Delta_i` are known, the round's residual is

.. math:: r_t = \bigl( S_t - \sum_i \operatorname{clip}(\Delta_i) \bigr) / (z C)

If the claim is correct, the entries of all residuals are independent N(0, 1), within and between rounds, runs and
leaves (arrays of the upload). Each test of `check_noise` has an exact distribution under that hypothesis. The tests
reject noise with a wrong scale, noise shared by two releases, leaves without noise, and released sums that differ from
the sum of the clipped uploads.

The correlation between two residuals does not reveal noise that only a few of their many entries share. Therefore
entries with the same index in two leaves, rounds or runs are also compared one by one. Two entries are close if their
absolute values differ by less than h, a threshold larger than the step of the releases' lattice (`privacy.noise`). Two
independent entries are close with probability at most :math:`2 h \sqrt{2 / \pi}`, whatever the value of one of them, so
a binomial variable bounds the number of close pairs.
"""

from __future__ import annotations

from itertools import combinations, combinations_with_replacement, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxpfl.core import checks
from jaxpfl.support.console import new_axes, save_png
from jaxpfl.support.errors import JaxpflError


class EpsilonBound(NamedTuple):
    """A lower bound on epsilon.

    Attributes:
      epsilon: the bound; 0 if the audit shows nothing.
      delta: delta at which the bound holds.
      confidence: confidence level. With at least this probability over the randomness of the worlds, the true epsilon
        is at least ``epsilon``.
      ceiling: largest bound possible with this number of worlds.
      statistic: index of the score that gave the bound; 0 if a world has one score.
    """

    epsilon: float
    delta: float
    confidence: float
    ceiling: float
    statistic: int = 0


def epsilon_lower_bound(
    with_canary: ArrayLike, without_canary: ArrayLike, *, delta: float, confidence: float = 0.95
) -> EpsilonBound:
    r"""Compute a lower bound on epsilon from many worlds. The bound holds with probability ``confidence``.

    (eps, delta)-DP limits every test that separates the two kinds of world: P(score > t | with) <= e^eps P(score > t |
    without) + delta, and P(score <= t | without) <= e^eps P(score <= t | with) + delta. Half of the worlds are used to
    select the threshold t, one of the two tests and, if a world has several scores, the score. Let p be the probability
    on the left side of the selected test, and f the probability on its right side. The other half of the worlds gives
    Clopper-Pearson bounds :math:`\underline p \le p` and :math:`\bar f \ge f`, each with half of the error probability,
    and

    .. math:: \hat\epsilon = \log \frac{\underline p - \delta}{\bar f}

    Args:
      with_canary, without_canary: scores of independent worlds, [K], or [K, J] for J scores per world. The bound is
        valid however the scores are computed.
      delta: delta of the audited claim.
      confidence: confidence level of the bound.

    Raises:
      JaxpflError: for fewer than 4 worlds of a kind, different numbers of scores in the two kinds, scores that are not
        finite, a delta outside [0, 1), or a confidence outside (0, 1).
    """
    present, absent = _scores("with_canary", with_canary), _scores("without_canary", without_canary)
    if present.shape[1] != absent.shape[1]:
        raise JaxpflError(f"all worlds must have equally many scores, got {present.shape[1]} and {absent.shape[1]}")
    if not 0 <= delta < 1:
        raise JaxpflError(f"delta must be >= 0 and < 1, got {delta}")
    checks.probability("confidence", confidence)

    choosing, held = (
        _Odds(len(present[half]), len(absent[half]), delta, confidence)
        for half in (slice(0, None, 2), slice(1, None, 2))
    )
    choices = [_best(choosing, present[::2, j], absent[::2, j]) for j in range(present.shape[1])]
    statistic = int(np.argmax([odds for odds, _, _ in choices]))
    _, side, threshold = choices[statistic]
    hits = (_above(np.sort(kind[1::2, statistic]), np.array([threshold])) for kind in (present, absent))
    bound = float(held.log(*hits)[side, 0])
    best = float(held.log(np.array([held.present]), np.array([0])).max())
    return EpsilonBound(max(0.0, bound), delta, confidence, max(0.0, best), statistic)


def _scores(name: str, scores: ArrayLike) -> np.ndarray:
    """Check the scores of K worlds, and return them in float64, [K, J] for J scores per world."""
    scores = np.asarray(scores, np.float64)
    if not 1 <= scores.ndim <= 2 or len(scores) < 4:
        raise JaxpflError(f"{name} must be a vector of at least 4 scores, got shape {scores.shape}")
    if not np.isfinite(scores).all():
        raise JaxpflError(f"{name} must be finite, got {np.count_nonzero(~np.isfinite(scores))} non-finite scores")
    return scores.reshape(len(scores), -1)


def _above(scores: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Number of sorted scores above each of T thresholds, [T]."""
    return len(scores) - np.searchsorted(scores, thresholds, side="right")


class _Odds:
    """Lower bounds on epsilon, given how many worlds score above a threshold with the canary and without it."""

    def __init__(self, present: int, absent: int, delta: float, confidence: float):
        self.present, self._delta = present, delta
        error = (1 - confidence) / 2
        self._of_present, self._of_absent = _lowest(present, error), _lowest(absent, error)

    def log(self, tp: np.ndarray, fp: np.ndarray) -> np.ndarray:
        """Lower bounds on epsilon from two tests, at T thresholds, [2, T].

        The first test takes a score above the threshold as a sign that the canary is present. The second test takes a
        score up to the threshold as a sign that the canary is absent.

        Args:
          tp, fp: numbers [T] of worlds whose score is above the threshold: with the canary, and without it.
        """
        k0 = len(self._of_absent) - 1
        likely = np.stack([self._of_present[tp], self._of_absent[k0 - fp]])
        # An upper bound on a probability is one minus the lower bound on its complement.
        rare = 1 - np.stack([self._of_absent[k0 - fp], self._of_present[tp]])
        with np.errstate(divide="ignore"):
            return np.log(np.maximum(likely - self._delta, 0) / rare)


def _best(odds: _Odds, present: np.ndarray, absent: np.ndarray) -> tuple[float, int, float]:
    """Find the largest lower bound on epsilon, its test and its threshold.

    Args:
      odds: bounds for K1 worlds with the canary and K0 without it.
      present, absent: one score per world with the canary, [K1], and without it, [K0].
    """
    present, absent = np.sort(present), np.sort(absent)
    thresholds = np.unique(np.concatenate([present, absent]))
    bounds = odds.log(_above(present, thresholds), _above(absent, thresholds))
    side, place = np.unravel_index(np.argmax(bounds), bounds.shape)
    return float(bounds[side, place]), int(side), float(thresholds[place])


def _lowest(trials: int, error: float) -> np.ndarray:
    """Clopper-Pearson lower bounds on a probability for 0, 1, ..., ``trials`` hits, [trials + 1]."""
    from scipy.special import betaincinv

    hits = np.arange(1, trials + 1)
    return np.concatenate([[0.0], betaincinv(hits, trials - hits + 1, error)])


_SHARES = (0.125, 0.25, 0.5, 1.0)
"""Fractions of the canaries that the auditor guesses; each fraction is tested with an equal part of the error
probability.
"""
_STEPS = 30  # bisection steps
_LARGEST = 100.0  # largest upper end of the search


class OneRunBound(NamedTuple):
    """A lower bound on epsilon from one run.

    Attributes:
      epsilon: the bound; 0 if the audit shows nothing.
      delta: delta at which the bound holds.
      confidence: confidence level. With at least this probability over the coins and the randomness of the run, the
        true epsilon is at least ``epsilon``.
      ceiling: largest bound possible with this number of canaries.
      canaries: number of canaries n.
      guesses, correct: number of guesses r, and number of correct guesses W, from which the bound was computed.
    """

    epsilon: float
    delta: float
    confidence: float
    ceiling: float
    canaries: int
    guesses: int
    correct: int


def p_value(canaries: int, guesses: int, correct: int, *, epsilon: float, delta: float) -> float:
    """Upper bound on the probability of at least ``correct`` correct guesses under (epsilon, delta)-DP.

    Reference: Steinke et al. 2023, Theorem 5.2.

    Args:
      canaries: number of canaries n.
      guesses: number of guesses r, at most n.
      correct: number of correct guesses W, at most r.
    """
    from scipy.special import betainc, gammaln, log_expit

    right = 1 / (1 + np.exp(-epsilon))
    if not correct:
        return 1.0
    beta = float(betainc(correct, guesses - correct + 1, right))
    if not delta:
        return beta
    k = np.arange(correct - 1, -1, -1)
    choices = gammaln(guesses + 1) - gammaln(k + 1) - gammaln(guesses - k + 1)
    below = np.cumsum(np.exp(choices + k * log_expit(epsilon) + (guesses - k) * log_expit(-epsilon)))
    alpha = float((below / np.arange(1, correct + 1)).max())
    return min(beta + 2 * canaries * delta * alpha, 1.0)


def one_run_lower_bound(
    scores: ArrayLike, included: ArrayLike, *, delta: float, confidence: float = 0.95
) -> OneRunBound:
    """Compute a lower bound on epsilon from a single run. The bound holds with probability ``confidence``.

    The bound is computed four times, with guesses for an eighth, a quarter, half and all of the canaries. Each of these
    bounds may fail with probability ``(1 - confidence) / 4``. The largest of them is returned.

    Args:
      scores: scores of the canaries, [n]; a higher score suggests that the canary is included. The bound is valid
        however the scores are computed.
      included: whether each canary is included, that is, the outcome of its coin, [n] bool.
      delta: delta of the audited claim.
      confidence: confidence level of the bound.

    Raises:
      JaxpflError: for fewer than 2 canaries, vectors of different lengths, scores that are not finite, or a delta or
        confidence out of range.
    """
    scores, included = np.asarray(scores, np.float64), np.asarray(included, bool)
    if scores.ndim != 1 or len(scores) < 2 or included.shape != scores.shape:
        raise JaxpflError(
            "scores and included must be vectors of the same length of at least 2, got shapes "
            f"{scores.shape} and {included.shape}"
        )
    if not np.isfinite(scores).all():
        raise JaxpflError(f"scores must be finite, got {np.count_nonzero(~np.isfinite(scores))} non-finite scores")
    if not 0 <= delta < 1:
        raise JaxpflError(f"delta must be >= 0 and < 1, got {delta}")
    checks.probability("confidence", confidence)
    n, error = len(scores), (1 - confidence) / len(_SHARES)
    # Ties, for example between canaries that never took part, are broken at random: their order might reveal the coins.
    order = np.lexsort((np.random.default_rng(n).random(n), scores))
    tried = []
    for share in _SHARES:
        half = max(1, round(share * n / 2))
        # If the number of canaries is odd, no canary may be in both halves.
        low, high = order[:half], order[max(n - half, half) :]
        correct, guesses = int((~included[low]).sum() + included[high].sum()), len(low) + len(high)
        tried.append((_largest_refuted(n, guesses, correct, delta, error), guesses, correct))
    best, guesses, correct = max(tried)
    ceiling = _largest_refuted(n, n, n, delta, error)
    return OneRunBound(best, delta, confidence, max(ceiling, best), n, guesses, correct)


def _largest_refuted(canaries: int, guesses: int, correct: int, delta: float, error: float) -> float:
    """Largest epsilon for which at least this many correct guesses have a probability below ``error``; 0 if there is
    none.
    """

    def refuted(epsilon: float) -> bool:
        return p_value(canaries, guesses, correct, epsilon=epsilon, delta=delta) < error

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high) and high < _LARGEST:
        low, high = high, 2 * high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


_MOST = 100_000
"""Largest number of entries for the Kolmogorov-Smirnov test, and for the one-by-one comparison of a leaf's entries."""
_CLOSE = 0.0025
"""Threshold h, larger than a lattice step plus rounding: two entries that differ by less than h standard deviations may
be the same draw.
"""


class Finding(NamedTuple):
    """Result of one test.

    Attributes:
      test: name of the test. If the test is done for several leaves, pairs of rounds or pairs of runs, the name
        includes the one with the smallest p-value.
      p_value: probability of a statistic at least as extreme if the claim is correct. If there are several p-values,
        this is the smallest one times their number (Bonferroni).
    """

    test: str
    p_value: float


def check_noise(residuals: dict[str, np.ndarray], sums: dict[str, np.ndarray]) -> list[Finding]:
    """Test whether residuals are independent N(0, 1).

    Args:
      residuals: residuals by leaf, for S runs of R rounds, [S, R, entries of the leaf]; NaN in rounds that released
        nothing.
      sums: sums of the uploads without noise, with the same shapes.

    Returns:
      One finding per test. ``scale`` tests for unit variance, ``leaves`` for unit variance in each leaf, and ``shape``
      for a normal distribution (Kolmogorov-Smirnov). ``rounds``, ``runs`` and ``between leaves`` test whether two
      rounds, two runs or two leaves share noise, and ``sum`` tests for a correlation with the uploads. Comparisons that
      need two rounds, runs or leaves are left out if there is only one.
    """
    names, whole = list(residuals), np.concatenate(list(residuals.values()), axis=2)
    released = np.isfinite(whole).all(axis=2)
    rounds = whole[:, released.all(axis=0)]  # rounds with a release in every run
    equal = _equal(residuals)
    found = [
        _named("scale", {"all": _variance(whole[released])}),
        _named("leaves", {name: _variance(part[released]) for name, part in residuals.items()}),
        _named("shape", {"all": _normal(whole[released].ravel())}),
        _named("rounds", _related(rounds.swapaxes(0, 1), "{} and {}") | equal["rounds"]),
        _named("runs", _related(rounds, "{} and {}") | equal["runs"]),
    ]
    pairs = equal["leaves"]
    for a, b in combinations(names, 2):
        n = min(residuals[a].shape[2], residuals[b].shape[2])
        firsts = np.stack([residuals[leaf][released][:, :n] for leaf in (a, b)])
        pairs |= _related(firsts, f"{a} and {b}")
    found.append(_named("between leaves", pairs))
    everything = {"all": np.concatenate([sums[name] for name in names], axis=2)[released]}
    of_sum = everything | {name: sums[name][released] for name in names}
    noise = {"all": whole[released]} | {name: residuals[name][released] for name in names}
    found.append(_named("sum", {name: _along(noise[name], of_sum[name]) for name in of_sum}))
    return [finding for finding in found if finding is not None]


def _named(test: str, p_values: dict[str, float]) -> Finding | None:
    """Make a finding of the smallest p-value, with Bonferroni's correction; None if there are no p-values."""
    if not p_values:
        return None
    least = min(p_values, key=lambda name: p_values[name])
    return Finding(test if len(p_values) == 1 else f"{test}: {least}", min(1.0, p_values[least] * len(p_values)))


def _variance(values: np.ndarray) -> float:
    """Two-sided p-value for unit variance, under which the sum of squares is chi-squared."""
    from scipy.stats import chi2

    total, n = float((values**2).sum()), values.size
    return min(1.0, 2 * float(min(chi2.cdf(total, n), chi2.sf(total, n)))) if n else 1.0


def _normal(values: np.ndarray) -> float:
    from scipy.stats import kstest

    return float(kstest(values[:: max(1, -(-values.size // _MOST))], "norm").pvalue) if values.size else 1.0


def _related(parts: np.ndarray, name: str) -> dict[str, float]:
    """p-values for the correlation between any two of n parts of the residuals (rounds, runs or leaves), [n, ...].

    If parts a and b are independent, <a, b> / |b| is N(0, 1).
    """
    from scipy.stats import norm

    if not parts.size:
        return {}
    flat = parts.reshape(len(parts), -1)
    lengths = np.linalg.norm(flat, axis=1)
    if not lengths.all():  # a part has no noise; the test of the scale reports this
        return {}
    products = flat @ flat.T
    return {
        name.format(i, j): 2 * float(norm.sf(abs(products[i, j]) / lengths[j]))
        for i, j in combinations(range(len(flat)), 2)
    }


def _equal(residuals: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """p-values for the number of close entries in two leaves, in two runs or in two rounds, by the name of the test."""
    from scipy.special import bdtrc

    found: dict[str, dict[str, float]] = {"leaves": {}, "rounds": {}, "runs": {}}
    # Entries of 0 have no noise and would all count as close. The test of the scale reports them.
    sizes = {name: np.where(part == 0, np.nan, np.abs(part)) for name, part in residuals.items()}
    for (a, first), (b, second) in combinations_with_replacement(sizes.items(), 2):
        runs, rounds, n = np.minimum(first.shape, second.shape)
        some = slice(0, n, -(-n * runs * rounds // _MOST))
        for run, round in product(range(1 - runs, runs), range(1 - rounds, rounds)):
            if a == b and (run, round) <= (0, 0):
                continue
            one = first[max(-run, 0) : runs - max(run, 0), max(-round, 0) : rounds - max(round, 0), some]
            other = second[max(run, 0) :, max(round, 0) :, some][: len(one), : one.shape[1]]
            apart = np.abs(one - other)
            test = "leaves" if a != b else "runs" if run else "rounds"
            close, pairs = (apart < _CLOSE).sum(), np.isfinite(apart).sum()
            p_value = float(bdtrc(close - 1, pairs, 2 * _CLOSE * np.sqrt(2 / np.pi))) if close else 1.0
            found[test][f"{a} and {b}, {round} rounds and {run} runs apart"] = p_value
    return found


def _along(noise: np.ndarray, sums: np.ndarray) -> float:
    """p-value of the test that noise [n, entries] is uncorrelated with the sums [n, entries] to which it was added."""
    from scipy.stats import norm

    lengths = np.linalg.norm(sums, axis=1)
    some = lengths > 0
    if not some.any():
        return 1.0
    products = (noise[some] * sums[some]).sum(axis=1) / lengths[some]
    return 2 * float(norm.sf(abs(products.sum()) / np.sqrt(some.sum())))


def plot_worlds(present: np.ndarray, absent: np.ndarray, claimed: float, bound: EpsilonBound, path: str | Path) -> Path:
    """Plot histograms of an audit's scores with and without the canary, and save them as a PNG file.

    Returns:
      The path.

    Raises:
      JaxpflError: if matplotlib is not installed, or the file cannot be written.
    """
    shown = f"eps >= {bound.epsilon:.3g} ({bound.confidence:.0%} confidence), claimed {claimed:.3g}"
    xlabel = "release in the direction of the canary's gradient"
    figure, axes = new_axes(xlabel, "density of worlds", f"{shown}; delta = {bound.delta:g}")
    both = np.concatenate([present, absent])
    bins = np.linspace(both.min(), both.max(), 60).tolist()
    for scores, color, label in (
        (absent, "#888888", "without the canary"),
        (present, "#2a78d6", "with the canary"),
    ):
        axes.hist(scores, bins, density=True, histtype="stepfilled", alpha=0.55, color=color, label=label)
    axes.legend(frameon=False)
    return save_png(figure, Path(path))
