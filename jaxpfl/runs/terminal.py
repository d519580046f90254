"""Display of a run on the terminal: its progress, its results, and the execution plan (``--explain-plan``)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from jaxpfl.data.stack import listed
from jaxpfl.engine.evaluate import ACCURACY, UNBOUNDED, Headline, stored_headline, words_of_clients
from jaxpfl.engine.placement import free_bytes
from jaxpfl.runs.control import Reporter
from jaxpfl.runs.setup import Experiment, require
from jaxpfl.support.console import format_seconds, new_table
from jaxpfl.support.errors import label
from jaxpfl.support.host_memory import readable


class _Bars:
    """Context manager that draws progress bars; they are erased if an error ends the context."""

    def __init__(self, console: Console, name: ProgressColumn, beside: ProgressColumn):
        bar = BarColumn(bar_width=None), MofNCompleteColumn()
        times = TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
        self._progress = Progress(name, *bar, beside, *times, console=console)
        self._task: Any = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None and self._progress.tasks:
            self._progress.stop()
            return
        self._progress.live.transient = True
        self._progress.live.stop()

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self._progress.console.print(text, highlight=False, soft_wrap=True)


class Terminal(_Bars, Reporter):
    """Reporter of a run that draws a progress bar for each method."""

    def __init__(self, console: Console, headline: Headline = ACCURACY):
        self._headline = headline
        scores = TextColumn("loss {task.fields[loss]}  {task.fields[metric]} {task.fields[score]}")
        super().__init__(console, TextColumn("[bold]{task.description:>12}"), scores)

    def start(self, name: str, runs: int, rounds: int, done: int = 0) -> None:
        del runs
        fields: dict[str, Any] = {"loss": "   -  ", "metric": self._headline.words, "score": "   -  "}
        self._task = self._progress.add_task(name, total=rounds, completed=done, **fields)
        self._progress.refresh()

    def progress(self, rounds: int, loss: float, score: float | None = None) -> None:
        shown = "   -  "
        if score is not None:
            shown = f"{100 * score:5.2f}%" if self._headline.percent else f"{score:6.4g}"
        self._progress.update(self._task, completed=rounds, loss=f"{loss:6.3f}", score=shown)


class SweepTerminal(_Bars, Reporter):
    """Reporter of a sweep that draws a single progress bar for all runs.

    Args:
      console: console to draw on.
      runs: total number of runs of the sweep.
      done: number of runs that are already recorded.
    """

    def __init__(self, console: Console, runs: int, done: int = 0):
        super().__init__(console, TextColumn("[bold]runs"), TextColumn("{task.description}"))
        self._task = self._progress.add_task("", total=runs, completed=done)
        self._done, self._chunk, self._rounds, self._group = done, 0, 1, ""

    def start(self, name: str, runs: int, rounds: int, done: int = 0) -> None:
        self._chunk, self._rounds, self._group = runs, rounds, name
        self._progress.update(self._task, description=f"{name}: {runs} at once")

    def progress(self, rounds: int, loss: float, score: float | None = None) -> None:
        about = self._done + self._chunk * rounds / self._rounds
        words = f"{self._group}: {self._chunk} at once, round {rounds}, loss {loss:.3f}"
        self._progress.update(self._task, completed=about, description=words)

    def finish(self, runs: int) -> None:
        self._done += runs
        self._progress.update(self._task, completed=self._done, refresh=True)


def print_export(console: Console, folder: Path, manifest: dict[str, Any]) -> None:
    """Print which models of each method were exported."""
    for name, entry in manifest["methods"].items():
        clients = sum(len(group["client_ids"]) for group in entry["groups"])
        parts = [f"{clients} personal models"] * (clients > 0) + ["the global model"] * (entry["global"] is not None)
        written = " and ".join(parts) or "nothing: it has no global model"
        seed = f", seed {manifest['seed']}" if "seed" in manifest else ""
        console.print(f"{name}{seed}, round {entry['round']}: {written}", highlight=False)
    for name, what in manifest.get("not_covered", {}).items():
        console.print(f"not covered, not exported: {name} ({what})", highlight=False, soft_wrap=True)
    console.print(f"models: {folder} (manifest.json describes its files)", highlight=False, soft_wrap=True)


def print_table(console: Console, summary: dict[str, Any]) -> None:
    """Print the result tables and notes of a finished run."""
    for table in tables(summary):
        console.print(table)
        console.print()
    for note in notes(summary):
        console.print(note, highlight=False, markup=False)
    console.print(f"run folder: {summary['run_dir']} (plots in plots/)", highlight=False, soft_wrap=True)


def tables(summary: dict[str, Any]) -> list[Any]:
    """Return a run's result tables, made with rich.

    They show the methods' scores, other metrics and unseen clients (if there are any), and costs, in this order.
    """
    wanted = [_scores]
    wanted += [_metrics] if any(row.get("metrics") for row in summary["methods"].values()) else []
    wanted += [_unseen] if any(row.get("unseen_rounds") for row in summary["methods"].values()) else []
    return [table(summary) for table in [*wanted, _costs]]


def notes(summary: dict[str, Any]) -> list[str]:
    """Return notes about a run's methods, such as privacy claims, compression, divergence and lost uploads."""
    found = [f"{', '.join(names)}: {claim}" for claim, names in claims(summary["methods"]).items()]
    if parts := summary.get("not_covered"):
        found.append(
            f"no privacy claim covers {', '.join(parts)}: publish only what jaxpfl export --private-only writes"
        )
    found += _undefined(summary) + _constant(summary)
    if names := summary.get("class_names"):
        found.append(f"classes 0 .. {len(names) - 1} are the labels {listed(names)}")
    for name, row in summary["methods"].items():
        hurt = bool(row.get("hurt_clients"))
        if clients := row.get("hurt_clients" if hurt else "worst_clients"):
            what = "most hurt clients, against local training" if hurt else "worst clients"
            found.append(f"{name}: {what}: {words_of_clients(clients, stored_headline(summary))}")
        if row.get("clipping_remark"):
            found.append(f"{name}: {row['clipping_remark']}")
        if row.get("compress"):
            sizes = f"{_bytes(row['bytes_up'])} instead of {_bytes(row['bytes_up_uncoded'])}"
            found.append(f"{name}: uploads compressed by {row['compress']}, {sizes}")
        if row.get("simulated_seconds"):
            found.append(f"{name}: {_simulated(row, summary)}")
        if row.get("attackers"):
            headline = stored_headline(summary)
            against = f", against {row.get('aggregate', 'mean')}" if row["bytes_up"] else ""
            found.append(
                f"{name}: {len(row['attackers'])} of {summary['clients']} clients attack by {row['attack']}{against}; "
                "the scores above leave them out, and their own "
                f"{headline.words} is {_mean(row[f'attackers_{headline.name}'], headline)}"
            )
        if row["diverged_clients"]:
            found.append(
                f"{name}: {row['diverged_clients']} of {summary['clients']} clients diverged at least once; "
                "their updates in those rounds were dropped, and they are scored with their earlier state"
            )
        if row.get("clusters"):
            numbers = ", ".join(map(str, row["clusters"]))
            found.append(f"{name}: clusters of clients (a number for each seed): {numbers}")
        if row.get("rand_index"):
            index = ", ".join(f"{value:.2f}" for value in row["rand_index"])
            found.append(f"{name}: adjusted Rand index to the true clusters: {index}")
        if row["lost_uploads"]:
            found.append(f"{name}: {row['lost_uploads']} uploads per run were lost to dropout")
        if row["idle_rounds"]:
            found.append(
                f"{name}: clients outside the cohort trained alone {row['idle_rounds']} times; "
                f"{row['client_steps']} client-steps in total"
            )
        if "best_on_validation" in row:
            headline = stored_headline(summary)
            if row["best_on_validation"] is None:
                found.append(
                    f"{name}: no best round, because no client's validation examples define the {headline.words}"
                )
            else:
                best = _mean(row["best_on_validation"][headline.personalized], headline)
                chosen = ", a choice that epsilon does not cover" if row["privacy"] else ""
                found.append(f"{name}: at the round of best validation {headline.words} {best}{chosen}")
        if row.get("stopped_after"):
            rounds = f"{row['stopped_after']} of {summary['rounds']}"
            found.append(f"{name}: stopped after round {rounds}, without a better validation score")
    return found


