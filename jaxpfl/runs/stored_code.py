"""Copies of the user's files in run and sweep folders, so that results can be continued and exported later.

The subfolder ``code/`` contains the files that the settings name as ``FILE.py:NAME``, the modules that these files
import from their own folders, and checksums. In ``config.json`` and ``sweep.json``, the entry ``code`` maps the name of
each of the user's methods to its reference ``FILE.py:NAME``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from jaxpfl import algorithms
from jaxpfl.engine.spec import OWN
from jaxpfl.support import files, own_code
from jaxpfl.support.errors import JaxpflError, expecting, warn

if TYPE_CHECKING:
    from jaxpfl.runs.config import RunConfig

C = TypeVar("C", bound="RunConfig")
CODE = "code"
"""Name of the subfolder with the copies."""


def sources_of(methods: Iterable[str]) -> dict[str, str]:
    """Return the reference of each method from a file of the user, by method name, with the bare file name."""
    found = {name: algorithms.get(name).source for name in methods}
    return {name: own_code.moved(source) for name, source in found.items() if source}


def texts_of(config: RunConfig, methods: Iterable[str]) -> dict[str, bytes]:
    """Return the contents of all files of the user that a run or sweep needs, by path relative to ``code/``.

    Raises:
      JaxpflError: if two different files have the same name.
    """
    named = [algorithms.get(name).source for name in methods] + [str(getattr(config, name)) for name in OWN]
    found: dict[str, bytes] = {}
    for path in {own_code.split(reference)[0] for reference in named if own_code.is_reference(reference)}:
        for name, text in own_code.load_file(path).texts.items():
            if found.setdefault(name, text) != text:
                raise JaxpflError(f"two different files are named {name}, and the results keep one: rename one of them")
    return found


def write(folder: Path, texts: Mapping[str, bytes]) -> None:
    """Write copies of files into a run or sweep folder, and keep the copies already there."""
    for name, text in texts.items():
        (folder / CODE / name).parent.mkdir(parents=True, exist_ok=True)
        with files.whole(folder / CODE / name, "wb") as file:
            file.write(text)
    if texts:
        files.write_checksums(folder / CODE)


def changes(folder: Path, texts: Mapping[str, bytes]) -> list[str]:
    """Return a remark about each file that differs from its copy in a run or sweep folder."""
    copies = {folder / CODE / name: text for name, text in texts.items()}
    changed = [copy for copy, text in copies.items() if copy.is_file() and files.contents(copy) != text]
    return [f"{copy.name} has changed (restore it from {copy}, or start anew)" for copy in changed]


def located(config: C, folder: Path = Path()) -> C:
    """Return the config with its references pointing to the copies in ``folder``; by default, with bare file names."""
    found = {name: getattr(config, name) for name in OWN if own_code.is_reference(getattr(config, name))}
    return dataclasses.replace(config, **{name: own_code.moved(text, folder) for name, text in found.items()})


def methods_in(folder: Path, methods: Iterable[str], sources: Mapping[str, str]) -> list[str]:
    """Return the methods' names, with a reference to its copy in place of each method from a file of the user.

    Args:
      folder: subfolder ``code/`` with the copies.
      methods: names of the methods.
      sources: entry ``code`` of ``config.json`` or ``sweep.json``.

    Raises:
      JaxpflError: if a copy was changed, or if ``sources`` is not a mapping from names to references.
    """
    files.check_checksums(folder)
    warn(f"{folder}, the code of whoever made these results, is run")
    with expecting(folder, "code of these results"):
        return [own_code.moved(sources[name], folder) if name in sources else name for name in methods]
