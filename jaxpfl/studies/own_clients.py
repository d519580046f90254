"""Common parts of studies on the user's own clients: reading CSV files, held-out errors, tables and plots.

All computations are in double precision. Single precision would lose small differences unless the data are centered,
and centering them by a value computed from the data would violate the privacy of private estimates.

The difference between a held-out sample and an estimate is the sum of the sample's noise and the estimate's error about
the client's true mean. The variance :math:`s_i^2` of a client's samples is an unbiased estimate of the mean squared
noise. The mean squared difference minus :math:`s_i^2` is therefore an unbiased estimate of the mean squared error.
Gains are computed from this estimate.
"""

from __future__ import annotations

import csv
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.core import full_precision
from jaxpfl.core.types import Array, Key
from jaxpfl.data.sources import csv_text
from jaxpfl.data.sources.csv_text import Decimal, Separator, Table
from jaxpfl.estimators import base
from jaxpfl.estimators.base import Estimated, Estimator, Samples
from jaxpfl.studies.repetitions import measure, report
from jaxpfl.studies.report import beside, estimator_table
from jaxpfl.studies.study import Block, Options, Results, refuse_given
from jaxpfl.support.console import COLORS, INK, literal, new_axes, save, unmarked
from jaxpfl.support.errors import JaxpflError, printable, shown

VALUE = "value"
"""Default name of the column of samples, in upper or lower case."""
LEVEL = 0.95
"""Default probability level of intervals."""
_SHOWN = 6
"""Largest number of the first client's samples that are printed."""
_SMALLEST, _LARGEST = 1e-70, 1e70
"""Range of magnitudes for which fourth powers, used in tests of variances, neither overflow nor underflow."""


@dataclass(frozen=True)
class CsvTable(Options):
    """Format of a CSV file, and the column of its clients."""

    client: str | None = None
    """Column of --csv that names the clients; by default the column called client or id."""
    sep: Separator | None = None
    """Separator of the cells of --csv; by default detected from the header."""
    decimal: Decimal | None = None
    """Decimal mark of the numbers in --csv; by default detected."""
    encoding: str | None = None
    """Encoding of --csv, such as latin-1; by default UTF-8."""
    missing_words: str | None = None
    """Words in --csv for missing values, separated by commas; by default NA, N/A, NaN, null and none."""


@dataclass(frozen=True)
class CsvLayout(CsvTable):
    """Columns of a CSV file with samples."""

    value: str | None = None
    """Columns of --csv with one sample per row: NAME, or NAME,NAME for samples of several numbers; by default the
    column called value."""
    values: str | None = None
    """Columns of --csv with all samples of a client in one row: NAME,NAME or FIRST..LAST."""


@dataclass(frozen=True)
class OwnClients(CsvLayout):
    """Options for estimating, with intervals, the clients in a CSV file instead of simulated clients."""

    csv: Path | None = None
    """CSV file of your own clients; --client, and --value or --values, name its columns."""
    level: float = LEVEL
    """Level of the intervals for your own clients."""


def own_or_simulated(
    own: Callable[[Path, Any, Any], Results], simulated: Callable[[Any], Results]
) -> Callable[[Any, Any], Results]:
    """Return a function that runs a study on the clients of a file, or on simulated clients if no file is given.

    Args:
      own: function ``(path, settings, options) -> Results`` that estimates the clients of a file.
      simulated: function ``settings -> Results`` that simulates clients.

    Raises:
      JaxpflError: by the returned function, if other options are given without a file.
    """

    def results(given: Any, options: Any) -> Results:
        if options.csv is not None:
            return own(options.csv, given, options)
        refuse_given(options, [field.name for field in fields(options)], "requires --csv")
        return simulated(given)

    return results


class Clients(NamedTuple):
    """Clients read from a file.

    Attributes:
      names: the clients' names, [m].
      samples: array of each client's samples, [n_i, d], or [n_i] if a sample is one number.
      columns: names of a sample's d numbers; ``["value"]`` for a wide file.
      understood: description of how the file was read, as JSON.
    """

    names: list[str]
    samples: list[np.ndarray]
    columns: list[str]
    understood: dict[str, Any]