def _undefined(summary: dict[str, Any]) -> list[str]:
    """Return notes about metrics that are undefined for some clients' test examples.

    The number of clients for which a metric is undefined is the same for every method.
    """
    found: dict[str, int] = {}
    for row in summary["methods"].values():
        found |= {stored_headline(summary).name: row["undefined"]} if "undefined" in row else {}
        found |= {name: entry["undefined"] for name, entry in row.get("metrics", {}).items() if entry["undefined"]}
    return [
        f"{Headline(name).words}: undefined on the test examples of {count} of {summary['clients']} clients, "
        "so means leave these clients out"
        for name, count in found.items()
    ]


def _constant(summary: dict[str, Any]) -> list[str]:
    """Return notes about the constant predictor, and about the methods that do not beat it."""
    headline, constant = stored_headline(summary), summary.get("constant", {})
    if (mean := constant.get("mean")) is None:
        return []
    what = "mean training label"
    if not headline.lower:
        what = f"most frequent training class, {label(str(constant['prediction']))}"
    scores = {name: row[headline.personalized]["mean"] for name, row in summary["methods"].items()}
    below = [name for name, own in scores.items() if own is not None and headline.better(own - mean) <= 0]
    beaten = [f"{name} does not beat the constant predictor ({headline.number(mean)})" for name in below]
    return [f"constant predictor (the {what}): {headline.number(mean)}", *beaten]


