"""``jaxpfl estimate``: estimation studies, simulated or on data, with tables, plots and JSON."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from jaxpfl.cli.flags import UNSAID
from jaxpfl.cli.histogram import histogram
from jaxpfl.cli.output import TO, Output, claiming, write
from jaxpfl.errors import JaxpflError
from jaxpfl.experiment import compile_cache
from jaxpfl.studies.bernoulli import BernoulliSettings
from jaxpfl.studies.compression import CompressionSettings
from jaxpfl.studies.elections import ElectionSettings
from jaxpfl.studies.gaussian import GaussianPopulation, GaussianSettings
from jaxpfl.studies.logistic_regression import LogisticSettings
from jaxpfl.studies.mixture import MixtureSettings
from jaxpfl.studies.network import NetworkSettings
from jaxpfl.studies.own_data.common import LEVEL
from jaxpfl.studies.own_data.csv_columns import CsvLayout
from jaxpfl.studies.regression import RegressionSettings
from jaxpfl.studies.regression_mixture import RegressionMixtureSettings

_GAUSSIAN, _BERNOULLI, _MIXTURE, _ELECTIONS = (
    GaussianSettings(),
    BernoulliSettings(),
    MixtureSettings(),
    ElectionSettings(),
)
_REGRESSION, _REGRESSIONS, _LOGISTIC = RegressionSettings(), RegressionMixtureSettings(), LogisticSettings()
_COMPRESSION, _NETWORK, _LAYOUT = CompressionSettings(), NetworkSettings(), CsvLayout()
_POPULATION = GaussianPopulation()


def commands() -> tuple[Callable[..., None], ...]:
    """The commands of the group."""
    simulated = gaussian, bernoulli, mixture, histogram, regression, regression_mixture, logistic_regression
    return tuple(map(claiming, (*simulated, network, compression, elections, when)))


def gaussian(
    settings: Annotated[GaussianSettings, arg(name="")] = _GAUSSIAN,
    to: Annotated[Output, arg(name="")] = TO,
    csv: Annotated[Path | None, UNSAID] = None,
    layout: Annotated[CsvLayout, arg(name="")] = _LAYOUT,
    level: Annotated[float, UNSAID] = LEVEL,
) -> None:
    """Means of Gaussian clients: local, global, personalised, quantised and private, beside exact errors.

    Args:
        csv: Clients of your own: a row for each, or for each sample; how the file was read is said. With --epsilon,
            --sigma-theta, --sigma-x and --radius are what is publicly known of them: take a public center off first.
        level: Of the intervals of clients of your own.
    """
    from jaxpfl.studies import gaussian as study
    from jaxpfl.studies import gaussian_sweeps
    from jaxpfl.studies.own_data import gaussian as own
    from jaxpfl.studies.own_data import output

    compile_cache.enable()
    if csv is not None:
        made = own.run(csv, settings, layout, level=level)
        said = []
        if made.public is not None and settings.epsilon is not None:
            said = [_said_of_privacy(made.public, settings.epsilon), output.said_of_privacy(made.result["privacy"])]
        _own(made, to, said)
        return
    _refuse_layout(layout, level)
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
    csv: Annotated[Path | None, UNSAID] = None,
    layout: Annotated[CsvLayout, arg(name="")] = _LAYOUT,
    level: Annotated[float, UNSAID] = LEVEL,
) -> None:
    """Probabilities of Bernoulli clients: local, global, personalised (corrected and printed), and private bits.

    Args:
        csv: Clients of your own, samples 0 or 1: a row for each client, or for each sample; how the file was read is
            said.
        level: Of the intervals of clients of your own.
    """
    from jaxpfl.studies import bernoulli as study
    from jaxpfl.studies import bernoulli_sweeps
    from jaxpfl.studies.own_data import bernoulli as own
    from jaxpfl.studies.own_data import output

    compile_cache.enable()
    notes = []
    if settings.epsilon is not None:
        notes = [f"private: every client's message by itself, epsilon {settings.epsilon:g}, pure, mechanism one-bit"]
    if csv is not None:
        made = own.run(csv, settings, layout, level=level)
        _own(made, to, [*notes, output.said_of_privacy(made.result["privacy"])] if notes else [])
        return
    _refuse_layout(layout, level)
    result = study.run(settings)
    title = f"{settings.clients} Bernoulli clients of {settings.samples} samples, {settings.prior}"
    show(
        result,
        f"{title}, {settings.repetitions} repetitions",
        to,
        lambda f: bernoulli_sweeps.write_plots(f, settings),
        notes,
    )


def mixture(
    settings: Annotated[MixtureSettings, arg(name="")] = _MIXTURE,
    to: Annotated[Output, arg(name="")] = TO,
    csv: Annotated[Path | None, UNSAID] = None,
    layout: Annotated[CsvLayout, arg(name="")] = _LAYOUT,
) -> None:
    """Clients that are one of k kinds: EM, Algorithm 3 as printed, and private k-means, centrally and locally.

    Args:
        csv: Clients of your own: a row for each, or for each sample; how the file was read is said. --components is how
            many kinds EM finds.
    """
    from jaxpfl.studies import mixture as study

    compile_cache.enable()
    if csv is not None:
        _own_kinds(csv, settings, layout, to)
        return
    _refuse_layout(layout)
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
    from jaxpfl.studies import elections as study

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
    settings: Annotated[GaussianPopulation, arg(name="")] = _POPULATION,
    to: Annotated[Output, arg(name="")] = TO,
) -> None:
    """When collaboration helps: what theory promises at these settings, what it takes, and the phase diagram."""
    from jaxpfl.studies import when as study

    compile_cache.enable()
    result = study.run(settings)
    if not to.json:
        print("\n".join(study.verdict(result)))
    write(result, to, lambda f: study.write_plots(f, settings))


def regression(
    settings: Annotated[RegressionSettings, arg(name="")] = _REGRESSION,
    to: Annotated[Output, arg(name="")] = TO,
) -> None:
    """Linear regression of clients from one Gaussian: alone, pooled, known prior, Algorithm 4, and moments with EM."""
    from jaxpfl.studies import regression as study

    compile_cache.enable()
    result = study.run(settings)
    title = _of_clients("Linear regression", settings, f"n = {settings.samples}")
    show(result, title, to, lambda folder: study.write_plots(folder, settings), _over_fedavg(result))


def regression_mixture(
    settings: Annotated[RegressionMixtureSettings, arg(name="")] = _REGRESSIONS,
    to: Annotated[Output, arg(name="")] = TO,
) -> None:
    """AdaMix's Table 3: regressions from two Gaussians, by Algorithms 1 and 6, by EM, and the Bayes bound."""
    from jaxpfl.studies import regression_mixture as study

    compile_cache.enable()
    errors = study.measured(settings)
    title = _of_clients("Mixture of two regressions", settings, f"mu = {settings.mean:g}")
    show(study.summary(settings, errors), title, to, lambda folder: study.write_plots(folder, settings, errors))