def read(path: Path, given: CsvLayout | None = None) -> Clients:
    """Read clients and their samples from a CSV file.

    A long file has a row per sample: one column names the client, and the column ``value`` contains the sample (d
    columns for samples of d numbers). The rows of a client need not be adjacent. A wide file has a row per client, with
    its samples in the columns ``values``. A cell that is absent, empty, or contains a marker such as NA counts as a
    missing sample. A sample of several numbers is left out if one of them is missing. Clients without any sample are
    left out.

    Raises:
      JaxpflError: if the file cannot be read; if the client or sample columns are not given and no column has a default
        name (the message says what to write); if a cell is not a finite number (the message gives the line); if a
        client's samples are the sums of all other clients' samples (checked if all clients have equally many samples,
        which are not all 0 or 1); or if there are no clients.
    """
    given = given or CsvLayout()
    if given.value is not None and given.values is not None:
        raise JaxpflError("give value (a row for each sample) or values (a row for each client), not both")
    table = csv_text.read(path, given.sep, given.decimal, given.encoding, given.missing_words)
    long = given.values is None
    chosen = given.value if long else given.values
    chosen = VALUE if chosen is None and VALUE in map(str.lower, table.names) else chosen
    if chosen is None:
        raise _unnamed(table, given.client)
    values = _several(table, chosen)
    own = table.clients(given.client, values)
    if own in values:
        raise JaxpflError(f"{path}: column {shown(own)} cannot be both the client and a value")
    names = table.texts(own) if long else distinct_clients(table, own)
    numbers = np.stack([table.numbers(name, missing=True) for name in values], axis=1)
    lacking = np.isnan(numbers)
    rows: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for name, row, gap in zip(names, numbers, lacking, strict=True):
        if not long:
            rows[name] = [row[~gap]]
        elif not gap.any():
            rows[name].append(row[:1] if len(values) == 1 else row[None])
    samples = {name: np.concatenate(own) for name, own in rows.items() if own and own[0].size}
    if not samples:
        raise JaxpflError(f"{path}: no client has a sample")
    if len(set(map(len, samples.values()))) == 1 and not np.isin(numbers[~lacking], (0, 1)).all():
        refuse_sum(path, list(samples), np.stack([each.ravel() for each in samples.values()]))
    sizes = np.array([len(each) for each in samples.values()])
    first, shown_first = next(iter(samples.items()))
    understood = {
        "layout": "long" if long else "wide",
        "separator": table.separator,
        "decimal": table.decimal,
        "client": own,
        "values": values,
        "ignored": [name for name in table.names if name != own and name not in values],
        "missing": int(lacking.sum()),
        "without_samples": [name for name in rows if name not in samples],
        "clients": len(samples),
        "samples": {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())},
        "first": {"client": first, "size": len(shown_first), "samples": shown_first[:_SHOWN].tolist()},
    }
    return Clients(list(samples), list(samples.values()), values if long else [VALUE], understood)


def distinct_clients(table: Table, column: str) -> list[str]:
    """Return the clients' names in a table with a row per client.

    Raises:
      JaxpflError: if a name is empty or occurs twice; the message gives the line.
    """
    seen: dict[str, int] = {}
    for line, name in zip(table.lines, table.texts(column), strict=True):
        if name in seen:
            raise JaxpflError(f"{table.path} line {line}: client {shown(name)} is also in line {seen[name]}")
        seen[name] = line
    return list(seen)


def refuse_sum(path: Path, names: Sequence[str], numbers: np.ndarray) -> None:
    """Refuse a row of totals: a client whose row in ``numbers`` [m, k] is the sum of all other clients' rows.

    Raises:
      JaxpflError: if there is such a client; the message names the first one.
    """
    apart = np.abs(2 * numbers - numbers.sum(axis=0)) <= 1e-12 * np.abs(numbers).sum(axis=0)
    same = np.flatnonzero(apart.all(axis=1) & numbers.any(axis=1))
    if len(names) > 2 and len(same):
        raise JaxpflError(f"{path}: client {shown(names[same[0]])} is the sum of all others: remove that row")


