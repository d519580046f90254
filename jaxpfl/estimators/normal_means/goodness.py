r"""A test that the fitted family of priors is right: normality of the estimates' scores, which are N(0, 1) if it is.

With the scores in order, Anderson and Darling's statistic, which looks at the tails too, is

.. math:: A^2 = -m - \frac1m \sum_i (2 i - 1) \big(\log \Phi(z_{(i)}) + \log \Phi(-z_{(m + 1 - i)})\big).

As the prior was fitted to the same estimates, scores lie closer to normal ones than normal ones do, by an amount that
depends on the family: the p-value is from clients drawn from the fitted prior, to which the family is fitted anew.

References: Anderson and Darling 1954, "A test of goodness of fit"; Stute, Gonzalez Manteiga and Presedo Quindimil 1993,
"Bootstrap based goodness-of-fit tests".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import log_ndtr

from jaxpfl import checks, full_precision
from jaxpfl.estimators.normal_means.answer import NormalMeans, posterior
from jaxpfl.estimators.normal_means.bootstrap import center_of, components_of, number_at_once
from jaxpfl.estimators.normal_means.families import COMPONENTS, Family
from jaxpfl.estimators.normal_means.fit import ebnm, fitted
from jaxpfl.estimators.normal_means.refits import Refits
from jaxpfl.types import Array, Key, Scalar

DRAWS = 99


class Goodness(NamedTuple):
    """A^2, and the probability of one at least as large if the family is right, [] each."""

    statistic: Array
    p_value: Array


def goodness_of_fit(
    key: Key,
    x: Any,
    s: Any,
    prior: Family = "normal",
    *,
    center: Scalar | Literal["learned"] | None = None,
    components: int | None = None,
    draws: int = DRAWS,
) -> Goodness:
    """Test a family of priors on all estimates.

    Jits, and vmaps over problems and keys; ``draws`` is static beside what is in `ebnm`. A family that can be any
    distribution, as the NPMLE, is hardly ever refused.

    Args:
      key: of the draws.
      x, s, prior, center, components: as those of `bootstrap`.
      draws: of all clients; the least p-value is 1 / (draws + 1).

    Raises:
      JaxpflError: as `ebnm`; for draws below one.
    """
    checks.count("draws", draws)
    components = components_of(prior, components)
    found = ebnm(x, s, prior, center=center, components=components)
    at, learned = center_of(center, prior, found.x.dtype)
    return _tested(key, found, at, prior=prior, learned=learned, components=components, draws=int(draws))


@full_precision.jit
def anderson_darling(z: Array) -> Array:
    """A^2 of scores [m] against N(0, 1), []."""
    ordered = jnp.sort(z)
    m = len(z)
    weights = (2 * jnp.arange(m, dtype=z.dtype) + 1) / m
    return -m - weights @ (log_ndtr(ordered) + log_ndtr(-ordered[::-1]))


def each_drawn(drawn: Callable[[Key], Array], key: Key, draws: int, clients: int, components: int = 0) -> Array:
    """Statistics of so many drawn files of some clients, [draws, ...], as many at once as `number_at_once` says."""
    together = number_at_once(draws, clients, components)
    return jax.lax.map(drawn, jax.random.split(key, draws), batch_size=together)


def beside(statistic: Array, others: Array) -> Goodness:
    """Test of a statistic [] beside those of drawn files, [draws]; NaN for data that are refused."""
    p_value = (1 + (others >= statistic).sum()) / (len(others) + 1)
    return Goodness(statistic, jnp.where(jnp.isnan(statistic), jnp.nan, p_value))


@partial(full_precision.jit, static_argnames=("prior", "learned", "components", "draws"))
def _tested(
    key: Key,
    found: NormalMeans,
    center: Array,
    *,
    prior: Family,
    learned: bool,
    components: int | None,
    draws: int,
) -> Goodness:
    x, s, likeliest = found.x, found.s, found.prior
    assert not isinstance(likeliest, Refits)
    count = COMPONENTS.get(prior, 0) if components is None else components
    even = jnp.full(x.shape, 1 / len(x), x.dtype)

    def drawn(key: Key) -> Array:
        of_theta, of_x = jax.random.split(key)
        own = likeliest.draw(of_theta, x.shape) + s * jax.random.normal(of_x, x.shape, x.dtype)
        refit = fitted(own, s, even, center, prior=prior, learned=learned, components=count).prior
        return anderson_darling(posterior(refit, own, s).scores)

    return beside(anderson_darling(found.scores), each_drawn(drawn, key, draws, len(x), count))