def logistic_regression(
    settings: Annotated[LogisticSettings, arg(name="")] = _LOGISTIC,
    to: Annotated[Output, arg(name="")] = TO,
) -> None:
    """Logistic regression of clients from one Gaussian: alone, pooled, known prior, and Algorithm 5."""
    from jaxpfl.studies import logistic_regression as study

    compile_cache.enable()
    result = study.run(settings)
    title = _of_clients("Logistic regression", settings, f"n = {settings.samples}")
    show(result, title, to, lambda folder: study.write_plots(folder, settings), _over_fedavg(result))


def network(
    settings: Annotated[NetworkSettings, arg(name="")] = _NETWORK,
    to: Annotated[Output, arg(name="")] = TO,
) -> None:
    """Planted clusters of clients: the network lasso over lambda, beside local, FedAvg, IFCA, Ditto and pFedMe."""
    from jaxpfl.console import Console
    from jaxpfl.studies import network as study
    from jaxpfl.studies import network_report

    compile_cache.enable()
    result = study.run(settings)
    if not to.json:
        network_report.print_table(Console(), result)
    write(result, to, lambda folder: network_report.write_plots(folder, result))


def compression(
    settings: Annotated[CompressionSettings, arg(name="")] = _COMPRESSION,
    to: Annotated[Output, arg(name="")] = TO,
) -> None:
    """Loss against transmitted bits: total variation, codebooks, QSGD, top-k, sign and uniform; and the text's demo."""
    from jaxpfl.console import Console
    from jaxpfl.studies import compression as study
    from jaxpfl.studies import compression_demo, compression_report

    compile_cache.enable()
    result = study.run(settings)
    if not to.json:
        console = Console()
        compression_report.print_table(console, result)
        for line in compression_demo.said(result["demo"]):
            console.print(line, highlight=False, soft_wrap=True)
    write(result, to, lambda folder: compression_report.write_plots(folder, result))


