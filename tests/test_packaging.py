"""Every package of the source tree is installed: their list in ``pyproject.toml`` is written by hand."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import jaxpfl

ROOT = Path(__file__).parents[1]


def test_every_package_is_installed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "jaxpfl").rglob("__init__.py")}
    assert set(listed) == folders | {"jaxpfl.benchmarks"}


def test_the_version_is_one():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"] == ["version"]
    (cited,) = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == jaxpfl.__version__ == importlib.metadata.version("jaxpfl")
