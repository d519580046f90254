"""Tables in CSV text, whose first line names the columns; one column names the clients.

By default, the separator is the character that divides the first line into the most names, and the decimal mark is
detected from the numbers. The role of a column is determined only by its name, and never guessed from its cells.
"""

from __future__ import annotations

import codecs
import io
import math
import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np

from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError, printable, shown, unknown_name

if TYPE_CHECKING:
    import pandas

Separator: TypeAlias = Literal["tab", "semicolon", "bar", "comma", "whitespace"]
Decimal: TypeAlias = Literal["point", "comma"]

SEPARATORS: dict[Separator, str] = {"tab": "\t", "semicolon": ";", "bar": "|", "comma": ",", "whitespace": " "}
MISSING = ("", "na", "n/a", "#n/a", "nan", "null", "none")
"""Words that mark a cell without a value, in upper or lower case."""
CLIENT_NAMES = ("client", "id")
"""Default names of the column with the clients' names, in upper or lower case; the first name in the table is used."""

_TRUTH = {"true": 1.0, "false": 0.0}
_PLAIN = r"[+-]?(?:\d++MARK?+\d*+|MARK\d++)(?:[eE][+-]?\d++)?"  # possessive, so that long cells cause no backtracking
_NUMBER: dict[Decimal, re.Pattern[str]] = {
    "point": re.compile(_PLAIN.replace("MARK", r"\."), re.ASCII),
    "comma": re.compile(_PLAIN.replace("MARK", ","), re.ASCII),
}
_THOUSAND = re.compile(r"[+-]?[1-9]\d{0,2}[.,]\d{3}", re.ASCII)
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_MEMORY = 30  # memory of a table's cells as strings, relative to the file's length


class Table(NamedTuple):
    """A table whose cells are strings.

    Attributes:
      path: path of the file, for error messages.
      cells: data frame of the cells without surrounding spaces; "" where a row is too short. The column names are from
        the file's first line. The index of the data frame has each row's line number in the file, counted from 1.
      separator, decimal: separator of cells and decimal mark in the file.
      missing: words that mark a cell without a value, in lower case.
    """

    path: Path
    cells: pandas.DataFrame
    separator: Separator
    decimal: Decimal
    missing: tuple[str, ...] = MISSING

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return list(self.cells)

    @property
    def lines(self) -> list[int]:
        """Line number of each row in the file."""
        return self.cells.index.tolist()

    def missing_in(self, name: str) -> np.ndarray:
        """Mask of the N rows, [N], true without a value in a column: the cell is empty or a word in ``missing``."""
        return self.cells[name].str.lower().isin(self.missing).to_numpy()

    def find(self, name: str, what: str = "column") -> str:
        """Find a column by name, ignoring case unless the names of two columns differ only in case.

        Raises:
          JaxpflError: if the table has no such column.
        """
        near = [own for own in self.names if own.lower() == name.lower()]
        if name in self.names or len(near) != 1:
            near = [own for own in near if own == name]
        if not near:
            raise unknown_name(f"{what} of {self.path}", name, self.names)
        return near[0]

    def clients(self, name: str | None, used: Collection[str] = ()) -> str:
        """Find the column that names the clients: ``name`` if given, otherwise the column called client or id.

        Args:
          name: name of the column.
          used: columns that have another use; the error message does not suggest them.

        Raises:
          JaxpflError: if there is no such column; the message lists the columns and suggests what to write.
        """
        if name is not None:
            return self.find(name)
        for known in CLIENT_NAMES:
            if known in [own.lower() for own in self.names]:
                return self.find(known)
        ways = [f"--client {shlex.quote(own)}" for own in self.names if own not in used]
        raise JaxpflError(
            f"{self.path}: no column is called client or id (available: {self.listed}): "
            + (f"write {printable(', or '.join(ways[:4]), 300)}" if ways else "add one with the clients' names")
        )

    @property
    def listed(self) -> str:
        """Names of the columns, for a message."""
        return printable(", ".join(self.names), 300)

    def texts(self, name: str) -> list[str]:
        """Return the cells of a column.

        Raises:
          JaxpflError: if a cell has no value; the message names the line.
        """
        cells = self.cells[name].tolist()
        for row in np.flatnonzero(self.missing_in(name)):
            cell, line = cells[row], self.lines[row]
            means = "; to change which words mean a missing value, use --missing-words" if cell else ""
            raise JaxpflError(f"{self.path} line {line}: no name in column {shown(name)}, got {shown(cell)}{means}")
        return cells

    def parsed(self, name: str) -> np.ndarray:
        """Return a column as numbers. TRUE and FALSE become 1 and 0, and a cell without a number becomes NaN."""
        import pandas

        places, cells = pandas.factorize(self.cells[name])
        return np.array([parse(cell, self.decimal) for cell in cells], np.float64)[places]

    def numbers(self, name: str, *, missing: bool = False) -> np.ndarray:
        """Return a column as numbers; if ``missing``, cells without a value are allowed and become NaN.

        Raises:
          JaxpflError: if a cell is not a finite number; the message names the line.
        """
        found = self.parsed(name)
        wrong = np.isnan(found) & ~(self.missing_in(name) & missing)
        for row in np.flatnonzero(wrong):
            cell, mark = self.cells[name].iloc[row], "" if self.decimal == "point" else " with a decimal comma"
            raise JaxpflError(
                f"{self.path} line {self.lines[row]}: {name} must be a finite number{mark}, got {shown(cell, 40)}"
            )
        return found


