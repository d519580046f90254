"""Terminal output of a run: a progress bar on standard error, and a table at the end."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from jaxpfl.presentation import new_table


class _Live:
    """Context manager that shows its progress display."""

    _progress: Progress

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress.tasks:
            self._progress.stop()
        else:  # nothing to leave on the screen but an empty line
            self._progress.live.transient = True
            self._progress.live.stop()


class Terminal(_Live):
    """A `Reporter` that draws one progress line per method; use it as a context manager."""

    def __init__(self, console: Console):
        self._progress = Progress(
            TextColumn("[bold]{task.description:>12}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  accuracy {task.fields[accuracy]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task: Any = None

    def start(self, method: str, done: int, rounds: int) -> None:
        self._task = self._progress.add_task(method, total=rounds, completed=done, loss="   -  ", accuracy="   -  ")
        self._progress.refresh()

    def progress(self, round: int, loss: float, accuracy: float | None) -> None:
        shown = "   -  " if accuracy is None else f"{100 * accuracy:5.2f}%"
        self._progress.update(self._task, completed=round, loss=f"{loss:6.3f}", accuracy=shown)

    def finish(self, method: str) -> None:
        self._progress.refresh()

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, soft_wrap=True)


class Working(_Live):
    """A line with the current step, removed at the end; use it as a context manager."""

    def __init__(self, console: Console):
        columns = (TextColumn("[bold]{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        shown = console.is_terminal
        self._progress = Progress(*columns, console=console, transient=True, disable=not shown)
        self._task = self._progress.add_task("starting", total=None)

    def show(self, what: str, done: int, total: int) -> None:
        """Show ``done`` of ``total`` bytes; a total of 0 is unknown."""
        self._progress.update(self._task, description=what, completed=done, total=total or None)


def print_export(console: Console, folder: Path, manifest: dict[str, Any]) -> None:
    """Print the exported files of each method."""
    for name, entry in manifest["methods"].items():
        clients = sum(len(group["client_ids"]) for group in entry["groups"])
        parts = [f"{clients} personal models"] * (clients > 0) + ["the global model"] * (entry["global"] is not None)
        written = " and ".join(parts) or "nothing: it has no global model"
        console.print(f"{name}, seed {manifest['seed']}, round {entry['round']}: {written}", highlight=False)
    console.print(f"models: {folder} (manifest.json says what is where)", highlight=False, soft_wrap=True)


def print_table(console: Console, summary: dict[str, Any]) -> None:
    """Print the final tables: scores of each method's models, also on unseen clients, and their cost."""
    tables = [_scores, _unseen, _costs] if _has_unseen(summary) else [_scores, _costs]
    for table in tables:
        console.print(table(summary))
        console.print()
    for claim, names in _claims(summary["methods"]).items():
        console.print(f"{', '.join(names)}: {claim}", highlight=False)
    for name, row in summary["methods"].items():
        if row.get("compress"):
            console.print(
                f"{name}: uploads by {row['compress']}, {_bytes(row['bytes_up'])} in place of "
                f"{_bytes(row['bytes_up_uncoded'])}",
                highlight=False,
            )
        if row["diverged_clients"]:
            console.print(
                f"{name}: {row['diverged_clients']} of {summary['clients']} clients diverged at least once; "
                "their updates were dropped and they are scored with the state before",
                highlight=False,
            )
        if row.get("clusters"):
            numbers = ", ".join(map(str, row["clusters"]))
            console.print(f"{name}: clusters of clients (a number for each seed): {numbers}", highlight=False)
        if row.get("rand_index"):
            index = ", ".join(f"{value:.2f}" for value in row["rand_index"])
            console.print(f"{name}: adjusted Rand index to the true clusters: {index}", highlight=False)
        if row["lost_uploads"]:
            console.print(f"{name}: {row['lost_uploads']} uploads of a run were lost to dropout", highlight=False)
        if row["idle_rounds"]:
            console.print(
                f"{name}: clients outside the cohort worked {row['idle_rounds']} times alone; "
                f"{row['client_steps']} client-steps in all",
                highlight=False,
            )
        if "best_on_validation" in row:
            best = row["best_on_validation"]["personalized_accuracy"]
            console.print(f"{name}: at the round of best validation accuracy {_accuracy(best)}", highlight=False)
    console.print(f"run folder: {summary['run_dir']} (plots in plots/)", highlight=False, soft_wrap=True)


