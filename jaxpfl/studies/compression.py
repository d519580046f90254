r"""The study of compressed updates: the loss of distributed gradient descent against the bits that were sent.

Logistic regression over m clients, Algorithm 3 of Zhao et al. with everything shared: in every step each client sends
the compressed gradient of its own loss at x, and the server takes a step along their mean,

.. math:: x \leftarrow x - \eta \sum_i \frac{n_i}{n} C(g_i + e_i), \qquad e_i \leftarrow g_i + e_i - C(g_i + e_i)

(with e_i = 0 without error feedback). Every compressor runs at every rate, in units of 1 / L with L the largest
curvature, and is scored by the gap to the optimum of the pooled data, found by Newton's method in double precision.
Bits are the exact lengths of the messages' codes, per client, averaged over clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import data
from jaxpfl.core import checks, full_precision
from jaxpfl.core.types import Array, Key
from jaxpfl.studies import compression_demo, compression_report
from jaxpfl.studies.settings import at_least
from jaxpfl.studies.study import Read, Results, Study
from jaxpfl.support.errors import JaxpflError
from jaxpfl.uploads.compression import error_feedback
from jaxpfl.uploads.compression.compressors import Compressor, resolve

COMPRESSORS = (
    "lossless",
    "tv:gamma=0.02,decay=false,feedback=false",
    "tv:gamma=0.02,feedback=false",
    "tv:gamma=0.02,decay=false",
    "tv:gamma=0.02,decay=false,codebook=3",
    "tv:gamma=0.02,decay=false,codebook=4",
    "qsgd:levels=1",
    "qsgd:levels=4",
    "top-k:share=0.05",
    "sign",
    "uniform:bits=4",
)


@dataclass(frozen=True)
class CompressionSettings:
    """Logistic regression with an intercept and a penalty l2/2 |x|^2, by descent from zero."""

    data: str = "planted:clients=20,clusters=1,examples=200,dim=54"
    """Data set of two classes, as for jaxpfl run: a9a, libsvm:PATH, ...; unless given a synthetic one, in the dimension
    of the paper's covtype."""
    data_dir: str | None = None
    """Folder of the data sets; $JAXPFL_DATA_DIR unless given, then ./data."""
    clients: int = 20
    """m, unless the data set's users are the clients."""
    alpha: float | None = None
    """Dirichlet concentration of the clients' class proportions; unless given examples are dealt iid."""
    compressors: tuple[str, ...] = COMPRESSORS
    """Compressors to compare, as for --compress."""
    steps: int = 300
    """T."""
    batch: int = 0
    """Examples per gradient, drawn with replacement; 0 for all of a client's."""
    rates: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0, 6.0)
    """Rates, times 1 / L; every compressor runs at each."""
    l2: float = 1e-3
    """Weight of the penalty."""
    targets: tuple[float, ...] = (1e-2, 1e-3, 1e-4)
    """Gaps for which the number of bits to reach them is reported."""
    seed: int = 0
    """Seed of mini-batches and stochastic rounding."""
    split_seed: int = 0
    """Seed of the split into clients."""

    def check(self) -> None:
        """Check the settings.

        Raises:
          JaxpflError: the name, its value, and what is allowed.
        """
        for name in ("clients", "steps"):
            checks.count(name, getattr(self, name))
        at_least("batch", self.batch, 0)
        checks.positive("l2", self.l2)
        if self.alpha is not None:
            checks.positive("alpha", self.alpha)
        for name in ("compressors", "rates", "targets"):
            if not getattr(self, name):
                raise JaxpflError(f"{name} must be at least one, got none")
        for name in ("rates", "targets"):
            for value in getattr(self, name):
                checks.positive(name, value)
        for text in self.compressors:
            resolve(text)


RESOLUTION = 1e-7
"""Gaps below it are the rounding of float32 losses, and count as it."""


_NEWTON = 100


class Problem(NamedTuple):
    """Clients' data with an intercept, x [m, n, d] and y [m, n] in {-1, 1}, mask [m, n]; zero where padded.

    ``optimum`` is the least value of `loss`, and ``curvature`` an upper bound of the loss's second derivatives.
    """

    x: Array
    y: Array
    mask: Array
    optimum: float
    curvature: float


