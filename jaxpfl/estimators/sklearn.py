"""Empirical Bayes in the form of scikit-learn: ``fit``, ``transform``, ``get_params``, and ``clone`` works.

scikit-learn is not needed to import or to use it.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpfl.estimators import rate_mixtures, rates
from jaxpfl.estimators.inputs import is_frame, refuse_masked
from jaxpfl.estimators.normal_means import ebnm, posterior
from jaxpfl.estimators.normal_means.fit import values
from jaxpfl.estimators.rate_answers import RateMixture
from jaxpfl.estimators.rates import checked_counts, ebbinomial, ebpoisson
from jaxpfl.support.errors import JaxpflError, unknown_name

_KINDS = {"estimate": "normal", "successes": "beta", "count": "gamma"}
"""The prior of each kind of clients, unless another one is given."""


class EmpiricalBayes:
    """A prior fitted to clients in rows of two columns, and posterior means under it.

    Args:
      kind: of the columns: "estimate" and its standard error, "successes" and trials, or "count" and exposure.
      prior: as that of `ebnm`, `ebbinomial` or `ebpoisson`; normal, beta or gamma unless given.
      components: as those of these.

    Attributes:
      answer_: of the clients that the prior was fitted to, with intervals and all else.

    Examples:
      >>> X = np.column_stack([np.random.default_rng(0).normal(size=50) + 3, np.ones(50)])
      >>> EmpiricalBayes().fit(X).transform(X).shape
      (50, 1)
    """

    def __init__(self, kind: str = "estimate", prior: str | None = None, components: int | None = None) -> None:
        self.kind = kind
        self.prior = prior
        self.components = components

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments of the constructor, by name."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **params: Any) -> EmpiricalBayes:
        """Set arguments of the constructor by name, and return this.

        Raises:
          JaxpflError: for an unknown name.
        """
        for name, value in params.items():
            if name not in self.get_params():
                raise unknown_name("parameter", name, self.get_params())
            setattr(self, name, value)
        return self

    def fit(self, X: Any, y: Any = None) -> EmpiricalBayes:
        """Fit the prior to the rows of X, [m, 2], and return this; y is ignored.

        Raises:
          JaxpflError: for an unknown kind, X of another shape, and as `ebnm`, `ebbinomial` or `ebpoisson`.
        """
        first, second = self._columns(X)
        prior: Any = _KINDS[self.kind] if self.prior is None else self.prior
        fit: Any = {"estimate": ebnm, "successes": ebbinomial, "count": ebpoisson}[self.kind]
        self.answer_ = fit(first, second, prior=prior, components=self.components)
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Posterior means of the rows of X, [m, 2], under the fitted prior, [m, 1]; clients may be new to it.

        Raises:
          JaxpflError: as `fit`; before it.
        """
        if not hasattr(self, "answer_"):
            raise JaxpflError("transform needs a fitted prior: call fit first")
        kind, answer = jnp.result_type(float), self.answer_
        if self.kind == "estimate":
            first, second = (jnp.asarray(of, kind) for of in values(*self._columns(X), one=True))
            mean = posterior(answer.prior, first, second).mean
        else:
            names = ("successes", "trials") if self.kind == "successes" else ("count", "exposure")
            given = checked_counts(*self._columns(X), names, whole=self.kind == "successes", least=1)
            z, n = (jnp.asarray(of, kind) for of in given)
            if isinstance(answer, RateMixture):
                mean = rate_mixtures.posterior(answer.prior, z, n, answer.slack).mean
            else:
                none = jnp.zeros((), kind)
                of = self.kind == "successes"
                mean = rates.posterior(z, n, answer.prior_mean, answer.prior_size, none, bounded=of).mean
        return np.asarray(mean)[:, None]

    def fit_transform(self, X: Any, y: Any = None) -> np.ndarray:
        """Posterior means of the rows of X, [m, 2], under the prior fitted to them, [m, 1]; y is ignored."""
        return self.fit(X).transform(X)

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import Tags, TargetTags, TransformerTags

        return Tags(estimator_type=None, target_tags=TargetTags(required=False), transformer_tags=TransformerTags())

    def _columns(self, X: Any) -> tuple[Any, Any]:
        if self.kind not in _KINDS:
            raise unknown_name("kind", self.kind, _KINDS)
        shape = X.shape if hasattr(X, "shape") else np.shape(X)
        if len(shape) != 2 or shape[1] != 2:
            raise JaxpflError(f"X must have two columns, got shape {shape}")
        if is_frame(X):
            return X.iloc[:, 0], X.iloc[:, 1]
        refuse_masked("X", X)
        X = X if isinstance(X, np.ndarray) else np.asarray(X)
        return X[:, 0], X[:, 1]
