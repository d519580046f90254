"""The user's Python files, named in settings as ``FILE.py:NAME``.

A file is run once for each command or fit, even if it is edited meanwhile. It can import modules from its own folder,
and its output goes to standard error. The source of the file and of these modules is kept in memory, to be copied to
run folders.
"""

from __future__ import annotations

import importlib
import re
import sys
import traceback
import types
import zlib
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError

_REFERENCE = re.compile(r"(.+\.py)(?::(.*))?", re.DOTALL)


class OwnFile(NamedTuple):
    """A file that was run.

    Attributes:
      module: module object in which the file was executed.
      texts: contents of the file and of the modules that it imported from its folder, by path relative to this folder.
    """

    module: types.ModuleType
    texts: dict[str, bytes]


_files: dict[Path, OwnFile] = {}


def is_reference(text: object) -> bool:
    """Return True if a setting's value names an object in a file, as ``FILE.py:NAME``."""
    return isinstance(text, str) and _REFERENCE.fullmatch(text) is not None


def split(reference: str) -> tuple[Path, str]:
    """Split a reference into the file and the name; without a name, the second value is ""."""
    found = _REFERENCE.fullmatch(reference)
    assert found is not None
    return Path(found[1]).expanduser(), found[2] or ""


def moved(reference: str, folder: Path = Path()) -> str:
    """Return the reference with a new folder before the file name; by default, without a folder."""
    path, name = split(reference)
    return f"{folder / path.name}:{name}"


def load(reference: str, fits: Callable[[Any], bool], what: str) -> Any:
    """Return the object that a reference names.

    Args:
      reference: file and name, ``FILE.py:NAME``.
      fits: predicate that is true for objects of the wanted kind.
      what: word for an object of this kind, in error messages.

    Raises:
      JaxpflError: if the file is missing or raises an error, or if the object is missing or of another kind; the
        message lists the file's objects of the wanted kind.
    """
    path, name = split(reference)
    module = load_file(path).module
    names = vars(module)
    if name in names and fits(names[name]):
        return names[name]
    # Imported classes and functions are not listed, but instances of imported classes are.
    homes = {key: (getattr(value, "__module__", None), type(value).__module__) for key, value in names.items()}
    own = [key for key, (home, of_type) in homes.items() if home in (module.__name__, of_type) and fits(names[key])]
    problem = f"{name} is not a {what}" if name in names else f"there is no {name!r}"
    raise JaxpflError(f"{reference}: {problem} (suitable names in the file: {', '.join(own) or 'none'})")


def refresh() -> None:
    """Forget each file that has changed since it was run, or that imported a module which has changed."""
    for path, file in list(_files.items()):
        places = {path.parent / name: text for name, text in file.texts.items()}
        if not all(place.is_file() and files.contents(place) == text for place, text in places.items()):
            del _files[path]


def load_file(path: Path) -> OwnFile:
    """Run a file, or return the result of an earlier call; `refresh` forgets changed files.

    Raises:
      JaxpflError: if the file cannot be read or raises an error; the message names the line.
    """
    whole = path.resolve()
    if whole in _files:
        return _files[whole]
    text, folder, before = files.contents(path), str(whole.parent), {*sys.modules}
    module = types.ModuleType(f"own_code_{whole.stem}_{zlib.crc32(str(whole).encode()):08x}")
    module.__file__ = str(whole)
    sys.modules[module.__name__] = module  # the dataclass decorator looks up the class's module here
    sys.path.insert(0, folder)
    cached, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    importlib.invalidate_caches()
    try:
        with redirect_stdout(sys.stderr):
            exec(compile(text, whole, "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(whole)]
        where = f"{path} line {lines[-1]}" if lines else path
        raise JaxpflError(f"{where}: {type(error).__name__}: {' '.join(str(error).split())}") from error
    finally:
        sys.dont_write_bytecode = cached
        sys.path.remove(folder)
        beside = _beside(whole.parent, before)
        for name in beside:  # so that a file in another folder can import a different module with the same name
            del sys.modules[name]
    texts = {one.relative_to(folder).as_posix(): files.contents(one) for one in beside.values()}
    _files[whole] = OwnFile(module, {whole.name: text, **texts})
    return _files[whole]


def _beside(folder: Path, before: set[str]) -> dict[str, Path]:
    """Return the files of the modules that were newly imported from a folder, by module name."""
    paths = {name: Path(vars(sys.modules[name]).get("__file__") or "") for name in sys.modules.keys() - before}
    inside = {name: path.relative_to(folder).parts for name, path in paths.items() if path.is_relative_to(folder)}
    # A virtual environment inside the folder is not the user's code.
    return {n: paths[n] for n, parts in inside.items() if parts[0].removesuffix(".py") == n.partition(".")[0]}