def read(
    path: Path,
    separator: Separator | None = None,
    decimal: Decimal | None = None,
    encoding: str | None = None,
    missing_words: str | None = None,
) -> Table:
    """Read a table from a text file whose first line names the columns.

    Args:
      path: file to read.
      separator: separator of cells; by default, the separator that divides the first line into the most names.
      decimal: decimal mark; by default, detected from the numbers.
      encoding: encoding, as in `text_of`.
      missing_words: words for a cell without a value, separated by commas, in any case; by default, `MISSING`.

    Raises:
      JaxpflError: if the file cannot be read; if it has no column names, the same name twice, or no rows; or if commas
        or points in its numbers can mean either decimals or thousands.
    """
    cells, separator = rows(path, separator, encoding)
    if cells.empty:
        raise JaxpflError(f"{path}: the file is empty: no line has any value")
    line, names = cells.index[0], cells.iloc[0].tolist()
    cells = cells.iloc[1:].set_axis(names, axis=1)
    while names and not names[-1] and not cells.iloc[:, -1].any():  # lines end with a separator
        cells, names = cells.iloc[:, :-1], names[:-1]
    if all(parse(name, "point") is not None for name in names):
        raise JaxpflError(f"{path} line {line}: expected column names, got numbers: add a header")
    for place, name in enumerate(names, start=1):
        if not name:
            raise JaxpflError(f"{path} line {line}: column {place} has no name")
        if names.index(name) != place - 1:
            raise JaxpflError(f"{path} line {line}: two columns are named {shown(name)}")
    if cells.empty:
        raise JaxpflError(f"{path}: the file has a header but no rows")
    words = MISSING if missing_words is None else ("", *(word.strip().lower() for word in missing_words.split(",")))
    return Table(path, cells, separator, decimal or _decimal(path, cells, separator), words)


def table_of(frame: pandas.DataFrame) -> Table:
    """Convert a data frame to a table of strings. Its rows are numbered as lines 1 to N; NaN and None become ""."""
    cells = frame.astype(object).where(frame.notna(), "").map(lambda cell: str(cell).strip())
    cells.columns, cells.index = [str(name) for name in frame.columns], np.arange(1, len(frame) + 1)
    return Table(Path("data frame"), cells, "comma", "point")


def rows(
    path: Path, separator: Separator | None = None, encoding: str | None = None
) -> tuple[pandas.DataFrame, Separator]:
    """Read the non-empty rows of a file as strings without surrounding spaces, and find the separator.

    The index of the data frame has the line number of each row.

    Raises:
      JaxpflError: if the file cannot be read, or has a row longer than the first row.
    """
    import pandas

    text = text_of(path, encoding).replace("\r\n", "\n").replace("\r", "\n")
    excel = re.match(r'"?sep=(.)"?\n', text)  # optional first line, by which Excel names the separator
    if excel:
        separator = separator or next((name for name, mark in SEPARATORS.items() if mark == excel[1]), None)
        text = "\n" + text[excel.end() :]
    if not text.strip():
        return pandas.DataFrame(), "comma"
    skipped = len(text) - len(text := text.lstrip("\n"))
    separator = separator or _separator(text.split("\n", 1)[0])
    try:
        cells = pandas.read_csv(
            io.StringIO(text), sep=r"\s+" if separator == "whitespace" else SEPARATORS[separator], header=None,
            dtype=str, keep_default_na=False, skip_blank_lines=False, skipinitialspace=True,
        )  # fmt: skip
    except pandas.errors.ParserError as error:
        more = re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", str(error))
        if more is None:
            raise JaxpflError(f"cannot read {path}: {' '.join(str(error).split())}") from None
        line, what = int(more[2]) + skipped, f"{more[3]} cells, but the header has {more[1]}"
        raise JaxpflError(f"{path} line {line} has {what}") from None
    inside = sum(cells[place].str.count("\n") for place in cells)  # line breaks inside quotes
    cells.index = skipped + 1 + np.arange(len(cells)) + np.cumsum(inside)
    for place in cells:
        cells[place] = cells[place].str.strip()
    return cells.loc[(cells != "").any(axis=1)], separator


