"""Support for running a file of this package as a script, ``python benchmarks/NAME.py``, with its relative imports.

The package is called ``benchmarks`` in a checkout and ``jaxpfl.benchmarks`` in an installation. The folders that
contain this file determine the name.
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
    # The folder itself goes last, so that its files hide no other modules. Spawned processes still find this file.
    others = [p for p in sys.path if not p or Path(p).resolve() not in (here, top.parent)]
    sys.path[:] = [str(top.parent), *others, str(here)]
    importlib.import_module(name)
    return name


package = _package()