def _has_unseen(summary: dict[str, Any]) -> bool:
    return any(row.get("unseen_rounds") for row in summary["methods"].values())


def _scores(summary: dict[str, Any]) -> Any:
    """Table of accuracies, over clients and seeds and relative to local training."""
    methods, seeds = summary["methods"], len(summary["seeds"])
    hurt = {name: row["fraction_hurt"] for name, row in methods.items() if name != "local"}
    compared = any(value is not None for value in hurt.values())
    says = f"mean over clients{' ± standard deviation over seeds' * (seeds > 1)}; p10, worst: 10th percentile and "
    says += f"worst decile of the clients{'; hurt: clients worse off than with local training' * compared}"
    title = f"{summary['clients']} clients, {summary['cohort']} in a round, {summary['rounds']} rounds, {seeds} seed"
    table = _of_methods(
        f"{title}{'s' * (seeds > 1)}; test accuracy in % after the last round",
        says,
        ("personalised", "global", "p10", "worst", *["hurt"] * compared),
    )
    for name, row in methods.items():
        own = row["personalized_accuracy"]
        cells = [_accuracy(own), _accuracy(row["global_accuracy"]), _percent(own["p10"]), _percent(own["worst_decile"])]
        cells += ["-" if hurt.get(name) is None else f"{100 * hurt[name]:.0f}%"] * compared
        table.add_row(name, *cells)
    return table


def _unseen(summary: dict[str, Any]) -> Any:
    """Table of unseen clients, after their rounds of adaptation and after as many as a trained client took."""
    methods = {name: row for name, row in summary["methods"].items() if row.get("unseen_rounds")}
    adapted = next(iter(methods.values()))["unseen_rounds"]["adapted"]
    table = _of_methods(
        f"unseen clients, on arrival, after {adapted} rounds of adaptation, and after as many as a trained client took "
        "part in",
        "grad: gradients evaluated in these rounds and for the personalised model; the rounds change nothing where a "
        "client keeps no model of its own",
        ("arrival", f"after {adapted}", "grad", "as trained", "rounds", "grad"),
    )
    for name, row in methods.items():
        gradients, rounds = row.get("gradients") or {}, row["unseen_rounds"]["as_trained"]
        table.add_row(
            name,
            _accuracy(row["unseen_before_accuracy"]),
            _accuracy(row["unseen_accuracy"]),
            _count(gradients.get("unseen")),
            _accuracy(row["unseen_as_trained_accuracy"]),
            "-" if rounds is None else str(rounds),
            _count(gradients.get("unseen_as_trained")),
        )
    return table


def _costs(summary: dict[str, Any]) -> Any:
    """Table of gradients, bytes and seconds."""
    table = _of_methods(
        "what it took",
        "train, adapt: gradients (backward passes through one model on one mini-batch) of a client, in training (mean "
        "over clients) and to make its personalised model; up, down: bytes of a run; sec: seconds of all seeds",
        ("train", "adapt", "up", "down", "sec"),
    )
    for name, row in summary["methods"].items():
        gradients = row.get("gradients") or {}  # none in the folders of an earlier version
        table.add_row(
            name,
            _count(gradients.get("training")),
            _count(gradients.get("personalization")),
            _bytes(row["bytes_up"]),
            _bytes(row["bytes_down"]),
            f"{row['seconds']:.{1 if row['seconds'] < 9.95 else 0}f}",
        )
    return table


