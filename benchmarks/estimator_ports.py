"""Priors on a grid, fitted by jaxpfl and by other Python libraries, for `estimators_compared`.

ashrink implements ashr's scale mixtures, and npeb the NPMLE with a solver of cvxpy. Both get jaxpfl's grid and compute
only the weights. Posteriors and coverage are then computed in the same way for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

SPREADS, ATOMS = 41, 300
_AT_ONCE = 4096

Answer: TypeAlias = tuple[np.ndarray, Callable[[], np.ndarray]]
Run: TypeAlias = Callable[[], Answer]
"""Function that returns estimates [m], and a function that tells which clients' intervals cover the true means."""


def scale_mixture(m: int, name: str) -> tuple[Run, np.ndarray, np.ndarray]:
    """Fit the weights of 41 normals with mean zero; four in five true means are zero, and the others are N(0, 2^2)."""
    theta, x, s = _clients(m)
    low, widest = s.min() / 10, 2 * np.sqrt(max((x**2 - s**2).max(), 0.64 * s.min() ** 2))
    sds = np.r_[0.0, np.geomspace(low, widest, SPREADS - 1)]

    def ashrink() -> Answer:
        import ashrink

        found = ashrink.fit(x, s, scales=sds[1:])
        return posterior(np.asarray(found.prior.weights), np.zeros(SPREADS), sds, x, s, theta)

    runs = {"jaxpfl": lambda: _jaxpfl("scale-mixture", x, s, theta), "ashrink": ashrink}
    return runs[name], theta, x


def npmle(m: int, name: str) -> tuple[Run, np.ndarray, np.ndarray]:
    """Fit the weights of 300 atoms over the range of x, for the same clients."""
    theta, x, s = _clients(m)
    places = np.linspace(x.min(), x.max(), ATOMS)

    def npeb() -> Answer:
        import cvxpy  # noqa: F401 - without it npeb has no solver, and says so only when it fits
        from npeb import GLMixture

        model = GLMixture(prec_type="diagonal", atoms_init=places[:, None])
        model.fit(x[:, None], 1 / s[:, None] ** 2, max_iter_em=0, score_every=None, solver="cvxpy")
        atoms, weights = (np.ravel(of) for of in model.get_params())
        return posterior(weights, atoms, np.zeros(len(atoms)), x, s, theta)

    return {"jaxpfl": lambda: _jaxpfl("npmle", x, s, theta), "npeb": npeb}[name], theta, x


def posterior(
    weights: np.ndarray, means: np.ndarray, sds: np.ndarray, x: np.ndarray, s: np.ndarray, theta: np.ndarray
) -> Answer:
    """Return posterior means under a mixture of K normals, and a function that tells which intervals cover theta."""
    from scipy import special

    some = weights > 0
    weights, means, sds = weights[some], means[some], sds[some]

    def parts(at: slice) -> tuple[np.ndarray, ...]:
        own, error = x[at, None], s[at, None]
        wide = sds**2 + error**2
        logs = np.log(weights) - (own - means) ** 2 / (2 * wide) - np.log(wide) / 2
        p = special.softmax(logs, axis=1)
        kept = sds**2 / wide
        return p, means + kept * (own - means), error * np.sqrt(kept)

    blocks = [slice(start, start + _AT_ONCE) for start in range(0, len(x), _AT_ONCE)]
    mean = np.concatenate([(p * center).sum(axis=1) for p, center, _ in map(parts, blocks)])

    def covered() -> np.ndarray:
        inside = []
        for at in blocks:
            p, center, deviation = parts(at)
            far = theta[at, None] - center
            smooth = special.ndtr(far / np.where(deviation > 0, deviation, 1.0))
            below, up_to = (
                (p * np.where(deviation > 0, smooth, atom)).sum(axis=1) for atom in ((far > 0) * 1.0, (far >= 0) * 1.0)
            )
            inside.append((up_to >= 0.025) & (below <= 0.975))
        return np.concatenate(inside)

    return mean, covered


def _clients(m: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    theta = np.where(rng.random(m) < 0.8, 0.0, 2 * rng.normal(size=m))
    s = rng.uniform(0.5, 1.5, m)
    return theta, theta + s * rng.normal(size=m), s


def _jaxpfl(prior: Any, x: np.ndarray, s: np.ndarray, theta: np.ndarray) -> Answer:
    import jax

    from jaxpfl.estimators.empirical_bayes import ebnm

    with jax.enable_x64(True):
        found: Any = ebnm(x, s, prior=prior).prior
        weights, means, sds = (np.asarray(of) for of in (found.weights, found.means, found.sds))
    return posterior(weights, means, sds, x, s, theta)