def check_squares(path: Path, columns: list[str], samples: list[np.ndarray]) -> None:
    """Refuse columns [d] of samples whose squares would overflow or underflow in double precision.

    Raises:
      JaxpflError: if there is such a column; the message gives its largest magnitude and the allowed range.
    """
    for column, values in zip(columns, _sample_columns(samples), strict=True):
        largest = float(np.abs(values).max())
        if largest and not _SMALLEST <= largest <= _LARGEST:
            raise JaxpflError(
                f"{path}: the largest magnitude in {printable(column)} must be from {_SMALLEST:g} to {_LARGEST:g}, got "
                f"{largest:g}: use another unit, because the squares would be out of range"
            )


def alike(columns: list[str], samples: list[np.ndarray]) -> list[str]:
    """Return a line of text for each column in which all numbers are equal."""
    one = len(columns) == 1
    return [
        f"every sample {'of the file' if one else 'in column ' + printable(column)} is {values[0]:g}"
        for column, values in zip(columns, _sample_columns(samples), strict=True)
        if not np.ptp(values)
    ]


def _unnamed(table: Table, client: str | None) -> JaxpflError:
    """Error for a table without a column called value; the message says which flags to write."""
    rest = [name for name in table.names if name != client]
    own = next((name for name in rest if name.lower() in csv_text.CLIENT_NAMES), None) if client is None else client
    rest = [name for name in rest if name != own]
    flag = "" if own is not None else "--client COLUMN "
    if own is None and len(rest) == 2:
        flag = f"--client {shlex.quote(rest.pop(0))} "
    ways = f"{flag}--value {shlex.quote(rest[0]) if len(rest) == 1 else 'COLUMN[,COLUMN]'} (a row for each sample)"
    if len(rest) > 1:
        ends = f"{rest[0]}..{rest[-1]}" if own is not None else "FIRST..LAST"
        ways += f", or {flag}--values {shlex.quote(ends)} (a row for each client)"
    return JaxpflError(
        f"{table.path}: no column is called value (columns: {table.listed}): write {printable(ways, 300)}"
    )


def _several(table: Table, text: str) -> list[str]:
    """Names of the columns that ``text`` lists, as names and ranges separated by commas.

    If ``text`` is itself the name of a column, it selects that column, even if the name contains commas or dots.

    Raises:
      JaxpflError: if a name is not a column, or if no column is selected.
    """
    found: list[str] = []
    for part in [text] if text in table.names else text.split(","):
        first, dots, last = part.strip().partition("..")
        ends = [part.strip()] if not dots or part.strip() in table.names else [first, last]
        places = [table.names.index(table.find(end)) for end in ends]
        found += [name for name in table.names[places[0] : places[-1] + 1] if name not in found]
    if not found:
        raise JaxpflError(
            f"{table.path}: {shown(text)} selects no column: the first column of a range must come before its last"
        )
    return found


def _sample_columns(samples: list[np.ndarray]) -> np.ndarray:
    """All N samples of the clients by column, [d, N]."""
    return np.concatenate([own.reshape(len(own), -1) for own in samples]).T


_MOST_FOLDS = 20
"""Largest number of folds. With fewer samples per client, each sample is a fold."""

_LEAST_SAMPLES = 3
"""Number of samples that at least one client must have for held-out scores: a variance needs two training samples."""

SIMULATED = ("clients", "samples", "uploads", "repetitions")
NOT_OWN = "applies to simulated clients, not to --csv"
"""Reason for refusing settings of simulated clients together with a file."""


class Learned(NamedTuple):
    """Posterior of one column, in addition to its estimates.

    Attributes:
      facts: results for the population, as JSON; the entry ``estimated`` includes the ``mean``.
      low, high: endpoints of every client's interval, [m].
      stderr: posterior standard deviation of every client's parameter, [m].
      local_stderr: standard errors of the local estimates, [m].
      more: further columns [m] of ``estimates.csv``, by name.
    """

    facts: dict[str, Any]
    low: np.ndarray
    high: np.ndarray
    stderr: np.ndarray
    local_stderr: np.ndarray
    more: dict[str, np.ndarray]


def estimates(estimators: dict[str, Estimator], key: Key, data: Samples) -> dict[str, Estimated]:
    """Run every estimator on the data, in one compiled program."""
    return full_precision.jit(lambda data: {name: base.estimate(each, key, data) for name, each in estimators.items()})(
        data
    )


