"""``jaxpfl estimate``: estimation studies, simulated or on data, with tables, plots and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from jaxpfl.estimate.gaussian import GaussianSettings
from jaxpfl.estimate.logistic_regression import LogisticSettings
from jaxpfl.estimate.regression import RegressionSettings
from jaxpfl.estimate.regression_mixture import MixtureSettings
from jaxpfl.experiment import compile_cache


@dataclass(frozen=True)
class Output:
    """Where the results go."""

    json: bool = False
    """Print the results as one JSON object, the only thing on standard output."""
    output: Path | None = None
    """Folder for summary.json and plots."""


_TO, _GAUSSIAN = Output(), GaussianSettings()
_REGRESSION, _MIXTURE, _LOGISTIC = RegressionSettings(), MixtureSettings(), LogisticSettings()


def commands() -> tuple[Callable[..., None], ...]:
    """The commands of the group."""
    return gaussian, regression, regression_mixture, logistic_regression


def gaussian(
    settings: Annotated[GaussianSettings, arg(name="")] = _GAUSSIAN,
    to: Annotated[Output, arg(name="")] = _TO,
) -> None:
    """Means of Gaussian clients: local, global, personalised, quantised and private, beside exact errors."""
    from jaxpfl.estimate import gaussian as study
    from jaxpfl.estimate import gaussian_sweeps

    compile_cache.enable()
    title = (
        f"{settings.clients} Gaussian clients of {settings.samples} samples, d = {settings.dim}, "
        f"{settings.repetitions} repetitions"
    )
    show(study.run(settings), title, to, lambda folder: gaussian_sweeps.write_plots(folder, settings))


def regression(
    settings: Annotated[RegressionSettings, arg(name="")] = _REGRESSION,
    to: Annotated[Output, arg(name="")] = _TO,
) -> None:
    """Linear regression of clients from one Gaussian: alone, pooled, known prior, Algorithm 4, and moments with EM."""
    from jaxpfl.estimate import regression as study

    compile_cache.enable()
    result = study.run(settings)
    title = _of_clients("Linear regression", settings, f"n = {settings.samples}")
    show(result, title, to, lambda folder: study.write_plots(folder, settings), _over_fedavg(result))


def regression_mixture(
    settings: Annotated[MixtureSettings, arg(name="")] = _MIXTURE,
    to: Annotated[Output, arg(name="")] = _TO,
) -> None:
    """AdaMix's Table 3: regressions from two Gaussians, by Algorithms 1 and 6, by EM, and the Bayes bound."""
    from jaxpfl.estimate import regression_mixture as study

    compile_cache.enable()
    errors = study.measured(settings)
    title = _of_clients("Mixture of two regressions", settings, f"mu = {settings.mean:g}")
    show(study.summary(settings, errors), title, to, lambda folder: study.write_plots(folder, settings, errors))


def logistic_regression(
    settings: Annotated[LogisticSettings, arg(name="")] = _LOGISTIC,
    to: Annotated[Output, arg(name="")] = _TO,
) -> None:
    """Logistic regression of clients from one Gaussian: alone, pooled, known prior, and Algorithm 5."""
    from jaxpfl.estimate import logistic_regression as study

    compile_cache.enable()
    result = study.run(settings)
    title = _of_clients("Logistic regression", settings, f"n = {settings.samples}")
    show(result, title, to, lambda folder: study.write_plots(folder, settings), _over_fedavg(result))


def _of_clients(study: str, settings: Any, more: str) -> str:
    sizes = f"m = {settings.clients}, d = {settings.dim}, {more}"
    return f"{study}, {sizes}, {settings.repetitions} repetitions; known: the prior is"


def _over_fedavg(result: dict[str, Any]) -> tuple[str, ...]:
    from jaxpfl.estimate.report import with_error

    gains = (f"{name} {with_error(row, percent=True)}" for name, row in result["gains_over_fedavg"].items())
    return (f"gain over fedavg: {', '.join(gains)}",)


def show(
    result: dict[str, Any],
    title: str,
    to: Output,
    draw: Callable[[Path], list[Path]],
    notes: tuple[str, ...] = (),
) -> None:
    """Prints a study's results, and writes them and its plots where a folder was asked for."""
    from rich.console import Console

    from jaxpfl.estimate.report import print_study
    from jaxpfl.experiment.files import write_json

    if to.output is not None:
        to.output.mkdir(parents=True, exist_ok=True)
        drawn = draw(to.output / "plots")
        result = result | {"plots": [str(path.relative_to(to.output)) for path in drawn]}
        write_json(to.output / "summary.json", result)
    if to.json:
        from jaxpfl.experiment.files import jsonable

        print(json.dumps(jsonable(result)))
        return
    print_study(Console(), result, title, notes)
    if to.output is not None:
        print(f"results: {to.output} (summary.json, plots/)")
