r"""Study of compressed updates: loss in distributed gradient descent against the number of bits sent.

The study trains a logistic regression over m clients by Algorithm 3 of Zhao et al., with all parameters x shared. In
every step, each client i sends the compressed gradient g_i of its own loss at x, and the server takes a step along the
weighted mean,

.. math:: x \leftarrow x - \eta \sum_i \frac{n_i}{n} C(g_i + e_i), \qquad e_i \leftarrow g_i + e_i - C(g_i + e_i)

where n_i is client i's number of examples, n their sum, C the compressor, and e_i the client's compression error so far
(0 without error feedback). Every compressor runs at every learning rate; rates are in units of 1 / L, where L is an
upper bound on the loss's curvature. The score is the gap between the loss and the smallest loss on the pooled data,
which Newton's method finds in double precision. Bits are the exact lengths of the encoded messages, averaged over
clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import data
from jaxpfl.core import checks, full_precision
from jaxpfl.core.types import Array, Key
from jaxpfl.studies.report import Curve, number, write_curves
from jaxpfl.studies.study import Block, Read, Results, Settings, Study, minimum, within
from jaxpfl.support.console import new_table
from jaxpfl.support.errors import JaxpflError
from jaxpfl.uploads.compression import feed_back, total_variation
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
class CompressionSettings(Settings):
    """Settings of the study.

    The model is logistic regression with an intercept and the penalty l2/2 |x|^2. Gradient descent starts from zero.
    """

    data: str = "planted:clients=20,clusters=1,examples=200,dim=54"
    """Data set with two classes, as for jaxpfl run: a9a, libsvm:PATH, ...; by default a synthetic one, with as many
    inputs as the paper's covtype."""
    data_dir: str | None = None
    """Folder of the data sets; by default $JAXPFL_DATA_DIR, then ./data."""
    clients: int = within(20, checks.count)
    """Number of clients, m, unless the data set's users are the clients."""
    alpha: float | None = within(None, checks.positive)
    """Dirichlet concentration of the clients' class proportions; by default examples are distributed iid."""
    compressors: tuple[str, ...] = within(COMPRESSORS, lambda name, text: resolve(text))
    """Compressors to compare, as for --compress."""
    steps: int = within(300, checks.count)
    """Number of steps, T."""
    batch: int = within(0, minimum(0))
    """Examples per gradient, drawn with replacement; 0 for all of a client's examples."""
    rates: tuple[float, ...] = within((0.1, 0.3, 1.0, 3.0, 6.0), checks.positive)
    """Learning rates in units of 1 / L, where L bounds the curvature; every compressor runs at each."""
    l2: float = within(1e-3, checks.positive)
    """Weight of the L2 penalty."""
    targets: tuple[float, ...] = within((1e-2, 1e-3, 1e-4), checks.positive)
    """Gaps to the optimum for which the number of bits needed is reported."""
    seed: int = 0
    """Seed of mini-batches and stochastic rounding."""
    split_seed: int = 0
    """Seed of the split into clients."""


RESOLUTION = 1e-7
"""Smallest gap that is reported: smaller gaps are rounding errors of float32 losses."""


_NEWTON = 100
"""Largest number of steps of Newton's method."""


class Problem(NamedTuple):
    """Clients' data with an intercept: x [m, n, d], y [m, n] in {-1, 1} and mask [m, n]; padded entries are zero.

    ``optimum`` is the smallest value of `loss`, and ``curvature`` an upper bound on the loss's second derivatives.
    """

    x: Array
    y: Array
    mask: Array
    optimum: float
    curvature: float


class Run(NamedTuple):
    """Results of descent at R learning rates: ``gap`` to the optimum, [R, T + 1], and ``bits`` per message, [R, T]."""

    gap: np.ndarray
    bits: np.ndarray


def load(given: CompressionSettings, source: data.Source | None = None) -> Problem:
    """Load the clients' data, and compute the smallest `loss` on all data together.

    Args:
      given: the settings.
      source: the data set; by default loaded by its name, ``given.data``.

    Raises:
      JaxpflError: if the data cannot be loaded or split; if there are not two classes; if the inputs are not a single
        array; or if Newton's method does not converge.
    """
    source = data.load(given.data, given.data_dir) if source is None else source
    if source.num_classes != 2 or not hasattr(source.x_train, "shape"):
        raise JaxpflError(
            f"data set {given.data!r} must have 2 classes and inputs in one array, got {source.num_classes} classes"
        )
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
    # The loss at the optimum is computed in float32 like the runs' losses, so rounding affects both terms of a gap.
    least = full_precision.jit(partial(loss, l2=given.l2))(jnp.asarray(found, jnp.float32), with_data)
    return with_data._replace(optimum=float(least))