def summary(
    study: str,
    path: Path,
    clients: Clients,
    data: Samples,
    estimators: dict[str, Estimator],
    made: dict[str, Estimated],
    key: Key,
    learned: list[Learned],
    facts: dict[str, Any],
) -> Own:
    """Make a study's result for a file: held-out errors, and every client's estimates with intervals.

    Args:
      study: name of the study.
      path: path of the file.
      clients: clients of the file.
      data: the samples, stacked.
      estimators: estimators by name.
      made: result of each estimator on the data, by name.
      key: random key of the estimators.
      learned: posterior of each column.
      facts: further entries of the result, as JSON.

    Raises:
      JaxpflError: if two columns of ``estimates.csv`` would have the same name.
    """
    names, sizes = clients.names, np.asarray(data.mask.sum(axis=1))
    result: dict[str, Any] = {
        "study": study,
        "csv": path.name,
        "clients": len(names),
        "samples": {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())},
    } | facts
    found = None
    if sizes.max() < _LEAST_SAMPLES:
        why = "with one held out, the clients' variance cannot be estimated"
        result["not_scored"] = f"no client has {_LEAST_SAMPLES} samples: {why}"
    else:
        left_out = "one sample" if sizes.max() <= _MOST_FOLDS else f"1/{_MOST_FOLDS}"
        result["of"] = f"the true values, with {left_out} of each client left out"
        found = cross_validate(estimators, key, data)
    several = len(learned) > 1
    columns: dict[str, list] = {"client": names, "samples": sizes.tolist()}
    blocks: dict[str, dict[str, Any]] = {}
    pictures = []
    for number, (column, of) in enumerate(zip(clients.columns, learned, strict=True)):
        at = {name: np.asarray(each.estimates).reshape(len(names), -1)[:, number] for name, each in made.items()}
        # The estimate uses a moment estimate of the population variance, but the interval integrates over all
        # variances. With few clients, the estimate may be outside the interval, which is then extended to include it.
        own, personal = at["local"], at["personalized"]
        low, high = np.minimum(of.low, personal), np.maximum(of.high, personal)
        facts_of = {"local": own, "local_stderr": of.local_stderr, "personalized": personal}
        facts_of |= {"personalized_stderr": of.stderr}
        facts_of |= {name: values for name, values in at.items() if name not in ("global", *facts_of)}
        for name, values in (facts_of | {"low": low, "high": high} | of.more).items():
            called = f"{name}_{column}" if several else name
            if called in columns:
                other = next(c for c in clients.columns if called.endswith(f"_{c}") and c != column)
                names = f"{shown(other)} and {shown(column)}"
                raise JaxpflError(f"{path}: columns {names} would both be {called} in estimates.csv: rename one")
            columns[called] = values.tolist()
        blocks[column] = of.facts | (_scores(found, number) if found is not None else {})
        title, mean = column if several else "", float(of.facts["estimated"]["mean"])
        pictures.append(Picture(title, own, personal, low, high, sizes, mean))
    return Own(result | ({"columns": blocks} if several else blocks[clients.columns[0]]), columns, pictures)


def sizes_of(path: Path, samples: list[np.ndarray]) -> np.ndarray:
    """Number of samples of each client, [m].

    Raises:
      JaxpflError: if there are fewer than two clients, or if no client has two samples.
    """
    sizes = np.array([len(own) for own in samples])
    if len(sizes) < 2:
        raise JaxpflError(f"{path}: at least two clients are required, got {len(sizes)}")
    if sizes.max() < 2:
        raise JaxpflError(f"{path}: every client has a single sample, so the clients' variance cannot be estimated")
    return sizes


class HeldOut(NamedTuple):
    """Held-out errors of the k clients with at least two samples, for each of d columns.

    Attributes:
      errors: mean squared differences between held-out samples and estimates, [k, d], by estimator.
      noise: variances s_i^2 of the clients' samples, [k, d].
    """

    errors: dict[str, np.ndarray]
    noise: np.ndarray