class Run(NamedTuple):
    """Descent at each of R rates: ``gap`` [R, T + 1] to the optimum, and ``bits`` [R, T] of a client's message."""

    gap: np.ndarray
    bits: np.ndarray


def load(given: CompressionSettings, source: data.Source | None = None) -> Problem:
    """Load the clients' data, and compute the least `loss` on all of them together.

    Args:
      given: the settings.
      source: the data set of that name unless given.

    Raises:
      JaxpflError: for data that cannot be loaded or split, that have other than two classes, or whose inputs are not a
        single array; also if Newton's method does not converge.
    """
    source = data.load(given.data, given.data_dir) if source is None else source
    if source.num_classes != 2 or not hasattr(source.x_train, "shape"):
        raise JaxpflError(f"data set {given.data!r} has {source.num_classes} classes, expected 2 of plain inputs")
    if source.users_train is not None:
        split: dict[str, Any] = {"partition": "natural"}
    elif given.alpha is None:
        split = {"partition": "iid", "clients": given.clients}
    else:
        split = {"partition": "dirichlet", "clients": given.clients, "alpha": given.alpha}
    train = data.federate(source, **split, test_share=0.0, split_seed=given.split_seed).train
    mask = np.asarray(train.mask)
    flat = np.asarray(train.x).reshape(*mask.shape, -1)
    x = np.concatenate([flat, np.ones_like(flat[..., :1])], axis=-1) * mask[..., None]
    y = np.where(np.asarray(train.y) > 0, 1, -1) * mask
    found, curvature = optimum(x[mask].astype(np.float64), y[mask].astype(np.float64), given.l2)
    with_data = Problem(jnp.asarray(x), jnp.asarray(y, jnp.float32), jnp.asarray(mask), 0.0, curvature)
    # In the precision of the runs: what is lost in it is lost on both sides of a gap.
    least = full_precision.jit(partial(loss, l2=given.l2))(jnp.asarray(found, jnp.float32), with_data)
    return with_data._replace(optimum=float(least))


def optimum(x: np.ndarray, y: np.ndarray, l2: float) -> tuple[np.ndarray, float]:
    """Minimiser [d] of the pooled loss, by Newton's method in float64, and an upper bound on its curvature.

    Raises:
      JaxpflError: if it does not converge.
    """
    curvature = float(np.linalg.eigvalsh(x.T @ x / len(y))[-1] / 4 + l2)
    at = np.zeros(x.shape[1])
    for _ in range(_NEWTON):
        p = np.exp(-np.logaddexp(0, y * (x @ at)))
        gradient = -(y * p) @ x / len(y) + l2 * at
        if np.abs(gradient).max() < 1e-12:
            return at, curvature
        hessian = (x * (p * (1 - p))[:, None]).T @ x / len(y) + l2 * np.eye(len(at))
        at = at - np.linalg.solve(hessian, gradient)
    raise JaxpflError(f"Newton's method did not settle in {_NEWTON} steps: use a larger l2")


def loss(at: Array, problem: Problem, l2: float) -> Array:
    """Mean loss of all examples plus the penalty, []."""
    each = jnp.where(problem.mask, jax.nn.softplus(-problem.y * (problem.x @ at)), 0)
    # First over each client: of many examples one float32 sum would lose what the gaps are made of.
    return (each.sum(axis=1) / problem.mask.sum()).sum() + l2 / 2 * (at @ at)


