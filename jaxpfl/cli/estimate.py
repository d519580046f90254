"""``jaxpfl estimate``: estimation studies, simulated or on data, with tables, plots and JSON."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from jaxpfl.cli.histogram import histogram
from jaxpfl.cli.output import TO, Output, write
from jaxpfl.estimate.bernoulli import BernoulliSettings
from jaxpfl.estimate.elections import ElectionSettings
from jaxpfl.estimate.gaussian import GaussianSettings
from jaxpfl.estimate.mixture import MixtureSettings
from jaxpfl.experiment import compile_cache

_GAUSSIAN, _BERNOULLI, _MIXTURE, _ELECTIONS = (
    GaussianSettings(),
    BernoulliSettings(),
    MixtureSettings(),
    ElectionSettings(),
)


def commands() -> tuple[Callable[..., None], ...]:
    """The commands of the group."""
    return gaussian, bernoulli, mixture, histogram, elections, when


def gaussian(
    settings: Annotated[GaussianSettings, arg(name="")] = _GAUSSIAN,
    to: Annotated[Output, arg(name="")] = TO,
    csv: Path | None = None,
) -> None:
    """Means of Gaussian clients: local, global, personalised, quantised and private, beside exact errors.

    Args:
        csv: Clients of your own: a row each, or the header client,value and a row for each sample. With --epsilon,
            --sigma-theta, --sigma-x and --radius are what is publicly known of them.
    """
    from jaxpfl.estimate import gaussian as study
    from jaxpfl.estimate import gaussian_sweeps, own_data

    compile_cache.enable()
    if csv is not None:
        _own(own_data.run_gaussian(csv, settings), to)
        return
    result = study.run(settings)
    title = f"{settings.clients} Gaussian clients of {settings.samples} samples, d = {settings.dim}"
    notes = [f"no estimator does better than {result['bounds']['unknown mean']:.4g} (mu unknown)"]
    if settings.epsilon is not None:
        notes.append(_said_of_privacy(settings, settings.epsilon))
    show(
        result,
        f"{title}, {settings.repetitions} repetitions",
        to,
        lambda f: gaussian_sweeps.write_plots(f, settings),
        notes,
    )


def bernoulli(
    settings: Annotated[BernoulliSettings, arg(name="")] = _BERNOULLI,
    to: Annotated[Output, arg(name="")] = TO,
    csv: Path | None = None,
) -> None:
    """Probabilities of Bernoulli clients: local, global, personalised (corrected and printed), and private bits.

    Args:
        csv: Clients of your own, samples 0 or 1: a row each, or the header client,value and a row for each sample.
    """
    from jaxpfl.estimate import bernoulli as study
    from jaxpfl.estimate import bernoulli_sweeps, own_data

    compile_cache.enable()
    if csv is not None:
        _own(own_data.run_bernoulli(csv, settings), to)
        return
    result = study.run(settings)
    title = f"{settings.clients} Bernoulli clients of {settings.samples} samples, {settings.prior}"
    show(
        result, f"{title}, {settings.repetitions} repetitions", to, lambda f: bernoulli_sweeps.write_plots(f, settings)
    )


def mixture(
    settings: Annotated[MixtureSettings, arg(name="")] = _MIXTURE,
    to: Annotated[Output, arg(name="")] = TO,
) -> None:
    """Clients that are one of k kinds: EM, Algorithm 3 as printed, and private k-means, centrally and locally."""
    from jaxpfl.estimate import mixture as study

    compile_cache.enable()
    result = study.run(settings)
    title = (
        f"{settings.clients} clients of {settings.samples} samples at {settings.components} centers, d = {settings.dim}"
    )
    first, last = result["alternation"][0]["mean"], result["alternation"][-1]["mean"]
    notes = [f"Algorithm 3 as printed: {first:.4g} after one round, {last:.4g} after {settings.iterations}"]
    if settings.epsilon is not None:
        spent = result["privacy"]
        notes += [
            f"privacy of a client: epsilon {settings.epsilon:g}, delta {settings.delta:g}, means clipped to a norm of "
            f"{spent['clip']:.3g}",
            f"private: central, add or remove one; {settings.iterations} Gaussian steps of noise multiplier "
            f"{spent['central']['noise_multiplier']:.3g}, from a start that knows no data",
            f"local privacy: one message with noise of standard deviation {spent['local']['stddev']:.3g}",
        ]
    show(result, f"{title}, {settings.repetitions} repetitions", to, lambda f: study.write_plots(f, result), notes)


def elections(
    settings: Annotated[ElectionSettings, arg(name="")] = _ELECTIONS,
    to: Annotated[Output, arg(name="")] = TO,
) -> None:
    """US counties' political tendencies: six-fold cross-validation over the elections of 2000 to 2020."""
    from jaxpfl.estimate import elections as study

    compile_cache.enable()
    result = study.run(settings)
    own, printed = result["gains"]["personalized"], result["printed_gain"]
    notes = [
        f"gain over local: {100 * own['mean']:.1f} ± {100 * own['std']:.1f} % (standard deviation over folds); "
        f"printed in the paper: {100 * printed['mean']:.1f} ± {100 * printed['std']:.1f} %"
    ]
    title = f"{result['counties']} counties, each election left out in turn; ± over the {len(result['years'])} folds"
    show(result, title, to, lambda f: study.write_plots(f, result), notes)


def when(
    settings: Annotated[GaussianSettings, arg(name="")] = _GAUSSIAN,
    to: Annotated[Output, arg(name="")] = TO,
) -> None:
    """When collaboration helps: what theory promises at these settings, what it takes, and the phase diagram."""
    from jaxpfl.estimate import when as study

    compile_cache.enable()
    result = study.run(settings)
    if not to.json:
        print("\n".join(study.verdict(result)))
    write(result, to, lambda f: study.write_plots(f, settings))


def show(
    result: dict[str, Any],
    title: str,
    to: Output,
    draw: Callable[[Path], list[Path]],
    notes: list[str] | None = None,
) -> None:
    """Prints a study's results, and writes them and its plots where a folder was asked for."""
    from rich.console import Console

    from jaxpfl.estimate.report import print_study

    if not to.json:
        print_study(Console(), result, title, notes or [])
    write(result, to, draw)


def _own(own: Any, to: Output) -> None:
    from jaxpfl.estimate import own_data

    result = own.result
    learned = ", ".join(
        f"{name} {value if isinstance(value, list) else f'{value:.4g}'}" for name, value in result["estimated"].items()
    )
    notes = [f"learned of all: {learned}", "estimates of every client, with 95 % intervals: --output FOLDER"]
    title = f"{result['csv']}: {result['clients']} clients, squared error on {result['of']}; ± over clients"
    show(result, title, to, lambda folder: own_data.write(folder, own), notes)


def _said_of_privacy(settings: GaussianSettings, epsilon: float) -> str:
    from jaxpfl.estimate import gaussian as study

    delta = "pure" if settings.mechanism == "one-bit" else f"delta {settings.delta:g}"
    what = "each entry" if settings.dim == 1 else "the norm"
    bits = study.private_release(settings, study.strength(settings, epsilon)).bits
    return (
        f"private: every client's message by itself, epsilon {epsilon:g}, {delta}, mechanism {settings.mechanism}, "
        f"{what} clipped to {settings.bound:.3g}, {bits} bit{'s' if bits > 1 else ''} an entry"
    )