def optimum(x: np.ndarray, y: np.ndarray, l2: float) -> tuple[np.ndarray, float]:
    """Minimizer [d] of the pooled loss, by Newton's method in float64, and an upper bound on the loss's curvature.

    Raises:
      JaxpflError: if Newton's method does not converge.
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
    raise JaxpflError(f"Newton's method did not converge in {_NEWTON} steps: use a larger l2")


def loss(at: Array, problem: Problem, l2: float) -> Array:
    """Mean loss over all examples plus the penalty, []."""
    each = jnp.where(problem.mask, jax.nn.softplus(-problem.y * (problem.x @ at)), 0)
    # Examples are summed per client first: a single float32 sum over all examples would round away small gaps.
    return (each.sum(axis=1) / problem.mask.sum()).sum() + l2 / 2 * (at @ at)


def descend(
    key: Key, rate: Array, problem: Problem, compressor: Compressor, given: CompressionSettings
) -> tuple[Array, Array]:
    """Run gradient descent with compressed updates; return the gaps [T + 1] and the mean bits per message [T].

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
            sent, memory = feed_back(partial(compressor.fed_back, of_rounding, step), memory, g)
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
    """Results of every compressor, each run at every learning rate."""
    rates = jnp.asarray(given.rates) / problem.curvature
    key = jax.random.key(given.seed)
    found = {}
    for text in given.compressors:
        one = partial(descend, key, compressor=resolve(text), given=given)
        gap, bits = full_precision.jit(jax.vmap(one, (0, None)))(rates, problem)
        found[text] = Run(np.maximum(np.asarray(gap, float), RESOLUTION), np.asarray(bits, float))
    return found


def run(given: CompressionSettings, source: data.Source | None = None) -> dict[str, Any]:
    """Compare the compressors: best learning rate, final gap, total bits, and bits needed to reach each target.

    Reference: Zhao et al., Figure 6.

    Args:
      given: the settings.
      source: data set, as in `load`.

    Raises:
      JaxpflError: as in `CompressionSettings.check` and `load`.
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
        "demo": demo(),
    }


def summary(found: Run, given: CompressionSettings) -> dict[str, Any]:
    """Summary of one compressor, from its runs at all learning rates."""
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


OPTIMUM = (1.0, -1.0, 1.0, -1.0)
PRINTED = ((-1.0, -1.0, 1.0, 1.0), (1.0, -1.0, 1.0, 1.0), OPTIMUM)
"""Points x_1, x_2, x_3 printed in the paper's section III-A."""
GAMMA, RATE = 0.6, 1.0
SHOWN = (1, 2, 3, 10, 100)
"""Steps to report."""
WAYS = {"constant": (False, False), "decaying": (True, False), "error feedback": (False, True)}
"""Variants of the example, each with two flags: whether gamma decays, and whether error feedback is used."""


def descent(gamma: float, rate: float, steps: int, *, decay: bool, feedback: bool) -> Array:
    """Iterates x_1, x_2, ... [steps, 4] of descent with total-variation updates, on the example of section III-A."""
    optimum = jnp.array(OPTIMUM)

    def step(at: tuple[Array, Array], t: Array) -> tuple[tuple[Array, Array], Array]:
        x, memory = at
        today = total_variation.decayed(gamma, t) if decay else gamma
        sent, left = feed_back(partial(total_variation.compress, gamma=today), memory, x - optimum)
        x = x - rate * sent.value
        return (x, left if feedback else memory), x

    start = jnp.zeros_like(optimum)
    return jax.lax.scan(step, (start, start), jnp.arange(steps))[1]


