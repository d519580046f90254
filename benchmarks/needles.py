"""Total squared error of every prior on sparse normal means, compared with the smallest possible error.

    python -m benchmarks needles

The design is Table 1 of Johnstone and Silverman 2004, which Koenker and Mizera 2014 and others also used: of 1000 means
with unit errors, 5, 50 or 500 are equal to 3, 4, 5 or 7, and the others are 0. All cells and repetitions run in one
program, in double precision. Every estimator gets the same estimates. Each cell has ``--repetitions`` simulated files;
± is a standard error over files.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

if not __package__:
    import _script

    __package__ = _script.package

from .harness import Job, once
from .record import command, parser, positive, table, write

CLIENTS, NONZERO, SIZES = 1000, (5, 50, 500), (3.0, 4.0, 5.0, 7.0)
SIDE_BY_SIDE = 8


@command
def main(argv: list[str] | None = None) -> None:
    options = parser("needles", __doc__, repetitions=100)
    options.add_argument("--seed", type=int, default=0, help="seed of the draws")
    options.add_argument(
        "--side-by-side", type=positive, default=SIDE_BY_SIDE, help="number of files fitted in one program"
    )
    args = options.parse_args(argv)
    settings = {
        "clients": 40 if args.quick else CLIENTS,
        "nonzero": [4] if args.quick else list(NONZERO),
        "sizes": list(SIZES),
        "repetitions": 2 if args.quick else args.repetitions,
        "seed": args.seed,
        "side_by_side": args.side_by_side,
    }
    found = once(Job("needles", settings))
    names = list(found["cells"][0]["errors"])
    rows = [
        (
            cell["nonzero"], f"{cell['size']:g}",
            *(f"{of['mean']:.1f} ± {of['stderr']:.1f}" for of in cell["errors"].values()),
            f"{cell['bayes_risk']:.1f}", f"{cell['soft_threshold']:.1f}",
        )
        for cell in found["cells"]
    ]  # fmt: skip
    columns = ("needles", "size", *names, "Bayes risk", "soft threshold")
    table(f"total squared error of {settings['clients']} means, {settings['repetitions']} files", columns, rows)
    print(f"{found['cpu_seconds']:.0f} s of CPU time, including compilation")
    write(args.json, "needles", settings, found)


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """Compute the total squared errors of every estimator in every cell."""
    import jax
    import jax.numpy as jnp

    from jaxpfl.estimators.empirical_bayes import FAMILIES
    from jaxpfl.studies.normal_means import bayes_risk, needles, squared_errors

    m, files = settings["clients"], settings["repetitions"]
    cells = [(nonzero, size) for nonzero in settings["nonzero"] for size in settings["sizes"]]

    def file(of: tuple[Any, Any, Any]) -> dict[str, Any]:
        key, nonzero, size = of
        theta, population = needles(m, nonzero, size)
        return squared_errors(key, theta, population, FAMILIES[1:])

    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(settings["seed"]), len(cells) * files)
        nonzero, sizes = (jnp.repeat(jnp.asarray(of), files) for of in zip(*cells, strict=True))
        began = time.process_time()
        program = jax.jit(lambda *of: jax.lax.map(file, of, batch_size=settings["side_by_side"]))
        mse = jax.device_get(program(keys, nonzero, sizes))
        seconds = time.process_time() - began
        risks = [m * bayes_risk(needles(m, *cell)[1]) for cell in cells]
    totals = {name: m * np.asarray(of).reshape(len(cells), files) for name, of in mse.items()}
    totals["normal"] = totals.pop("personalized")
    order = ("local", *FAMILIES, "known prior")
    made = [
        {
            "nonzero": nonzero,
            "size": size,
            "bayes_risk": risk,
            "soft_threshold": soft_threshold(m, nonzero, size),
            "errors": {
                name: {
                    "mean": float(totals[name][i].mean()),
                    "stderr": float(totals[name][i].std(ddof=1) / files**0.5),
                }
                for name in order
            },
        }
        for i, ((nonzero, size), risk) in enumerate(zip(cells, risks, strict=True))
    ]
    return {"cpu_seconds": seconds, "cells": made}


def soft_threshold(clients: int, nonzero: int, size: float) -> float:
    """Return the exact total risk of soft thresholding at Donoho and Johnstone's threshold, sqrt(2 log m)."""

    def normal(x: float) -> tuple[float, float]:
        """Return the normal density and distribution function."""
        return math.exp(-(x**2) / 2) / math.sqrt(2 * math.pi), (1 + math.erf(x / math.sqrt(2))) / 2

    t = math.sqrt(2 * math.log(clients))

    def risk(theta: float) -> float:
        (above, p_above), (below, p_below) = normal(t - theta), normal(-t - theta)
        kept = (1 + t**2) * (1 - p_above + p_below) + theta**2 * (p_above - p_below)
        return kept - (t + theta) * above - (t - theta) * below

    return nonzero * risk(size) + (clients - nonzero) * risk(0.0)


if __name__ == "__main__":
    main()
