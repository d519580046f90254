"""Every package of the source tree is installed: their list in ``pyproject.toml`` is written by hand."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import jaxpfl

ROOT = Path(__file__).parents[1]


def test_every_package_is_installed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    paths = [*(ROOT / "jaxpfl").rglob("__init__.py"), *(ROOT / "benchmarks").rglob("__init__.py")]
    names = {".".join(path.parent.relative_to(ROOT).parts) for path in paths}
    assert set(listed) == {name if name.startswith("jaxpfl") else f"jaxpfl.{name}" for name in names}


def test_the_version_is_one():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"] == ["version"]
    (cited,) = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == jaxpfl.__version__ == importlib.metadata.version("jaxpfl")
