"""Compilation cache of the command line: a program compiled once on this machine is loaded the next time.

The cache is JAX's persistent cache, in ``$XDG_CACHE_HOME/jaxpfl``. Only the command line enables the cache, because a
library must not write to its user's home. The user's settings take precedence. If the folder cannot be written, nothing
is cached, and there is no error.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import tempfile
import zlib
from pathlib import Path
from typing import Any

from jaxpfl.support import files

LIMIT_BYTES = 2 * 2**30
"""Limit on the total size of the cache's folders, beyond which the least recently used programs are deleted."""

TROUBLE = "Error (reading|writing) persistent compilation cache entry for '(.*?)'"
"""Beginning of JAX's warning about an entry that cannot be read or written; JAX then compiles, so nothing is lost."""

_MIN_COMPILE_SECONDS = 0.2  # below it, a run has dozens of programs that compile as fast as they load


def enable() -> Path | None:
    """Enable the cache; must be called before anything is compiled.

    Returns:
      The cache's folder, or None if the cache stays off: because the user chose so (``JAX_COMPILATION_CACHE_DIR`` is
      set, even to nothing; ``JAX_ENABLE_COMPILATION_CACHE=false``; or a folder was set in this process), because the
      folder cannot be written, or because others can write to it.
    """
    import jax
    import jaxlib.version

    from jaxpfl.engine import compiled
    from jaxpfl.support import processes

    settings: Any = jax.config  # JAX defines their names as it runs
    chosen = "JAX_COMPILATION_CACHE_DIR" in os.environ or settings.jax_compilation_cache_dir is not None
    if chosen or not settings.jax_enable_compilation_cache:
        return None
    try:
        folder = _folder(jaxlib.version.__version__)
        # Compiled code is executed as it is: no one else may write there.
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if not all(files.is_own(place.stat()) for place in (folder, folder.parent)):
            return None
        tempfile.TemporaryFile(dir=folder).close()
        trim(folder.parent, LIMIT_BYTES)
    except (OSError, RuntimeError):  # not writable, or no home
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    for name, value in (
        ("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_SECONDS),
        ("jax_persistent_cache_min_entry_size_bytes", -1),
    ):
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    if not processes.several():  # a stored program is for the devices of one process
        compiled.keep_in(folder)
    return folder


def repair(warning: str) -> bool:
    """Delete the cache entry that JAX warned about: one cut short by a kill or a full disk would stay for ever.

    Args:
      warning: the text of any warning.

    Returns:
      True if the warning was about this cache, and needs no attention.
    """
    import jax

    match = re.match(TROUBLE, warning)
    settings: Any = jax.config
    folder = Path(settings.jax_compilation_cache_dir or "")
    if match is None or not re.fullmatch("xla-[0-9a-f]{16}", folder.name):
        return False
    # The warning names the program, not the entry.
    for entry in folder.glob(f"{match[2]}-*-cache"):
        try:
            zlib.decompress(entry.read_bytes())
        except zlib.error:
            entry.unlink(missing_ok=True)
        except OSError:
            continue
    return True


def trim(root: Path, limit: int) -> None:
    """Delete the least recently used programs, also from other machines and versions, down to a limit.

    JAX's own limit needs a package that it does not depend on, and refuses every write after a kill between two files.
    """
    entries = []
    for path in root.glob("xla-*/*-cache"):
        try:
            status = path.stat()
        except OSError:  # another process trims too
            continue
        # The time of access is kept to the day, or not at all: then the oldest go first.
        entries.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    held = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if held <= limit:
            break
        path.unlink(missing_ok=True)
        held -= size


def _folder(jaxlib: str) -> Path:
    """Folder for this jaxlib and kind of CPU: a home may be shared between CPUs that cannot run each other's code."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    root = given if given.is_absolute() else Path.home() / ".cache"  # as the specification has it
    name = hashlib.sha256("\n".join((jaxlib, *_machine())).encode()).hexdigest()[:16]
    return root / "jaxpfl" / f"xla-{name}"


def _machine() -> tuple[str, ...]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine(), platform.processor()
    # "flags" on x86, "Features" on Arm; the cores of one machine may differ in order only.
    flags = {line.partition(":")[2].strip() for line in lines if line.lower().startswith(("flags", "features"))}
    return platform.machine(), *sorted(flags)