def parse(cell: str, decimal: Decimal) -> float | None:
    """Return the number in a cell, or None if the cell is not a finite number."""
    if not _NUMBER[decimal].fullmatch(cell):
        return _TRUTH.get(cell.lower())
    value = float(cell.replace(",", "."))
    return value if math.isfinite(value) else None


def text_of(path: Path, encoding: str | None = None) -> str:
    """Read a text file in the given encoding; by default UTF-8, or UTF-16 if the file begins with its byte-order mark.

    Raises:
      JaxpflError: if the file cannot be read, or the encoding is unknown.
    """
    raw = files.contents(path, _MEMORY)
    try:
        name = codecs.lookup(encoding or "utf-8").name
        "".encode(name)  # raises LookupError for codecs of bytes, such as base64
    except (LookupError, ValueError):
        raise JaxpflError(f"unknown encoding {shown(encoding)}: use, for example, latin-1, cp1252 or utf-8") from None
    if name == "utf-8":
        name = "utf-16" if raw.startswith(_UTF16) else "utf-8-sig"
    try:
        return raw.decode(name)
    except UnicodeDecodeError as error:
        raise JaxpflError(
            f"cannot read {path} line {1 + raw.count(10, 0, error.start)}: byte 0x{raw[error.start]:02x} is not "
            f"{encoding or 'UTF-8'}: name the encoding, such as --encoding latin-1, or save the file as UTF-8"
        ) from None


def _separator(first: str) -> Separator:
    """Detect the separator from the first line: the tab, semicolon, bar or comma that occurs most often outside quotes.

    If the line has none of them, cells are separated by whitespace if the line contains a space and no quotation mark,
    and otherwise by commas.
    """
    marks: list[Separator] = ["tab", "semicolon", "bar", "comma"]
    counts = []
    for mark in (SEPARATORS[name] for name in marks):
        quoted = rf'(?:(?<=^)|(?<={re.escape(mark)})) *"(?:[^"]|"")*+"'  # separators inside quotes do not count
        counts.append(re.sub(quoted, "", first).count(mark))
    if max(counts) > 0:
        return marks[counts.index(max(counts))]
    return "whitespace" if " " in first.strip() and '"' not in first else "comma"


def _decimal(path: Path, cells: pandas.DataFrame, separator: Separator) -> Decimal:
    """Detect the decimal mark: a comma if some numbers have a comma and none has a point.

    Raises:
      JaxpflError: if the marks may separate thousands instead of decimals. This is so if all numbers with a comma look
        like 1,234 and none has a point. It is also so if cells are separated by semicolons or tabs and a column has
        numbers such as 1.234 and 567: all numbers with a point look like 1.234, and the longest integer has three
        digits. (Excel can write thousands with a point.)
    """
    columns = [list(zip(cells.index, cells[name].tolist(), strict=True)) for name in cells]
    points = [_marked(column, "point") for column in columns]
    commas = [cell for column in columns for cell in _marked(column, "comma")]
    doubtful = [] if any(points) else commas
    for column, pointed in zip(columns, points, strict=True):
        digits = max((len(cell) for _, cell in column if cell.isdecimal()), default=0)
        if pointed and digits == 3 and separator in ("semicolon", "tab"):
            doubtful = pointed
            break
    if doubtful and all(_THOUSAND.fullmatch(cell) for _, cell in doubtful):
        line, cell = doubtful[0]
        flag = "--decimal comma" if "," in cell else "--decimal point"
        raise JaxpflError(
            f"{path} line {line}: the mark in {cell!r} may separate decimals or thousands: write thousands without "
            f"a mark, give decimals a fourth digit, or use {flag} (only in jaxpfl estimate)"
        )
    return "comma" if commas and not any(points) else "point"


def _marked(column: list[tuple[int, str]], mark: Decimal) -> list[tuple[int, str]]:
    """Find the cells of a column that contain a number with the given decimal mark, each with its line number."""
    sign = "." if mark == "point" else ","
    return [(line, cell) for line, cell in column if sign in cell and _NUMBER[mark].fullmatch(cell)]