def cross_validate(estimators: dict[str, Estimator], key: Key, data: Samples) -> HeldOut:
    """Cross-validate the estimators over the samples of each client.

    A client's sample j is held out in fold j mod the number of folds. In a fold, a client without training samples
    neither uploads a message nor is scored.
    """
    m, n = data.mask.shape
    folds = min(n, _MOST_FOLDS)

    @full_precision.jit
    def totals(data: Samples) -> tuple[dict[str, Array], Array, Array]:
        # Index of each sample among its client's samples, without the padding.
        fold_of = jnp.cumsum(data.mask, axis=1) - 1

        def fold(f: Array) -> tuple[dict[str, Array], Array]:
            held = data.mask & (fold_of % folds == f)
            train = Samples(data.x, data.mask & ~held)
            scored = held & train.mask.any(axis=1, keepdims=True)

            scores = {}
            for name, estimator in estimators.items():
                made = base.estimate(estimator, jax.random.fold_in(key, f), train, sent=train.mask.any(axis=1))
                square = ((data.x - made.estimates[:, None]) ** 2).reshape(m, n, -1)
                scores[name] = jnp.where(scored[:, :, None], square, 0).sum(axis=1)
            return scores, scored.sum(axis=1)

        sums, counts = jax.lax.map(fold, jnp.arange(folds))
        scatter = jax.vmap(lambda own: own.scatter)(data).reshape(m, -1)
        return jax.tree.map(lambda a: a.sum(axis=0), sums), counts.sum(axis=0), scatter

    sums, counts, scatter = jax.tree.map(np.asarray, totals(data))
    scored = counts > 0
    of_all = counts[scored, None]
    return HeldOut({name: sums[name][scored] / of_all for name in estimators}, scatter[scored] / (of_all - 1))


def _scores(found: HeldOut, column: int) -> dict[str, Any]:
    """Scores of one column, as JSON: ``mse``, ``gains`` and ``held_out_errors``.

    ``held_out_errors`` are squared differences from held-out samples, and include the noise of these samples. ``mse``
    estimates the squared differences from the clients' true means, without this noise. ``gains`` are relative to the
    ``mse`` of the local estimates. Standard errors are over clients.
    """
    raw = {name: values[:, column] for name, values in found.errors.items()}
    noise = found.noise[:, column]
    held_out = {name: {"mean": of.mean, "stderr": of.stderr} for name, of in ((k, measure(v)) for k, v in raw.items())}
    return report({name: values - noise for name, values in raw.items()}, {}) | {"held_out_errors": held_out}


_SIGNIFICANT = 0.05
_MOST_PICTURES = 12
_FEW = 60  # number of clients above which bars are fainter and points smaller
_LISTED = 6


class Picture(NamedTuple):
    """Data for a column's plot: estimates, interval endpoints and numbers of samples, [m] each, and the population
    mean.
    """

    column: str
    local: np.ndarray
    personalized: np.ndarray
    low: np.ndarray
    high: np.ndarray
    sizes: np.ndarray
    mean: float


class Own(NamedTuple):
    """Results for a file.

    Attributes:
      result: summary for the table and JSON. The scores of a single column are entries of the summary. For several
        columns, each column's scores are in the entry ``columns``, under the column's name.
      columns: columns of ``estimates.csv``, with an entry for each client.
      pictures: data for the plot of each column.
      public: public settings that determine the clipping and the privacy of Gaussian messages.
    """

    result: dict[str, Any]
    columns: dict[str, list]
    pictures: list[Picture]
    public: Any = None


def file_results(
    own: Own, tables: Callable[[], Sequence[Block]], files: Mapping[str, dict[str, list]] | None = None
) -> Results:
    """Make a study's `Results` for the user's own clients, whose estimates are written to files.

    Args:
      own: estimates, scores and pictures.
      tables: function that returns the printed tables and lines.
      files: further tables, by file name.
    """
    more = {} if files is None else files

    def plots(folder: Path) -> list[Path]:
        for name, columns in more.items():
            write_table(folder.parent / name, columns)
        return write_estimates(folder, own)

    return Results(
        json=own.result,
        tables=tables,
        plots=plots,
        files=", ".join(["summary.json", "estimates.csv", *more, "plots/"]),
        hint=f"estimates of every client, with {percent(own.result['level'])} intervals: --output FOLDER",
    )