def _of_methods(title: str, caption: str, columns: tuple[str, ...]) -> Any:
    """An empty table with a row per method and columns of numbers."""
    table = new_table(title, caption)
    table.add_column("method", style="bold", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _count(over: dict[str, float] | None) -> str:
    return "-" if over is None else f"{over['mean']:.{0 if over['mean'] == round(over['mean']) else 1}f}"


def _claims(methods: dict[str, Any]) -> dict[str, list[str]]:
    """Privacy statements, each with its methods."""
    claims: dict[str, list[str]] = {}
    for name, row in methods.items():
        if row["privacy"]:
            claims.setdefault(
                row["privacy"].get("says", "clipped without noise: no epsilon can be claimed"), []
            ).append(name)
    return claims


def print_profile(console: Console, profile: dict[str, Any]) -> None:
    """Print the profile as in ``profile/phases.json``: a table of phases, then each trace's longest operations."""
    methods = profile["methods"] if len(profile["methods"]) > 1 else {}
    parts = profile["compile"]
    table = new_table(f"where the time went: {profile['total']:.1f} s")
    table.add_column("phase", style="bold", no_wrap=True)
    for name in ("seconds", "share", *methods):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [(name, seconds, [m[name] for m in methods.values()]) for name, seconds in profile["phases"].items()]
    totals = [sum(phases.values()) for phases in methods.values()]
    for name, seconds, by_method in [*rows, ("total", profile["total"], totals)]:
        if name == "total":
            table.add_section()
        share = f"{100 * seconds / profile['total']:.0f}%"
        table.add_row(name, f"{seconds:.2f}", share, *(f"{s:.2f}" for s in by_method))
    console.print(table)
    console.print(
        f"compile: tracing {parts['tracing']:.1f} s, lowering {parts['lowering']:.1f} s, XLA {parts['xla']:.1f} s, "
        f"loading {parts['loading']:.1f} s, {parts['from_cache']} of {parts['programs']} programs from the cache\n"
        "profiler: the cost of the traces; host: the rest, once Python has imported the program",
        highlight=False,
    )
    for name, trace in profile["traces"].items():
        _print_trace(console, name, trace, most=10 if len(profile["traces"]) == 1 else 5)


def _print_trace(console: Console, method: str, trace: dict[str, Any], most: int) -> None:
    if "problem" in trace:
        console.print(f"{method}: no trace: {trace['problem']}", highlight=False)
        return
    first, last = trace["rounds"]
    which = f"round {first}" if first == last else f"rounds {first}-{last}"
    cut = "" if trace["whole"] else f"the first {1000 * trace['seconds']:.0f} ms of "
    if trace["operations"]:
        table = new_table(f"{method}, {cut}{which}: operations by own time")
        table.add_column("operation", style="bold", overflow="fold")
        for name in ("kind", "calls", "ms", "share"):
            table.add_column(name, justify="left" if name == "kind" else "right", no_wrap=True)
        for row in trace["operations"][:most]:
            values = (str(row["calls"]), f"{1000 * row['seconds']:.2f}", f"{100 * row['share']:.1f}%")
            table.add_row(row["name"], row["kind"], *values)
        console.print(table)
        kinds = ", ".join(f"{kind} {100 * share:.0f}%" for kind, share in trace["kinds"].items())
        console.print(f"all operations: {kinds}", highlight=False)
    console.print(
        f"trace of {cut}{which}: {trace['folder']} (perfetto_trace.json.gz for ui.perfetto.dev)",
        highlight=False,
        soft_wrap=True,
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def _accuracy(stats: dict[str, float | None] | None) -> str:
    if stats is None or stats["mean"] is None:
        return "-"
    spread = "" if stats["std"] is None else f" ±{100 * stats['std']:.2f}"
    return f"{100 * stats['mean']:.2f}{spread}"


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}TB"
