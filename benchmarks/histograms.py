"""Clustering of histograms by users, tokens and clusters: seconds per round, and memory of sparse counts.

    python -m benchmarks histograms --plot scaling.png

A round of Algorithm 2 assigns every user to the nearest of k centers and adds the histograms of each cluster. Counts
are sparse, and become dense for one block of users at a time. Users of 500 tokens are drawn from a Dirichlet mixture.
Users beyond the first 5000 repeat them, which does not change the work. ``all of it`` is one program for the largest
number of users: the initial centers of Algorithm 1, ``--steps`` rounds without privacy, the release of the mean, and as
many noisy rounds.
"""

from __future__ import annotations

import argparse
from typing import Any

if not __package__:
    import _script

    __package__ = _script.package

from .harness import Job, compare
from .problems import device_facts, memory_facts
from .record import command, own_file, parser, positive, save_picture, table, write
from .timing import with_compile_seconds
from .worker import Contender

BASE = {"users": 10_000, "tokens": 1_000, "clusters": 10}
SWEEPS = {"users": (1_000, 10_000, 100_000), "tokens": (250, 1_000, 4_000), "clusters": (2, 10, 50)}
QUICK = {"users": 200, "tokens": 50, "clusters": 3}
DRAWN, SAMPLES, ALPHA = 5_000, 500, 200.0
MIB = 2**20


@command
def main(argv: list[str] | None = None) -> None:
    options = parser("histograms", __doc__, repetitions=3)
    options.add_argument("--steps", type=positive, default=5, help="number of rounds of 'all of it'")
    options.add_argument(
        "--plot",
        type=own_file("histograms", picture=True),
        metavar="FILE",
        help="plot seconds against users, tokens and clusters",
    )
    args = options.parse_args(argv)
    base, sweeps = (QUICK, {name: (value,) for name, value in QUICK.items()}) if args.quick else (BASE, SWEEPS)
    settings = [base | {name: value} for name, values in sweeps.items() for value in values]
    jobs = {_name(own): Job("histograms", own | {"steps": 0}) for own in settings}
    most = base | {"users": max(sweeps["users"])}
    jobs[f"all of it, {_name(most)}"] = Job("histograms", most | {"steps": args.steps})
    results = compare(jobs, repetitions=1 if args.quick else args.repetitions)
    rows = []
    for name, row in results.items():
        facts, own = row["facts"], jobs[name].settings
        row |= {"settings": dict(own), "per_user": row["median"] / own["users"]}
        memory = facts["sparse_bytes"] / MIB, facts["dense_bytes"] / MIB, facts["temporary_bytes"] / MIB
        compiling, peak = facts["round"]["total"], facts["peak_bytes"] / MIB
        rows.append((name, row["median"], 1e6 * row["per_user"], compiling, *memory, peak))
    columns = ("", "s", "us a user", "compile s", "sparse MiB", "dense would be", "temp. MiB", "peak MiB")
    table("histogram clustering, a round of Algorithm 2", columns, rows)
    write(args.json, "histograms", {"steps": args.steps}, results)
    if args.plot:
        _plot(args, sweeps, base, results)


def _name(own: dict[str, int]) -> str:
    return f"n {own['users']:,}, d {own['tokens']:,}, k {own['clusters']}"


def _plot(args: argparse.Namespace, sweeps: Any, base: dict[str, int], results: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panels = figure.subplots(1, len(sweeps), sharey=True)
    for axes, (name, values) in zip(panels, sweeps.items(), strict=True):
        seconds = [results[_name(base | {name: value})]["median"] for value in values]
        axes.loglog(values, seconds, "o-")
        axes.set_xticks(values, [f"{value:,}" for value in values])
        axes.minorticks_off()
        axes.set_xlabel(name)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("seconds a round of Algorithm 2")
    figure.suptitle("n = {users:,}, d = {tokens:,}, k = {clusters} but for the axis".format(**base), fontsize=10)
    save_picture(figure, args.plot, "histograms")


def work(settings: dict[str, Any]) -> Contender:
    """Run rounds (if steps is 0), or the program ``all of it``, at one size."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxpfl.estimators.histograms import base as histogram
    from jaxpfl.estimators.histograms import clusters as histogram_clusters
    from jaxpfl.estimators.histograms import private as histogram_private

    from .studies.histogram import simulated_users, starts

    n, d, k, steps = (settings[name] for name in ("users", "tokens", "clusters", "steps"))
    rng = np.random.default_rng(0)
    population = simulated_users.zipf_mixture(rng, d, k, ALPHA)
    drawn = simulated_users.draw_users(rng, population, np.full(min(n, DRAWN), SAMPLES)).counts
    counts = drawn.select_users(np.arange(n) % DRAWN if n > DRAWN else np.arange(n))
    users = histogram.from_sparse(counts.indptr, counts.indices, counts.counts, d)
    start = jnp.asarray(population.centers, jnp.float32)

    def everything(key: Any, users: Any) -> Any:
        of_start, of_mean, of_rounds = jax.random.split(key, 3)
        begin = starts.far_apart(of_start, users, k, temperature=0.5, floor=1e-6)
        exact = histogram_clusters.cluster(users, begin, steps, floor=1e-6)
        first = histogram_private.release_of_all(of_mean, users, radius=0.25, noise=1.0)
        how = {"radius": 0.25, "noise": 1.0, "first_noise": 1.0, "floor": 1e-6}
        private = histogram_private.cluster(of_rounds, users, first, k, steps, **how)
        return exact.objective[-1], private

    def build() -> Contender:
        if steps:
            program = jax.jit(lambda users: everything(jax.random.key(0), users))
        else:
            program = jax.jit(lambda users: histogram_clusters.cluster(users, start, 1, floor=1e-6))

        def run(rounds: int) -> None:
            for _ in range(rounds):
                jax.block_until_ready(program(users))

        def facts() -> dict[str, Any]:
            sparse = sum(leaf.nbytes for leaf in jax.tree.leaves(users))
            return {"sparse_bytes": sparse, "dense_bytes": 4 * n * d} | memory_facts() | device_facts()

        return Contender(run, facts)

    return with_compile_seconds(build)


if __name__ == "__main__":
    main()
