"""The way from a paper to the code: docs/papers.md names what exists, and its items are named where they are."""

import importlib
import inspect
import itertools
import re
import shlex
from functools import cache, reduce
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import jaxpfl
from jaxpfl import METHODS, JaxpflError
from jaxpfl.benchmarks.papers import registry
from jaxpfl.cli import app, training
from jaxpfl.cli.parsing import check_arguments, flags_of
from jaxpfl.uploads.compression import resolve

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "papers.md").read_text()
TABLES = (ROOT / "docs" / "tables.md").read_text()
PAPERS = ("Ozkara et al. 2023", "Ozkara et al. 2022", "Divi et al. 2021", "Setlur et al. 2023", "Zhao et al.")


class Row(NamedTuple):
    label: str
    names: list[str]
    command: str
    test: str


def rows() -> list[Row]:
    """The rows of the papers' tables, with their paper."""
    found = []
    for section in re.split(r"^## ", PAGE, flags=re.M)[1:]:
        paper = section.splitlines()[0]
        for line in re.findall(r"^\| (?!in the paper)(.*)\|$", section, re.M):
            item, names, command, test, _ = (cell.strip() for cell in line.split("|"))
            found.append(Row(f"{paper}, {item}", names.strip("`").split("`, `"), command.strip("`"), test.strip("`")))
    return found


ROWS = rows()


@cache
def named(name: str) -> Any:
    """Object of a dotted name below ``jaxpfl``, and its module."""
    parts, module = name.split("."), None
    for i in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(["jaxpfl", *parts[:i]]))
        except ModuleNotFoundError:
            continue
        return reduce(getattr, parts[i:], module), module
    raise AttributeError(f"no module jaxpfl.{name}")


def docs_of(name: str) -> list[str]:
    """The docstrings in which the items of a name may stand, on one line each."""
    what, module = named(name)
    own = inspect.getdoc(what) if inspect.isroutine(what) or inspect.isclass(what) else None
    return [" ".join(doc.split()) for doc in (own, module.__doc__) if doc]


def check_call(command: str) -> None:
    """Check a command's arguments as the command line does before it parses and runs them."""
    program, *args = shlex.split(command)
    assert program == "jaxpfl"
    if args[0] == "bench":
        importlib.import_module(f"jaxpfl.benchmarks.{args[1]}")
        return
    prog, known = "jaxpfl", training.commands(args)
    if args[0] in app.GROUPS:
        group, *args = args
        prog, known = f"jaxpfl {group}", app.commands_of(group)
    name, *args = args
    chosen = next(c for c in known if c.__name__.replace("_", "-") == name)
    check_arguments(flags_of(chosen), args, f"{prog} {name}")
    if prog == "jaxpfl papers":
        registry.get(args[0])
    for flag in {"--compress", "--compressors"} & set(args):
        for compressor in itertools.takewhile(lambda arg: not arg.startswith("-"), args[args.index(flag) + 1 :]):
            resolve(compressor)
    if prog == "jaxpfl":
        assert set(itertools.takewhile(lambda arg: not arg.startswith("-"), args)) <= set(METHODS)


def test_every_paper_has_its_rows():
    of = [row.label.rpartition(", ")[0] for row in ROWS]
    assert {next(p for p in PAPERS if label.startswith(p)) for label in of} == set(PAPERS)
    labels = [row.label for row in ROWS]
    assert len(set(labels)) == len(labels)
    # The numbered items of the main paper, one by one.
    for item in (
        *(f"Theorem {i}" for i in range(1, 8)),
        *(f"Algorithm {i}" for i in range(1, 8)),
        *(f"Lemma {i}" for i in range(1, 4)),
        *(f"Remark {i}" for i in range(1, 8)),
        *(f"Table {i}" for i in range(1, 6)),
    ):
        assert f"Ozkara et al. 2023, {item}" in labels


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.label)
def test_names_exist_and_say_what_they_implement(row: Row):
    label = re.compile(re.escape(row.label) + r"(?!\.?\w)")  # section 3 is not 3.3
    for name in row.names:
        assert any(map(label.search, docs_of(name))), f"{name} does not say that it is of {row.label}"


def test_a_label_is_found_by_grep():
    lines = {
        " ".join(line.split()) for path in (ROOT / "jaxpfl").rglob("*.py") for line in path.read_text().splitlines()
    }
    assert any("Ozkara et al. 2023, Theorem 1" in line for line in lines)


def test_what_docstrings_say_is_on_the_page():
    """A function that says that it implements an item is in that item's row."""
    of = {row.label: {inspect.getsourcefile(named(name)[1]) for name in row.names} for row in ROWS}
    for path in Path(jaxpfl.__file__).parent.rglob("*.py"):  # the installed package may not be the checkout's
        for said in re.findall(r"Implements: ((?:.*;\n)*.*)\.\n", path.read_text()):
            for label in re.split(r";\s+", said):
                assert str(path) in of.get(label, ()), f"{path.name} implements {label}"


@pytest.mark.parametrize("command", sorted({row.command for row in ROWS}))
def test_commands_parse(command: str):
    check_call(command)


def test_a_wrong_command_would_be_seen():
    with pytest.raises(JaxpflError, match="--no-such-flag"):
        check_call("jaxpfl estimate gaussian --no-such-flag 3")
    with pytest.raises(JaxpflError, match="did you mean 'adaped-table1-mnist'"):
        check_call("jaxpfl papers run adaped-table1-minst")


def test_every_table_of_the_command_line_is_on_the_page():
    assert all(name in PAGE or name in TABLES for name in registry.EXPERIMENTS)


def test_every_test_exists():
    for row in ROWS:
        path, _, name = row.test.partition("::")
        text = (ROOT / "tests" / path).read_text()
        assert re.search(rf"^(def {name}\(|{name} = )", text, re.MULTILINE), row.test


def test_names_in_the_remarks_exist():
    for name in set(re.findall(r"`((?:estimators|priors|privacy|algorithms|similarity|compression)\.[\w.]+)`", PAGE)):
        named(name)
