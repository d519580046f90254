"""Normal means by quadrature in float64 NumPy and SciPy: an oracle that shares no formula with the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats


class Posterior(NamedTuple):
    marginal: float
    mean: float
    sd: float
    not_above: float
    not_below: float


class Prior(NamedTuple):
    """Atoms (place, weight), and a density with the points at which it is not smooth."""

    atoms: tuple[tuple[float, float], ...] = ()
    density: Callable[[np.ndarray], np.ndarray] | None = None
    kinks: tuple[float, ...] = ()


def normals(weights, means, sds) -> Prior:
    """A mixture of normals, those without spread as atoms."""
    atoms = tuple((c, w) for w, c, t in zip(weights, means, sds, strict=True) if t == 0)
    smooth = [(w, c, t) for w, c, t in zip(weights, means, sds, strict=True) if t > 0]
    if not smooth:
        return Prior(atoms)
    w, c, spread = (np.array(of) for of in zip(*smooth, strict=True))
    return Prior(atoms, lambda a: stats.norm.pdf(a[:, None], c, spread) @ w, tuple(c))


def posterior(prior: Prior, x: float, s: float) -> Posterior:
    """Moments by Gauss-Legendre quadrature of the joint density, on pieces split at zero, the kinks and multiples of s
    around x, and between the kinks.
    """
    reach = 12 * s
    edges = {0.0, *prior.kinks, *np.linspace(x - reach, x + reach, 49)}
    for kink in prior.kinks:
        edges |= {
            *np.linspace(kink - 60, kink + 60, 481),
            *(kink + sign * 2.0**-k for k in range(20) for sign in (1, -1)),
        }
    ends = np.array(sorted(edges))
    nodes, weights = np.polynomial.legendre.leggauss(16)
    half = np.diff(ends)[:, None] / 2
    theta, mass = (ends[:-1, None] + half * (1 + nodes)).ravel(), (half * weights).ravel()
    mass = mass * (0.0 if prior.density is None else prior.density(theta))
    places, shares = (np.array([of[i] for of in prior.atoms]) for i in (0, 1))
    theta, mass = np.concatenate([theta, places]), np.concatenate([mass, shares])
    mass = mass * stats.norm.pdf(x, theta, s)
    z = mass.sum()
    mean = mass @ theta / z
    return Posterior(
        z, mean, (mass @ (theta - mean) ** 2 / z) ** 0.5, mass[theta <= 0].sum() / z, mass[theta >= 0].sum() / z
    )


def likeliest(log_density: np.ndarray) -> float:
    """Greatest mean log likelihood over the simplex, by SLSQP from even weights: for a few components."""
    L = np.exp(log_density)
    K = L.shape[1]
    found = optimize.minimize(
        lambda w: -np.log(L @ w).mean(),
        np.full(K, 1 / K),
        jac=lambda w: -(L / (L @ w)[:, None]).mean(axis=0),
        bounds=[(0, 1)] * K,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones(K)},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    return -float(found.fun)
