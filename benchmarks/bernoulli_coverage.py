"""Coverage of 95 % intervals for the probabilities of Bernoulli clients, including rare events.

    python -m benchmarks bernoulli_coverage

In a cell, clients have equal numbers of samples, and their probabilities p_i are drawn from a Beta distribution with a
mean (``--mean``) and a coefficient of variation (``--variation``). The intervals integrate over the population's
parameters (`empirical_bayes.learned_rates`, computed with SciPy on the host, one file at a time). Each cell has
``--repetitions`` simulated files of clients. ± is a standard error over files of the mean coverage of a file's clients.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

if not __package__:
    import _script

    __package__ = _script.package

from .harness import Job, once
from .record import command, parser, positive, table, write

COUNTS, SAMPLES = (50,), (100, 1000)
MEANS, VARIATIONS = (1e-5, 1e-4, 1e-3, 1e-2), (0.0, 0.5, 1.0, 2.0)


@command
def main(argv: list[str] | None = None) -> None:
    options = parser("bernoulli_coverage", __doc__, repetitions=100)
    options.add_argument("--counts", type=positive, nargs="+", default=list(COUNTS), metavar="M")
    options.add_argument("--samples", type=positive, nargs="+", default=list(SAMPLES), metavar="N")
    options.add_argument("--mean", type=float, nargs="+", default=list(MEANS), metavar="P")
    options.add_argument("--variation", type=float, nargs="+", default=list(VARIATIONS), metavar="CV")
    args = options.parse_args(argv)
    for mean in args.mean:
        for variation in args.variation:
            if not (0 < mean < 1 and 0 <= variation**2 < (1 - mean) / mean):
                options.error(f"no Beta distribution has a mean of {mean:g} and a variation of {variation:g}")
    given = {name: getattr(args, name)[: 1 if args.quick else None] for name in ("counts", "samples", "mean")}
    settings = given | {"variation": args.variation, "repetitions": 2 if args.quick else args.repetitions}
    found = once(Job("bernoulli_coverage", settings))
    rows = [
        (
            cell["clients"], cell["samples"], f"{cell['mean']:g}",
            *(f"{100 * of['coverage']:.1f} ± {100 * of['stderr']:.1f}" for of in cell["variation"].values()),
        )
        for cell in found["cells"]
    ]  # fmt: skip
    columns = ("clients", "samples", "p", *(f"variation {cv:g}" for cv in args.variation))
    table(f"coverage of 95 % intervals in %, {settings['repetitions']} files", columns, rows)
    print(f"{found['cpu_seconds']:.0f} s of CPU time")
    write(args.json, "bernoulli_coverage", settings, found)


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """Compute the coverage and mean length of the intervals in every cell."""
    began = time.process_time()
    cells = [
        {
            "clients": m,
            "samples": n,
            "mean": mean,
            "variation": {
                f"{cv:g}": coverage(np.random.default_rng([m, n, i, j]), m, n, mean, cv, settings["repetitions"])
                for j, cv in enumerate(settings["variation"])
            },
        }
        for m in settings["counts"]
        for n in settings["samples"]
        for i, mean in enumerate(settings["mean"])
    ]
    return {"cells": cells, "cpu_seconds": time.process_time() - began}


def coverage(rng: np.random.Generator, m: int, n: int, mean: float, variation: float, files: int) -> dict[str, float]:
    """Return the intervals' coverage of clients, its standard error over files, and the intervals' mean length."""
    from jaxpfl.estimators.empirical_bayes import learned_rates

    theta = np.full((files, m), mean)
    if variation:
        total = (1 - mean) / (mean * variation**2) - 1  # sum of the Beta distribution's two parameters
        theta = rng.beta(mean * total, (1 - mean) * total, (files, m))
    ones = rng.binomial(n, theta)
    ends = [learned_rates.probabilities(of, np.full(m, n), 0.95) for of in ones]
    inside = np.array([((of.low <= p) & (p <= of.high)).mean() for of, p in zip(ends, theta, strict=True)])
    return {
        "coverage": float(inside.mean()),
        "stderr": float(inside.std(ddof=1) / files**0.5),
        "length": float(np.mean([(of.high - of.low).mean() for of in ends])),
    }


if __name__ == "__main__":
    main()
