"""Seconds and memory of estimation studies with a thousand to a million clients in one program.

    python -m benchmarks estimators

Gaussian clients have 15 samples and Bernoulli clients 14, as in the paper. A "round" draws all samples anew, and
computes the mean squared errors of three estimators: local, personalized (with variances learned from the clients) and
private (one bit from each client). Each study is timed ``--repetitions`` times, in turn with the others.
"""

from __future__ import annotations

from typing import Any

if not __package__:
    import _script

    __package__ = _script.package

from .harness import Job, compare
from .problems import device_facts, memory_facts
from .record import command, parser, positive, table, write
from .timing import with_compile_seconds
from .worker import Contender

COUNTS, QUICK = (1_000, 10_000, 100_000, 1_000_000), (200,)
GIB = 2**30


@command
def main(argv: list[str] | None = None) -> None:
    options = parser("estimators", __doc__)
    options.add_argument("--counts", type=positive, nargs="+", metavar="M")
    args = options.parse_args(argv)
    counts = args.counts or (QUICK if args.quick else COUNTS)
    repetitions = 1 if args.quick else args.repetitions
    jobs = {
        f"{model}, {m:,}": Job("estimators", {"model": model, "clients": m})
        for model in ("gaussian", "bernoulli")
        for m in counts
    }
    results = compare(jobs, repetitions=repetitions)
    rows = []
    for name, row in results.items():
        facts, m = row["facts"], jobs[name].settings["clients"]
        memory = facts["peak_bytes"] / GIB, facts["temporary_bytes"] / GIB
        errors = facts["errors"]
        gains = [1 - errors[each] / errors["local"] for each in ("personalized", "private")]
        rows.append((name, row["median"], 1e6 * row["median"] / m, facts["round"]["total"], *memory, *gains))
    columns = ("", "s", "us a client", "compile s", "peak GiB", "temp. GiB", "gain", "private")
    table("studies of m clients, three estimators each, one program", columns, rows)
    write(args.json, "estimators", {"counts": list(counts), "repetitions": repetitions}, results)


def work(settings: dict[str, Any]) -> Contender:
    """Run studies of one model with one number of clients."""
    import jax

    from jaxpfl.estimators import bernoulli, gaussian
    from jaxpfl.studies import bernoulli as bernoulli_study
    from jaxpfl.studies import gaussian as gaussian_study
    from jaxpfl.studies.repetitions import repetition

    m = settings["clients"]
    if settings["model"] == "gaussian":
        given = gaussian_study.GaussianSettings(clients=m, mechanism="one-bit")
        private = gaussian_study.personalized(given, gaussian_study.private_release(given, 1.0))
        estimators = {"local": gaussian.local(), "personalized": gaussian.personalized(), "private": private}
        study = repetition(lambda key: gaussian_study.draw(key, given), estimators)
    else:
        estimators = {"local": bernoulli.local(), "personalized": bernoulli.personalized()}
        estimators["private"] = bernoulli.split(1.0)
        given = bernoulli_study.BernoulliSettings(clients=m)
        prior = bernoulli_study.parse_prior(given.prior)
        study = repetition(lambda key: bernoulli_study.draw(key, given, prior), estimators)

    def build() -> Contender:
        program, found, done = jax.jit(study), {}, 0

        def run(rounds: int) -> None:
            nonlocal done
            for _ in range(rounds):
                found.update(jax.device_get(program(jax.random.key(done))))
                done += 1

        def facts() -> dict[str, Any]:
            errors = {name: float(value) for name, value in found.items()}
            return {"errors": errors} | memory_facts() | device_facts()

        return Contender(run, facts)

    return with_compile_seconds(build)


if __name__ == "__main__":
    main()
