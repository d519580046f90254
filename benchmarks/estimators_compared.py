"""Personalized estimators compared with other libraries and loops on the same clients: time, memory, error, coverage.

    python -m benchmarks estimators_compared

There are five tasks:

- mixed model: each client has five samples about its own normal mean, and the population is learned. Contenders are
  statsmodels' MixedLM and a plain loop.
- point-normal: a prior with a point mass and a normal, fitted by marginal likelihood. Contenders are SciPy's L-BFGS-B
  on a vectorized likelihood and on a loop.
- scale mixture and npmle: priors on a grid. Contenders are the libraries ashrink and npeb (with cvxpy), which are left
  out if they are not installed.
- private: each client sends one message about its mean at epsilon = 1, as one bit (`estimators.gaussian.split`) or by
  the Gaussian mechanism with delta 1e-5.

Each contender except jaxpfl has a maximum number of clients, beyond which it takes too long. ``--repetitions`` is the
number of timings after the first call. Errors of private estimators are means over ``--draws`` draws of clients and
messages, ± a standard error.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

if not __package__:
    import _script

    __package__ = _script.package

from . import estimator_ports
from .harness import Job, JobError, once
from .record import command, parser, positive, table, write

COUNTS, QUICK = (1_000, 10_000, 100_000, 1_000_000), (200,)
CONTENDERS = {
    "mixed model": {"jaxpfl": None, "plain loop": 100_000, "statsmodels MixedLM": 10_000},
    "point-normal": {"jaxpfl": None, "SciPy L-BFGS-B": None, "SciPy on a plain loop": 1_000},
    "scale mixture": {"jaxpfl": None, "ashrink": 1_000},
    "npmle": {"jaxpfl": 100_000, "npeb": 10_000},
    "private": {"one bit, jaxpfl": None, "Gaussian mechanism, jaxpfl": None, "noisy means": None},
}
"""Contenders in each task -> largest number of clients that each is given; None for no limit."""
SAMPLES, GIB = 5, 2**30


@command
def main(argv: list[str] | None = None) -> None:
    options = parser("estimators_compared", __doc__, repetitions=3)
    options.add_argument("--counts", type=positive, nargs="+", metavar="M")
    options.add_argument("--work", choices=tuple(CONTENDERS), nargs="+", default=list(CONTENDERS))
    options.add_argument(
        "--draws", type=positive, default=20, help="draws of clients and messages for private estimators"
    )
    args = options.parse_args(argv)
    counts = args.counts or (QUICK if args.quick else COUNTS)
    draws = min(args.draws, 3) if args.quick else args.draws
    repetitions = 1 if args.quick else args.repetitions
    results: dict[str, dict[str, Any]] = {}
    skipped: dict[str, str] = {}
    for kind in args.work:
        for name, most in CONTENDERS[kind].items():
            for m in counts:
                if most is not None and m > most:
                    continue
                settings = {"work": kind, "contender": name, "clients": m, "repetitions": repetitions}
                settings |= {"draws": draws} if kind == "private" else {}
                label = f"{kind}, {name}, {m:,}"
                try:
                    results[label] = settings | once(Job("estimators_compared", settings))
                except JobError as error:
                    if "jaxpfl" in name or kind == "private":
                        raise
                    skipped[label] = str(error)  # not installed, or its solver fails
    for kind in args.work:
        rows = [
            (
                row["contender"], f"{row['clients']:,}", row["median"], row["first"], row["peak_bytes"] / GIB,
                row["rmse"], row.get("rmse_stderr"), row["local_rmse"], row["coverage"],
            )
            for row in results.values() if row["work"] == kind
        ]  # fmt: skip
        columns = ("", "clients", "s", "first s", "peak GiB", "RMSE", "±", "local's", "coverage")
        table(f"{kind}: the same clients for all", columns, rows)
    for label, why in skipped.items():
        print(f"left out: {label}: {why}")
    settings = {"counts": list(counts), "repetitions": repetitions, "draws": draws}
    write(args.json, "estimators_compared", settings, results, skipped=skipped)


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """Measure the times, peak memory, error and coverage of 95 % intervals of one contender."""
    import resource

    m, name = settings["clients"], settings["contender"]
    errors = None
    if settings["work"] == "private":
        run, theta, local, errors = _private(m, name)
    else:
        make: Callable[[int, str], tuple[Run, np.ndarray, np.ndarray]] = {
            "mixed model": _mixed,
            "point-normal": _point_normal,
            "scale mixture": estimator_ports.scale_mixture,
            "npmle": estimator_ports.npmle,
        }[settings["work"]]
        run, theta, local = make(m, name)

    def timed() -> tuple[float, np.ndarray, Callable[[], np.ndarray] | None]:
        began = time.perf_counter()
        made = run()
        return time.perf_counter() - began, *made

    first, estimates, covered = timed()
    seconds = [timed()[0] for _ in range(settings["repetitions"])]

    def rmse(of: np.ndarray) -> float:
        return float(((of - theta) ** 2).mean() ** 0.5)

    return {
        "first": first,
        "seconds": seconds,
        "median": statistics.median(seconds),
        "rmse": rmse(estimates),
        "local_rmse": rmse(local),
        "coverage": None if covered is None else float(covered().mean()),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    } | (_over_draws(errors, settings["draws"]) if errors is not None else {})


def _over_draws(errors: Callable[[int], tuple[float, float]], draws: int) -> dict[str, float | None]:
    """Return mean errors over draws with standard errors, which replace the errors of the one draw that is timed."""
    found = np.array([errors(i) for i in range(draws)])
    mean, spread = found.mean(axis=0), found.std(axis=0, ddof=1) / draws**0.5 if draws > 1 else (None, None)
    return {"rmse": mean[0], "rmse_stderr": spread[0], "local_rmse": mean[1], "local_rmse_stderr": spread[1]}


Run = Callable[[], tuple[np.ndarray, Callable[[], np.ndarray] | None]]
"""Function that returns estimates [m], and a function, not timed, that tells which intervals cover the true means."""


def _mixed(m: int, name: str) -> tuple[Run, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    theta = 3 + rng.normal(size=m)
    x = theta[:, None] + 1.5 * rng.normal(size=(m, SAMPLES))

    def jaxpfl() -> Any:
        import jax
        import jax.numpy as jnp

        from jaxpfl.estimators.empirical_bayes import learned_gaussian

        with jax.enable_x64(True):
            own = jnp.asarray(x)
            s2, free = own.var(axis=1, ddof=1).mean() / SAMPLES, m * (SAMPLES - 1)
            mean, scale = learned_gaussian.posterior(own.mean(axis=1)[:, None], s2, free)
            made, spread = np.asarray(mean)[:, 0], np.asarray(scale)[:, 0]
        reach = learned_gaussian.student(0.95, learned_gaussian.degrees_left(m, 1, free))
        return made, lambda: np.abs(made - theta) <= reach * spread

    def loop() -> Any:
        means, within = [], 0.0
        for row in x:
            mean = sum(row) / SAMPLES
            means.append(mean)
            within += sum((value - mean) ** 2 for value in row) / (SAMPLES - 1)
        s2, mu = within / m / SAMPLES, sum(means) / m
        st2 = max(0.0, sum((mean - mu) ** 2 for mean in means) / (m - 1) - s2)
        weight = st2 / (st2 + s2)
        made = np.array([mu + weight * (mean - mu) for mean in means])
        return made, lambda: np.abs(made - theta) <= 1.959964 * (weight * s2) ** 0.5

    def mixed() -> Any:
        from statsmodels.regression.mixed_linear_model import MixedLM

        groups = np.repeat(np.arange(m), SAMPLES)
        found = MixedLM(x.ravel(), np.ones((x.size, 1)), groups).fit(reml=True)
        made = found.fe_params[0] + np.array([np.ravel(found.random_effects[i])[0] for i in range(m)])
        spread = np.array([np.ravel(found.random_effects_cov[i])[0] for i in range(m)]) ** 0.5
        return made, lambda: np.abs(made - theta) <= 1.959964 * spread

    runs = {"jaxpfl": jaxpfl, "plain loop": loop, "statsmodels MixedLM": mixed}
    return runs[name], theta, x.mean(axis=1)


def _point_normal(m: int, name: str) -> tuple[Run, np.ndarray, np.ndarray]:
    from scipy import optimize, special

    rng = np.random.default_rng(0)
    theta = np.where(rng.random(m) < 0.8, 0.0, 2 * rng.normal(size=m))
    s = rng.uniform(0.5, 1.5, m)
    x = theta + s * rng.normal(size=m)

    def parts(null: float, t: float) -> tuple[np.ndarray, np.ndarray]:
        wide = s**2 + t**2
        return null * np.exp(-(x**2) / (2 * s**2)) / s, (1 - null) * np.exp(-(x**2) / (2 * wide)) / np.sqrt(wide)

    def posterior(null: float, t: float) -> Any:
        spike, slab = parts(null, t)
        p, kept = slab / (spike + slab), t**2 / (t**2 + s**2)

        def covered() -> np.ndarray:
            smooth = p * special.ndtr((theta - kept * x) / (s * kept**0.5))
            return (smooth + (1 - p) * (theta >= 0) >= 0.025) & (smooth + (1 - p) * (theta > 0) <= 0.975)

        return p * kept * x, covered

    def jaxpfl() -> Any:
        import jax

        from jaxpfl.estimators.empirical_bayes import ebnm

        with jax.enable_x64(True):
            prior: Any = ebnm(x, s, prior="point-normal").prior
            return posterior(float(prior.weights[0]), float(prior.sds[1]))

    def scipy(minus: Callable[[np.ndarray], float]) -> Any:
        best = optimize.minimize(minus, [0.0, 0.0], method="L-BFGS-B")
        return posterior(float(special.expit(best.x[0])), float(np.exp(best.x[1])))

    def vectorised(at: np.ndarray) -> float:
        return -np.log(sum(parts(special.expit(at[0]), np.exp(at[1])))).mean()

    def looped(at: np.ndarray) -> float:
        import math

        null, t2, total = float(special.expit(at[0])), math.exp(2 * at[1]), 0.0
        for own, error in zip(x.tolist(), s.tolist(), strict=True):
            wide = error**2 + t2
            spike = null * math.exp(-(own**2) / (2 * error**2)) / error
            total -= math.log(spike + (1 - null) * math.exp(-(own**2) / (2 * wide)) / wide**0.5)
        return total / m

    runs = {
        "jaxpfl": jaxpfl,
        "SciPy L-BFGS-B": lambda: scipy(vectorised),
        "SciPy on a plain loop": lambda: scipy(looped),
    }
    return runs[name], theta, x


def _private(m: int, name: str) -> tuple[Run, np.ndarray, np.ndarray, Callable[[int], tuple[float, float]]]:
    """Return the run and a function that returns the errors (private, local) in draw i; draw 0 is timed."""
    import jax

    from jaxpfl.estimators import base, gaussian
    from jaxpfl.studies import gaussian as study

    given = study.GaussianSettings(clients=m, epsilon=1.0)
    noise = study.private_release(given, study.strength(given, 1.0))
    estimators = {
        "one bit, jaxpfl": gaussian.split(given.bound, 1.0, given.sigma_x**2),
        "Gaussian mechanism, jaxpfl": study.personalized(given, noise),
    }
    draw = jax.jit(lambda key: study.draw(key, given))

    def drawn(i: int) -> tuple[Any, np.ndarray, Any, np.ndarray]:
        of_data, of_run = jax.random.split(jax.random.key(i))
        theta, clients = draw(of_data)
        return of_run, np.asarray(theta)[:, 0], clients, np.asarray(clients.x.mean(axis=1))[:, 0]

    @jax.jit
    def program(key: Any, clients: Any) -> Any:
        if name == "noisy means":
            return jax.vmap(noise.send)(jax.random.split(key, m), clients.x.mean(axis=1))
        return base.estimate(estimators[name], key, clients).estimates

    def errors(i: int) -> tuple[float, float]:
        of_run, theta, clients, own = drawn(i)
        made = np.asarray(program(of_run, clients))[:, 0]
        return float(((made - theta) ** 2).mean() ** 0.5), float(((own - theta) ** 2).mean() ** 0.5)

    of_run, theta, clients, own = drawn(0)
    return lambda: (np.asarray(program(of_run, clients))[:, 0], None), theta, own, errors


if __name__ == "__main__":
    main()