def _simulated(row: dict[str, Any], summary: dict[str, Any]) -> str:
    """Describe the simulated time of a method, in total and until the method reached the score ``time_to``."""
    total = f"{np.mean(row['simulated_seconds']):.4g} simulated seconds"
    if "seconds_to" not in row:
        return total
    headline = stored_headline(summary)
    score = f"{headline.words} {headline.number(summary['time_to'])}{' %' if headline.percent else ''}"
    times = ", ".join("never" if one is None else f"after {one:.4g} s" for one in row["seconds_to"])
    return f"{total}; {score} {times}"


def _scores(summary: dict[str, Any]) -> Any:
    """Return the table of scores: statistics over clients and seeds, and a comparison with local training."""
    seeds, headline = len(summary["seeds"]), stored_headline(summary)
    own = headline.personalized
    methods = dict(summary["methods"])
    if "local" in methods:
        methods["local"] = methods["local"] | {"fraction_hurt": None}
    compared = any(row["fraction_hurt"] is not None for row in methods.values())
    tenth, name_of_tenth = ("90th", "p90") if headline.lower else ("10th", "p10")
    says = f"mean over clients{' ± standard deviation over seeds' * (seeds > 1)}; {name_of_tenth}, worst: {tenth} "
    says += "percentile and "
    says += f"worst decile of the clients{'; hurt: clients worse off than with local training' * compared}"
    weighed = any(
        headline.number(row[own].get("mean_examples")) not in ("-", headline.number(row[own]["mean"]))
        for row in methods.values()
    )
    if weighed:  # the column is left out if it would show the same numbers as the unweighted means
        pooled = headline.name in ("accuracy", "rmse")
        says += f"; examples: {'over all test examples together' if pooled else 'mean weighted by test examples'}"
    title = f"{summary['clients']} clients, {summary['cohort']} in a round, {summary['rounds']} rounds, {seeds} seed"
    columns: dict[str, _Cell] = {"personalized": lambda row: _mean(row[own], headline)}
    if weighed:
        columns["examples"] = lambda row: headline.number(row[own].get("mean_examples"))
    columns["global"] = lambda row: _mean(row[f"global_{headline.name}"], headline)
    columns[name_of_tenth] = lambda row: headline.number(row[own]["p10"])
    columns["worst"] = lambda row: headline.number(row[own]["worst_decile"])
    if compared:
        columns["hurt"] = lambda row: "-" if row["fraction_hurt"] is None else f"{100 * row['fraction_hurt']:.0f}%"
    title += f"{'s' * (seeds > 1)}; test {headline.words}{headline.unit} after the last round"
    return _method_table(methods, title, says, columns)


def _metrics(summary: dict[str, Any]) -> Any:
    """Return the table of the metrics other than the headline.

    Values are for the personalized models and, in parentheses, for the global model.
    """
    methods = summary["methods"]
    names = list(dict.fromkeys(name for row in methods.values() for name in row.get("metrics", ())))
    says = f"mean over clients{' (median for R^2)' * ('r2' in names)}; in parentheses: the global model"
    columns = {
        Headline(name).words: lambda row, name=name: _metric(row.get("metrics", {}).get(name), name in UNBOUNDED)
        for name in names
    }
    return _method_table(methods, "other metrics of the same models", says, columns)


def _metric(entry: dict[str, Any] | None, median: bool) -> str:
    if entry is None:
        return "-"
    of_clients = "median" if median else "mean"
    own, shared = (None if of is None else of.get(of_clients) for of in (entry["personalized"], entry["global"]))
    text = "-" if own is None else f"{own:.4g}"
    return text if shared is None else f"{text} ({shared:.4g})"


def _unseen(summary: dict[str, Any]) -> Any:
    """Return the table of unseen clients' scores before and after adaptation.

    Adaptation takes either ``adapt_rounds`` rounds, or as many rounds as a trained client took part in.
    """
    methods = {name: row for name, row in summary["methods"].items() if row.get("unseen_rounds")}
    headline = stored_headline(summary)
    adapted = next(iter(methods.values()))["unseen_rounds"]["adapted"]
    return _method_table(
        methods,
        f"unseen clients, on arrival, after {adapted} rounds of adaptation, and after as many rounds as a trained "
        "client took part in",
        "grad: gradients evaluated in these rounds and for the personalized model; the rounds change nothing if the "
        "method's clients keep no model",
        {
            "arrival": lambda row: _mean(row[f"unseen_before_{headline.name}"], headline),
            f"after {adapted}": lambda row: _mean(row[f"unseen_{headline.name}"], headline),
            "grad": lambda row: _gradients(row, "unseen"),
            "as trained": lambda row: _mean(row[f"unseen_as_trained_{headline.name}"], headline),
            "rounds": lambda row: str(row["unseen_rounds"]["as_trained"]).replace("None", "-"),
            "grad ": lambda row: _gradients(row, "unseen_as_trained"),
        },
    )


