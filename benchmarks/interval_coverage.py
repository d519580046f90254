"""Coverage of 95 % intervals that treat the fitted prior as known, and of intervals that include its uncertainty.

    python -m benchmarks interval_coverage

There are two kinds of cells: Poisson counts with mean 5 under a Gamma prior with a given coefficient of variation
(``--variation``), and normal means with unit errors under a normal prior with a given spread (``--spread``). Both have
plug-in and integrated intervals. Each cell has ``--repetitions`` simulated files of clients. ± is a standard error over
files of the mean coverage of a file's clients.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

if not __package__:
    import _script

    __package__ = _script.package

from .harness import Job, once
from .record import command, parser, positive, table, write

COUNTS, QUICK = (10, 30, 100), (10,)
VARIATIONS, SPREADS = (0.0, 0.2, 0.5, 1.0), (0.3, 1.0)
MEAN = 5.0


@command
def main(argv: list[str] | None = None) -> None:
    options = parser("interval_coverage", __doc__, repetitions=200)
    options.add_argument("--counts", type=positive, nargs="+", metavar="M")
    options.add_argument("--variation", type=float, nargs="*", default=None, metavar="CV")
    options.add_argument("--spread", type=float, nargs="*", default=None, metavar="SD")
    args = options.parse_args(argv)
    counts = args.counts or (QUICK if args.quick else COUNTS)
    files = 2 if args.quick else args.repetitions
    variations = (VARIATIONS[:1] if args.quick else VARIATIONS) if args.variation is None else args.variation
    spreads = (SPREADS[:1] if args.quick else SPREADS) if args.spread is None else args.spread
    cells = [("gamma", variation, m) for variation in variations for m in counts]
    cells += [("normal", spread, m) for spread in spreads for m in counts]
    results: dict[str, dict[str, Any]] = {}
    for prior, spread, m in cells:
        settings = {"prior": prior, "spread": spread, "clients": m, "files": files}
        results[f"{prior}, {spread:g}, {m}"] = settings | once(Job("interval_coverage", settings))
    rows = [
        (
            row["prior"], f"{row['spread']:g}", row["clients"],
            *(f"{100 * row[f'{which}_{of}']:.1f}" for which in ("plug_in", "counted") for of in ("coverage", "stderr")),
            row["plug_in_length"], row["counted_length"], row["cpu_seconds"],
        )
        for row in results.values()
    ]  # fmt: skip
    columns = ("", "spread", "clients", "plug-in", "±", "counted", "±", "length", "length", "CPU s")
    table(f"coverage of 95 % intervals in %, {files} files", columns, rows)
    write(args.json, "interval_coverage", {"counts": list(counts), "repetitions": files}, results)


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """Compute the coverage and mean length of both kinds of intervals in one cell."""
    import jax

    files, began = settings["files"], time.process_time()
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        theta, ends = (_counts if settings["prior"] == "gamma" else _means)(rng, settings)
        made = [[np.asarray(end) for end in ends(i)] for i in range(files)]
    found: dict[str, Any] = {"cpu_seconds": time.process_time() - began}
    for name, (low, high) in {"plug_in": (0, 1), "counted": (2, 3)}.items():
        inside = np.array([((of[low] <= own) & (own <= of[high])).mean() for of, own in zip(made, theta, strict=True)])
        found[f"{name}_coverage"] = float(inside.mean())
        found[f"{name}_stderr"] = float(inside.std(ddof=1) / files**0.5)
        found[f"{name}_length"] = float(np.mean([(of[high] - of[low]).mean() for of in made]))
    return found


Ends = Callable[[int], tuple[Any, ...]]
"""Endpoints of a file's intervals, [m] each: plug-in, and with the prior's uncertainty."""


def _counts(rng: np.random.Generator, settings: dict[str, Any]) -> tuple[np.ndarray, Ends]:
    import jax
    import jax.numpy as jnp

    from jaxpfl.estimators.empirical_bayes import ebpoisson, learned_rates

    shape, c = (settings["files"], settings["clients"]), settings["spread"] ** 2
    theta = rng.gamma(1 / c, c * MEAN, shape) if c else np.full(shape, MEAN)
    z = rng.poisson(theta)
    plug_in = jax.jit(lambda z: ebpoisson(z, 1.0).interval())

    def ends(i: int) -> tuple[Any, ...]:
        believed = learned_rates.rates(z[i], 1.0, 0.95)
        return *plug_in(jnp.asarray(z[i], float)), believed.low, believed.high

    return theta, ends


def _means(rng: np.random.Generator, settings: dict[str, Any]) -> tuple[np.ndarray, Ends]:
    import jax
    import jax.numpy as jnp

    from jaxpfl.estimators.empirical_bayes import ebnm, learned_gaussian

    theta = settings["spread"] * rng.normal(size=(settings["files"], settings["clients"]))
    x = theta + rng.normal(size=theta.shape)
    plug_in = jax.jit(lambda x: ebnm(x, 1.0).interval())

    def ends(i: int) -> tuple[Any, ...]:
        counted = learned_gaussian.morris(jnp.asarray(x[i])[:, None], 1.0, 0.95)
        return *plug_in(jnp.asarray(x[i])), *(end[:, 0] for end in counted)

    return theta, ends


if __name__ == "__main__":
    main()
