"""Every package of the source tree is installed: their list in ``pyproject.toml`` is written by hand."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_package_is_installed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "jaxpfl").rglob("__init__.py")}
    assert set(listed) == folders | {"jaxpfl.benchmarks"}