def _costs(summary: dict[str, Any]) -> Any:
    """Return the table of costs: gradient evaluations, uploaded and downloaded bytes, and seconds."""
    return _method_table(
        summary["methods"],
        "what it took",
        "train, adapt: gradients (backward passes through one model on one mini-batch) per client, in training (mean "
        "over clients) and for its personalized model; up, down: bytes per run; compile, run: seconds for all seeds",
        {
            "train": lambda row: _gradients(row, "training"),
            "adapt": lambda row: _gradients(row, "personalization"),
            "up": lambda row: _bytes(row["bytes_up"]),
            "down": lambda row: _bytes(row["bytes_down"]),
            "compile": lambda row: format_seconds(row.get("compile_seconds")),
            "run": lambda row: format_seconds(row["seconds"]),
        },
    )


_Cell = Callable[[dict[str, Any]], str]


def _method_table(methods: Mapping[str, dict[str, Any]], title: str, caption: str, columns: Mapping[str, _Cell]) -> Any:
    """Return a table with a row for each method.

    Args:
      methods: method -> its entry in the summary.
      title: title of the table.
      caption: text below the table.
      columns: heading -> function that returns the cell's text for a method's entry.
    """
    table = new_table(title, caption)
    table.add_column("method", style="bold", no_wrap=True)
    for name in columns:
        table.add_column(name.strip(), justify="right", no_wrap=True)
    for name, row in methods.items():
        table.add_row(name, *(cell(row) for cell in columns.values()))
    return table


def _gradients(row: dict[str, Any], name: str) -> str:
    """Return the mean number of gradient evaluations per client; a dash if the method does not count them."""
    over = (row.get("gradients") or {}).get(name)
    return "-" if over is None else f"{over['mean']:.{0 if over['mean'] == round(over['mean']) else 1}f}"


def claims(methods: dict[str, Any]) -> dict[str, list[str]]:
    """Return the privacy statements of a run, each with the methods to which it applies."""
    claims: dict[str, list[str]] = {}
    for name, row in methods.items():
        if row["privacy"]:
            claim = row["privacy"].get("says", "clipped without noise: no epsilon can be claimed")
            claims.setdefault(claim, []).append(name)
    return claims


def _mean(stats: dict[str, float | None] | None, headline: Headline) -> str:
    if stats is None or stats["mean"] is None:
        return "-"
    spread = "" if stats["std"] is None else f" ±{headline.number(stats['std'])}"
    return f"{headline.number(stats['mean'])}{spread}"


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}TB"


def explain_plan(experiment: Experiment) -> dict[str, Any]:
    """Compile one round of each method, and report how it would be executed.

    Returns:
      Method -> ``choices`` of the execution plan (rows of subject, choice and reason), ``memory`` (bytes for data,
      states and working memory), ``free`` (bytes available to a program; None if unknown), ``compile_seconds``, and
      ``exchange``, the bytes that a client uploads (``up``) and downloads (``down``) in a round.

    Raises:
      JaxpflError: if a round would not fit in memory.
    """
    report = {}
    for name in experiment.methods:
        simulation = experiment.simulation(name)
        runs = require(experiment.config.seeds)
        began = time.perf_counter()
        held = simulation.memory(runs)
        report[name] = {
            "compile_seconds": time.perf_counter() - began,
            "exchange": dict(zip(("up", "down"), simulation.bytes_per_client(), strict=True)),
            "choices": [list(row) for row in simulation.explained],
            "memory": held,
            "free": free_bytes(simulation.placement.devices),
        }
    return report


def print_explanation(console: Console, report: dict[str, Any]) -> None:
    """Print the report of `explain_plan`, one table for each method."""
    for name, entry in report.items():
        table = new_table(name)
        for heading in ("what", "choice", "why"):
            table.add_column(heading, no_wrap=heading == "what")
        for row in entry["choices"]:
            table.add_row(*row)
        held = {what: readable(amount) for what, amount in entry["memory"].items()}
        left = "free memory unknown" if entry["free"] is None else f"{readable(entry['free'])} available"
        beside = f"beside {held['data']} of data and {held['states']} of client states; {left}"
        table.add_row("memory", f"{held['working']} for a round", beside)
        table.add_row("compiling", f"{entry['compile_seconds']:.1f} s", "one program for any number of rounds")
        up, down = (readable(entry["exchange"][way]) for way in ("up", "down"))
        table.add_row("exchange", f"{up} up, {down} down", "one client, one round, uncompressed")
        console.print(table)