def how_it_was_read(result: dict[str, Any]) -> list[str]:
    """Lines that describe how a file of samples was read, what was left out, and notes, followed by an empty line."""
    read = result["read"]
    sizes, first = read["samples"], read["first"]
    layout = "a row for each sample" if read["layout"] == "long" else "a row for each client"
    lines = [
        f"read as: {layout}; separator {read['separator']}, decimal {read['decimal']}",
        f"clients: {printable(read['client'])}; samples: {_list(read['values'])}{_unused(read)}",
    ]
    range_ = f"{sizes['min']}" if sizes["min"] == sizes["max"] else f"{sizes['min']} to {sizes['max']}"
    range_ += "" if sizes["min"] == sizes["max"] else f" (median {sizes['median']:g})"
    numbers = ", ".join(_sample(x) for x in first["samples"])
    more = ", ..." if first["size"] > len(first["samples"]) else ""
    lines.append(
        f"{read['clients']} clients with {range_} samples; the first is {printable(first['client'])}: {numbers}{more}"
    )
    if read["missing"]:
        lines.append(f"cells without a number, left out: {read['missing']}")
    if read["without_samples"]:
        left = read["without_samples"]
        lines.append(f"clients without a sample, left out: {len(left)} ({_list(left)})")
    return [*lines, *result.get("notes", []), ""]


def summaries_read(result: dict[str, Any]) -> str:
    """Line that describes how a file with a row of summaries per client was read."""
    read = result["read"]
    columns, client = ",".join(read["columns"]), printable(read["client"])
    return f"read as: {columns} of {result['clients']} clients, named by {client}{_unused(read)}"


def file_tables(result: dict[str, Any], notes: Sequence[str]) -> list[Block]:
    """Tables of errors on held-out samples, one per column, followed by ``notes``."""
    title = printable(f"{result['csv']}: {result['clients']} clients")
    found: list[Block] = how_it_was_read(result)
    for column, block in (result.get("columns") or {"": result}).items():
        of = f"{title}, {printable(column)}" if column else title
        lines = population_lines(block, result["level"])
        if "not_scored" in result:
            found += [of, f"no errors on held-out samples: {result['not_scored']}", *lines]
        else:
            about = f"{unmarked(of)}: squared error about {result['of']}; ± over clients"
            found += estimator_table(block, about, lines)
    return [*found, *notes]


def population_lines(block: dict[str, Any], level: float) -> list[str]:
    """Lines below a column's table: estimates of the population, rounded to suit the samples' spread, and tests."""
    estimated = dict(block["estimated"])
    spread, ends = estimated.get("sigma_x", 0.0), estimated.pop("sigma_theta_interval", None)
    texts = {name: f"{name} {beside(value, spread)}" for name, value in estimated.items()}
    if ends is not None and ends[1] > 0:
        texts["sigma_theta"] += f" ({percent(level)}: {ends[0]:.3g} to {ends[1]:.3g})"
    test, noise = block["clients_differ"], block.get("noise")
    differ = test["p_value"] < _SIGNIFICANT
    lines = [
        f"estimated from all clients: {', '.join(texts.values())}",
        f"{'clients differ' if differ else 'no sign that clients differ'}: {test['name']}, p = {test['p_value']:.2g}",
    ]
    if ends is not None and ends[1] == 0:
        lines.append(
            f"warning: at {percent(level)} no sigma_theta fits, because clients' means are closer to each other than "
            "their samples' spread allows: check the file"
        )
    if noise is not None and not noise["one_for_all"]:
        lines.append(
            f"the noise differs between clients: Bartlett's test, p = {noise['p_value']:.2g}; each client has its "
            f"own sigma_x, shrunk toward {noise['prior_sigma_x']:.4g}, worth {noise['prior_degrees']:.3g} samples"
        )
    return lines


def test_line(test: dict[str, Any], what: str) -> str:
    """Line with the result of a test of whether clients (or groups) differ."""
    differ = f"{what} differ" if test["p_value"] < _SIGNIFICANT else f"no sign that {what} differ"
    return f"{differ}: {test['name']} = {test['statistic']:.4g}, p = {test['p_value']:.2g}"


