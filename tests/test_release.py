"""A release in its parts: packages, one version, its heading, terms of what is embedded, citations of the paper."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import jaxpfl

ROOT = Path(__file__).parents[1]
SOURCES = (".py", ".pyc", ".typed")


def test_the_changelog_opens_with_the_version():
    heading = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert re.fullmatch(rf"## {re.escape(jaxpfl.__version__)} \((unreleased|\d{{4}}-\d\d-\d\d)\)", heading)


def test_all_that_is_embedded_has_its_terms():
    said = (ROOT / "docs" / "licences.md").read_text()
    folders = [ROOT / "jaxpfl", ROOT / "benchmarks" / "papers", ROOT / "benchmarks" / "winners"]
    paths = [path for folder in folders for path in folder.rglob("*")]
    embedded = [path for path in paths if path.is_file() and path.suffix not in SOURCES]
    assert {path.suffix for path in embedded} >= {".json", ".css", ".js"}
    names = {path: path.relative_to(ROOT) for path in embedded}
    assert [
        str(n) for n in names.values() if str(n) not in said and f"`{n.parent}`" not in said and n.name not in said
    ] == []


def test_the_paper_cites_what_its_bibliography_has():
    folder = ROOT / "docs" / "paper"
    text = (folder / "paper.md").read_text()
    cited = set(re.findall(r"(?<![\w`])@([a-z]+\d*)", text))
    entries = re.findall(r"^@\w+\{([^,]+),$", (folder / "paper.bib").read_text(), re.M)
    assert len(entries) == len(set(entries))
    assert cited == set(entries)


def test_every_package_is_installed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    paths = [*(ROOT / "jaxpfl").rglob("__init__.py"), *(ROOT / "benchmarks").rglob("__init__.py")]
    names = {".".join(path.parent.relative_to(ROOT).parts) for path in paths}
    assert set(listed) == {name if name.startswith("jaxpfl") else f"jaxpfl.{name}" for name in names}


def test_the_version_is_one():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"] == ["version"]
    (cited,) = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == jaxpfl.__version__ == importlib.metadata.version("jaxpfl")