def _of_clients(study: str, settings: Any, more: str) -> str:
    sizes = f"m = {settings.clients}, d = {settings.dim}, {more}"
    return f"{study}, {sizes}, {settings.repetitions} repetitions; known: the prior is"


def _over_fedavg(result: dict[str, Any]) -> list[str]:
    from jaxpfl.studies.report import with_error

    gains = (f"{name} {with_error(row, percent=True)}" for name, row in result["gains_over_fedavg"].items())
    return [f"gain over fedavg: {', '.join(gains)}"]


def show(
    result: dict[str, Any],
    title: str,
    to: Output,
    draw: Callable[[Path], list[Path]],
    notes: list[str] | None = None,
) -> None:
    """Prints a study's results, and writes them and its plots where a folder was asked for."""
    _print(result, title, to, notes or [])
    write(result, to, draw)


def _print(result: dict[str, Any], title: str, to: Output, notes: list[str]) -> None:
    from jaxpfl.console import Console
    from jaxpfl.studies.report import print_study

    if not to.json:
        print_study(Console(), result, title, notes)


def _refuse_layout(layout: CsvLayout, level: float = LEVEL) -> None:
    from jaxpfl.studies.settings import refuse_given

    refuse_given(layout, vars(layout), "says how --csv is to be read, and there is none")
    if level != LEVEL:
        raise JaxpflError(f"level is of the intervals of --csv, and there is none, got {level}")


def _own(own: Any, to: Output, said: list[str]) -> None:
    from jaxpfl.console import Console
    from jaxpfl.studies.own_data import output

    result = own.result
    if not to.json:
        _say_how_it_was_read(result)
    level = result["level"]
    last = (
        []
        if to.output is not None
        else [f"estimates of every client, with {output.percent(level)} intervals: --output FOLDER"]
    )
    title = f"{result['csv']}: {result['clients']} clients"
    blocks = output.blocks(result)
    for number, (column, block) in enumerate(blocks.items(), start=1):
        notes = output.said(block, level) + ([*said, *last] if number == len(blocks) else [])
        of = f"{title}, {column}" if column else title
        if "not_scored" not in result:
            _print(block, f"{of}: squared error about {result['of']}; ± over clients", to, notes)
        elif not to.json:
            for line in (of, f"no errors on held-out samples: {result['not_scored']}", *notes):
                Console().print(line, highlight=False, soft_wrap=True)
    write(result, to, lambda folder: output.write(folder, own), "summary.json, estimates.csv, plots/")


def _own_kinds(csv: Path, settings: MixtureSettings, layout: CsvLayout, to: Output) -> None:
    from jaxpfl.console import Console
    from jaxpfl.studies.own_data import mixture as own

    made = own.run(csv, settings, layout)
    if not to.json:
        _say_how_it_was_read(made.result)
        own.print_table(Console(), made.result)
        if to.output is None:
            print("estimates of every client, and its probabilities of the kinds: --output FOLDER")
    write(made.result, to, lambda folder: own.write(folder, made), "summary.json, estimates.csv, plots/")


def _say_how_it_was_read(result: dict[str, Any]) -> None:
    from jaxpfl.console import Console
    from jaxpfl.studies.own_data import client_csv

    for line in [*client_csv.told(result["read"]), *result.get("notes", [])]:
        Console().print(line, highlight=False, soft_wrap=True, markup=False)
    print()


def _said_of_privacy(settings: GaussianSettings, epsilon: float) -> str:
    from jaxpfl.studies import gaussian as study

    delta = "pure" if settings.mechanism == "one-bit" else f"delta {settings.delta:g}"
    what = "each entry" if settings.dim == 1 else "the norm"
    bits = study.private_release(settings, study.strength(settings, epsilon)).bits
    return (
        f"private: every client's message by itself, epsilon {epsilon:g}, {delta}, mechanism {settings.mechanism}, "
        f"{what} clipped to {settings.bound:.3g}, {bits} bit{'s' if bits > 1 else ''} an entry"
    )