def privacy_line(privacy: dict[str, Any]) -> str:
    """Line that states what the privacy guarantee assumes to be public, and which results are not private."""
    public = [f"{name} {privacy[name]:g}" for name in ("sigma_theta", "sigma_x", "radius") if name in privacy]
    known = ", ".join([*public, "the clients' numbers of samples"])
    return f"assumed public: {known}; not private: all other results, even the population's estimates and the intervals"


def coefficients(covariates: Sequence[str], beta: Any, covariance: Any) -> list[dict[str, Any]]:
    """Regression coefficients (the intercept first) with standard errors and p-values, as JSON."""
    from scipy import special

    estimates, errors = np.asarray(beta), np.sqrt(np.diag(covariance))
    p_values = 2 * special.ndtr(-np.abs(estimates) / errors)
    return [
        {"name": name, "estimate": float(b), "stderr": float(error), "p_value": float(p)}
        for name, b, error, p in zip(("intercept", *covariates), estimates, errors, p_values, strict=True)
    ]


def coefficients_line(result: dict[str, Any]) -> str:
    """Line with the regression coefficients in a result."""
    terms = ", ".join(
        f"{printable(row['name'])} {row['estimate']:.4g} ± {row['stderr']:.2g}" for row in result["coefficients"]
    )
    return f"regression: {terms}; ± is a standard error"


def percent(level: float) -> str:
    """Format a level as text, such as "95 %"."""
    return f"{100 * level:g} %"


def write_estimates(folder: Path, own: Own) -> list[Path]:
    """Write ``estimates.csv`` into the plots' parent folder, and plot personalized against local estimates."""
    write_table(folder.parent / "estimates.csv", own.columns)
    title = literal(f"{own.result['csv']}: {own.result['clients']} clients")
    alone = len(own.pictures) == 1
    return [
        _draw(picture, folder, title, own.result["level"], "shrinkage" if alone else f"shrinkage-{number}")
        for number, picture in enumerate(own.pictures[:_MOST_PICTURES], start=1)
    ]


def write_table(path: Path, columns: dict[str, list]) -> None:
    """Write columns of equal length to a CSV file with their names as header."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def _draw(of: Picture, folder: Path, title: str, level: float, name: str) -> Path:
    """Plot personalized against local estimates, with intervals and the estimated population mean."""
    title = f"{title}, {literal(of.column)}" if of.column else title
    figure, axes = new_axes("local estimate", "personalized estimate", title)
    ends = [float(min(of.local.min(), of.personalized.min())), float(max(of.local.max(), of.personalized.max()))]
    axes.plot(ends, ends, color=INK, linewidth=1, linestyle=":", zorder=1, label="no shrinkage")
    few = min(1.0, _FEW / len(of.sizes))
    bars = {"color": COLORS[1], "alpha": 0.15 + 0.4 * few, "linewidth": 0.6 + few}
    axes.vlines(of.local, of.low, of.high, label=f"{percent(level)} interval", **bars)
    points = {"s": (4 + 40 * of.sizes / of.sizes.max()) * (0.3 + 0.7 * few), "alpha": 0.5 + 0.4 * few, "linewidths": 0}
    label = "client, larger with more samples"
    axes.scatter(of.local, of.personalized, color=COLORS[1], zorder=3, label=label, **points)
    axes.axhline(of.mean, color=COLORS[3], linewidth=1, linestyle="--", zorder=2, label="estimated mean of all")
    figure.legend(frameon=False, fontsize=9, loc="outside lower left", ncols=2)
    return save(figure, folder, name)


def _unused(read: dict[str, Any]) -> str:
    return f"; not used: {_list(read['ignored'])}" if read["ignored"] else ""


def _list(names: list[str]) -> str:
    names = [*map(printable, names)]
    if len(names) <= _LISTED:
        return ", ".join(names)
    return f"{names[0]}, {names[1]}, ... {names[-1]} ({len(names)})"


def _sample(x: Any) -> str:
    return f"({', '.join(f'{entry:g}' for entry in x)})" if isinstance(x, list) else f"{x:g}"
