"""Common interface of all benchmarks: their options, the table that they print, and the record that they write."""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from contextvars import ContextVar
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn, TextIO

from .harness import JobError

PACKAGES = ("jaxpfl", "jax", "jaxlib", "flax", "optax", "numpy", "scipy", "statsmodels", "torch", "fedjax")
STANDARD_OUTPUT = Path("-")
_RECORD: ContextVar[TextIO] = ContextVar("record", default=sys.stdout)
_BENCH = "jaxpfl bench "
FLAG_PREFIXES = ("JAX_", "XLA_", "LIBTPU_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "CUDA_VISIBLE_", "NVIDIA_TF32_")


class _Parser(argparse.ArgumentParser):
    """Argparse's parser, but errors are one line and suggest the nearest flag."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            near = difflib.get_close_matches(rest[0], self._option_string_actions, n=1)
            self.error(f"unknown argument {rest[0]}" + (f": did you mean {near[0]}?" if near else ""))
        return parsed

    def error(self, message: str) -> NoReturn:
        print(f"error: {self.prog}: {' '.join(message.split())}", file=sys.stderr)
        raise SystemExit(2)


def parser(name: str, doc: str | None, *, repetitions: int = 5) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have; a benchmark adds its own options."""
    result = _Parser(prog=name, description=(doc or "").splitlines()[0])
    said = "file for the record; without FILE, print the record, and the tables on standard error"
    result.add_argument("--json", type=own_file(name), nargs="?", const=STANDARD_OUTPUT, metavar="FILE", help=said)
    result.add_argument("--repetitions", type=positive, default=repetitions, help="number of timings of each contender")
    result.add_argument("--data-dir", help="folder that contains mnist; by default, $JAXPFL_DATA_DIR")
    result.add_argument(
        "--quick", action="store_true", help="run for a few seconds, only to show that the benchmark works"
    )
    return result


def command(main: Callable[[list[str] | None], None]) -> Callable[..., None]:
    """Decorator for a benchmark's ``main``: a failed contender gives one line on standard error and exit status 1."""

    @functools.wraps(main)
    def guarded(argv: list[str] | None = None) -> None:
        args = sys.argv[1:] if argv is None else argv
        after = args[args.index("--json") + 1 :] if "--json" in args else ["FILE"]
        alone = not after or after[0].startswith("-")  # the file has no name
        try:
            with _record_alone() if alone else nullcontext():
                main(argv)
        except JobError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(1) from None
        except KeyboardInterrupt:
            raise SystemExit(130) from None

    return guarded


@contextmanager
def _record_alone() -> Iterator[None]:
    """Write only the record to standard output; everything else that is printed goes to standard error."""
    token = _RECORD.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _RECORD.reset(token)


def own_file(benchmark: str, *, picture: bool = False) -> Callable[[str], Path]:
    """Return an argparse type for a file to write: it must be new, or written by the same benchmark before."""

    def path(text: str) -> Path:
        file = Path(text)
        if file.is_dir():
            raise argparse.ArgumentTypeError(f"{text} is a folder: name a file")
        wrote = _drew if picture else _recorded
        if file.exists() and wrote(file) != benchmark:
            raise argparse.ArgumentTypeError(f"{text} exists but was not written by {benchmark}: choose another")
        return file

    return path


def save_picture(figure: Any, path: Path, benchmark: str) -> None:
    """Write a figure that `own_file` recognizes."""
    from jaxpfl.support.console import save_png, signed

    with signed(f"{_BENCH}{benchmark}"):
        save_png(figure, path)


def _drew(path: Path) -> str | None:
    from jaxpfl.support.console import signature

    return (signature(path) or "").removeprefix(_BENCH)


def _recorded(path: Path) -> str | None:
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return record.get("benchmark") if isinstance(record, dict) else None


def positive(text: str) -> int:
    """Argparse type for a whole number of at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows below a title; numbers have three significant figures, and None is left empty."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(columns, *cells, strict=True)]
    print(f"\n{title}\n")
    for line in (list(columns), *cells):
        first, *others = (text.rjust(width) for text, width in zip(line, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *others]).rstrip())


def target(floor: float, aim: float) -> dict[str, float]:
    """Return the target of a figure: the smallest (or largest) acceptable value, and the aim."""
    return {"floor": floor, "aim": aim}


def write(path: Path | None, benchmark: str, settings: Mapping[str, Any], results: Any, **more: Any) -> None:
    """Write the record if a file was given."""
    if path is None:
        return
    known = {name: value for name, value in settings.items() if name not in ("json", "data_dir")}
    record = {"benchmark": benchmark, "settings": known, "environment": environment(), **more}
    text = json.dumps(record | {"results": results}, indent=2, default=str) + "\n"
    if path == STANDARD_OUTPUT:
        _RECORD.get().write(text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def stored(path: Path | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of a record with which an interrupted benchmark continues; empty if there is none.

    Raises:
      JobError: if the record has other settings.
    """
    if path is None or not path.exists():
        return {}
    record = json.loads(path.read_text())
    if record["settings"] != json.loads(json.dumps(settings)):
        raise JobError(f"{path} has different settings: {record['settings']}")
    return record["results"]


def environment() -> dict[str, Any]:
    """Return versions, machine, flags and commit. The contenders' facts contain the devices that JAX used."""
    names = sorted(n for n in os.environ if n.startswith(FLAG_PREFIXES) and not n.endswith(("_DIR", "_PATH")))
    return {
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "flags": {name: os.environ[name] for name in names},
        "commit": _commit(),
    }


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str | None:
    """Return the commit of this file's checkout, and whether the checkout was changed; None outside a checkout."""
    folder = Path(__file__).resolve().parent
    if not (folder.parent / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=folder, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