def demo() -> dict[str, Any]:
    r"""Compute the example of section III-A: descent from x_0 = 0 to the optimum x* = (1, -1, 1, -1).

    The paper shows iterates that total-variation updates "may" produce: (-1, -1, 1, 1), (1, -1, 1, 1), x*. The first of
    these iterates is impossible for any gamma and learning rate. Every update u of a gradient g satisfies :math:`u^T g
    = |u|^2 + \gamma\,TV(u)`, but the printed update is orthogonal to the gradient, and doubles the squared distance
    from the optimum. This function computes gradient descent on :math:`|x - x_*|^2 / 2`. With a constant gamma, descent
    stalls where no cumulative sum of the gradient exceeds gamma. With a decaying gamma, or with error feedback, descent
    reaches the optimum.

    Implements: Zhao et al., section III-A.

    Returns:
      The iterates of each variant in `WAYS` at the steps `SHOWN`. For the printed iterates, the inner product of the
      first update and the gradient, and the squared distances from the optimum.
    """
    found = {}
    for name, (decay, feedback) in WAYS.items():
        go = full_precision.jit(partial(descent, GAMMA, RATE, max(SHOWN), decay=decay, feedback=feedback))
        points = np.asarray(go())
        found[name] = {str(t): points[t - 1].tolist() for t in SHOWN}
    optimum, first = np.array(OPTIMUM), np.array(PRINTED[0])
    printed = {
        "update_times_gradient": float(-first @ -optimum),
        "square_distances": [float(((x - optimum) ** 2).sum()) for x in (np.zeros(4), *np.array(PRINTED))],
    }
    return {"gamma": GAMMA, "rate": RATE, "points": found, "printed": printed}


def tables(result: dict[str, Any]) -> list[Block]:
    """Table of the compressors, from the result of `run`."""
    given = result["settings"]
    table = new_table(
        f"{given['data']}: logistic regression of {result['clients']} clients, {result['dim']} parameters, "
        f"{given['steps']} steps",
        "gap: final loss minus the optimum, at the best rate (times 1/L); kbit: a client's upload in all steps; to: "
        "its upload until the gap first falls below, at the best rate for that; -: not reached",
    )
    table.add_column("compressor", style="bold", no_wrap=True)
    targets = [f"{target:g}" for target in given["targets"]]
    for name in ("rate", "gap", "kbit", *(f"to {target}" for target in targets)):
        table.add_column(name, justify="right", no_wrap=True)
    for name, row in result["compressors"].items():
        sent = [row["bits"], *(row["bits_to"][target] for target in targets)]
        kilobits = [number(None if bits is None else bits / 1000) for bits in sent]
        table.add_row(name, f"{row['rate']:g}", f"{row['gap']:.2g}", *kilobits)
    return [table]


def write_plots(folder: Path, result: dict[str, Any]) -> list[Path]:
    """Plot the gap against the bits, in one plot for the total-variation updates and one for all other compressors."""
    names = list(result["compressors"])
    updates = [name for name in names if name.startswith("tv:")]
    others = [name for name in names if name not in updates]
    gap = {name: result["compressors"][name]["gap"] for name in updates}
    kinds = ([name for name in updates if ("codebook" in name) == coded] for coded in (False, True))
    best = [min(kind, key=gap.__getitem__) for kind in kinds if kind]  # smallest gap without, and with, a codebook
    pictures = {"bits": [*others, *best], "bits-total-variation": [*updates, *others[:1]]}
    return [_draw(folder, name, result, shown) for name, shown in pictures.items() if shown]


def _draw(folder: Path, name: str, result: dict[str, Any], shown: list[str]) -> Path:
    curves, ends = {}, [1.0]
    for text in shown:
        curve = result["compressors"][text]["curve"]
        bits = np.array(curve["bits"])[1:] / 1000
        curves[text.replace(",", " ")] = Curve((), (), (), curve["gap"][1:], bits)
        ends += [bits[0], bits[-1]]
    setting = f"{result['settings']['data'].partition(':')[0]}, {result['clients']} clients"
    style: dict[str, Any] = {
        "xlabel": "kbit uploaded by a client",
        "ylabel": "loss minus the optimum",
        "title": setting,
    }
    return write_curves(folder / f"{name}.png", [min(ends), max(ends)], curves, logarithmic="xy", **style)


def _results(given: CompressionSettings, source: data.Source) -> Results:
    result = run(given, source)
    return Results(
        json=result,
        tables=lambda: tables(result),
        plots=lambda folder: write_plots(folder, result),
    )


def _read(given: CompressionSettings) -> Read:
    given.check()
    found = data.load(given.data, given.data_dir)
    return Read(found, (found.x_train, found.y_train))


STUDY = Study(CompressionSettings, _results, reads=_read)
