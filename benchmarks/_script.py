"""Lets a file of this package run as a script, ``python benchmarks/NAME.py``, with its relative imports.

The package is ``benchmarks`` in a checkout and ``jaxpfl.benchmarks`` where it is installed; the folders say which.
"""

import importlib
import sys
from pathlib import Path


def _package() -> str:
    here = Path(__file__).resolve().parent
    top, name = here, here.name
    while (top.parent / "__init__.py").exists():
        top = top.parent
        name = f"{top.name}.{name}"
    # The folder itself goes last, where its files hide no others; a process that is spawned still finds this file.
    others = [p for p in sys.path if not p or Path(p).resolve() not in (here, top.parent)]
    sys.path[:] = [str(top.parent), *others, str(here)]
    importlib.import_module(name)
    return name


package = _package()