def descend(
    key: Key, rate: Array, problem: Problem, compressor: Compressor, given: CompressionSettings
) -> tuple[Array, Array]:
    """One run of descent: the gaps [T + 1] and the bits [T].

    Implements: Zhao et al., Algorithm 3.
    """
    m, _, d = problem.x.shape
    share = problem.mask.sum(axis=1) / problem.mask.sum()

    def gradient(key: Key, at: Array, x: Array, y: Array, mask: Array) -> Array:
        if given.batch:
            places = jnp.floor(jax.random.uniform(key, (given.batch,)) * mask.sum()).astype(jnp.int32)
            x, y, mask = x[places], y[places], mask[places]
        pull = jnp.where(mask, -y * jax.nn.sigmoid(-y * (x @ at)), 0)
        return pull @ x / mask.sum() + given.l2 * at

    def send(
        key: Key, step: Array, at: Array, memory: Array, x: Array, y: Array, mask: Array
    ) -> tuple[Array, Array, Array]:
        of_batch, of_rounding = jax.random.split(key)
        g = gradient(of_batch, at, x, y, mask)
        if compressor.feeds_back:
            sent, memory = error_feedback.compress(partial(compressor.fed_back, of_rounding, step), memory, g)
        else:
            sent = compressor.compress(of_rounding, step, g)
        return sent.value, sent.bits, memory

    def step(carry: tuple[Array, Array], t: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        at, memory = carry
        keys = jax.random.split(jax.random.fold_in(key, t), m)
        sent, bits, memory = jax.vmap(send, (0, None, None, 0, 0, 0, 0))(
            keys, t, at, memory, problem.x, problem.y, problem.mask
        )
        at = at - rate * share @ sent
        return (at, memory), (loss(at, problem, given.l2), bits.astype(jnp.float32).mean())

    start = jnp.zeros(d)
    _, (losses, bits) = jax.lax.scan(step, (start, jnp.zeros((m, d))), jnp.arange(given.steps))
    return jnp.append(loss(start, problem, given.l2), losses) - problem.optimum, bits


def measured(given: CompressionSettings, problem: Problem) -> dict[str, Run]:
    """Run every compressor at every rate."""
    rates = jnp.asarray(given.rates) / problem.curvature
    key = jax.random.key(given.seed)
    found = {}
    for text in given.compressors:
        one = partial(descend, key, compressor=resolve(text), given=given)
        gap, bits = full_precision.jit(jax.vmap(one, (0, None)))(rates, problem)
        found[text] = Run(np.maximum(np.asarray(gap, float), RESOLUTION), np.asarray(bits, float))
    return found


def run(given: CompressionSettings, source: data.Source | None = None) -> dict[str, Any]:
    """Summary of every compressor: its best rate, the final gap, the bits of all messages, and the bits to each target.

    Reference: Zhao et al., Figure 6.

    Args:
      given: the settings.
      source: as `load`.

    Raises:
      JaxpflError: for settings that `CompressionSettings.check` refuses, and data of other than two classes.
    """
    given.check()
    problem = load(given, source)
    m, _, d = problem.x.shape
    found = measured(given, problem)
    return {
        "study": "compression",
        "settings": dict(vars(given)),
        "clients": m,
        "examples": int(problem.mask.sum()),
        "dim": d,
        "optimum": problem.optimum,
        "compressors": {name: summary(of, given) for name, of in found.items()},
        "demo": compression_demo.run(),
    }


def summary(found: Run, given: CompressionSettings) -> dict[str, Any]:
    """Summary of one compressor."""
    final = np.where(np.isfinite(found.gap[:, -1]), found.gap[:, -1], np.inf)
    best = int(final.argmin())
    sent = np.concatenate([np.zeros((len(final), 1)), found.bits.cumsum(axis=1)], axis=1)

    def bits_to(target: float) -> float | None:
        reached = found.gap <= target
        first = reached.argmax(axis=1)
        bits = [float(sent[r, first[r]]) for r in range(len(final)) if reached[r].any()]
        return min(bits, default=None)

    return {
        "rate": given.rates[best],
        "gap": float(final[best]),
        "bits": float(sent[best, -1]),
        "bits_to": {f"{target:g}": bits_to(target) for target in given.targets},
        "curve": {"bits": sent[best].tolist(), "gap": found.gap[best].tolist()},
    }


def _results(given: CompressionSettings, source: data.Source) -> Results:
    result = run(given, source)
    return Results(
        json=result,
        tables=lambda: compression_report.tables(result),
        plots=lambda folder: compression_report.write_plots(folder, result),
    )


def _read(given: CompressionSettings) -> Read:
    given.check()
    found = data.load(given.data, given.data_dir)
    return Read(found, (found.x_train, found.y_train))


STUDY = Study(CompressionSettings, _results, reads=_read)
