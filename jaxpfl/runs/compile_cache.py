"""Compiled programs on disk, so that a program is compiled only once on a machine.

The programs are in ``$XDG_CACHE_HOME/jaxpfl``. `fit` keeps its own programs there (`keep_programs`). The command line
also makes JAX keep everything else that it compiles (`enable`). `fit` does not, because a library must not change how
JAX treats the user's other functions. JAX settings made by the user take precedence. If the folder cannot be written,
nothing is kept, and there is no error.
"""

from __future__ import annotations

import functools
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
"""Largest total size of the cache; above this size, the least recently used programs are deleted."""

TROUBLE = "Error (reading|writing) persistent compilation cache entry for '(.*?)'"
"""Pattern of JAX's warning about an entry that cannot be read or written. JAX then compiles the program as usual."""

# A run has dozens of programs that compile faster than this; loading them from disk would take just as long.
_MIN_COMPILE_SECONDS = 0.2

_AUTOTUNED = "xla_gpu_per_fusion_autotune_cache_dir"
"""Subfolder in which XLA stores its autotuning results on a GPU; JAX places it in the cache's folder by default."""


def keep_programs() -> Path | None:
    """Keep the programs of later simulations on disk; JAX's settings are left unchanged.

    Returns:
      The folder, or None if the folder must not be used. It must not be used if it is not writable, if other users can
      write to it, or if the user configured JAX's cache: with ``JAX_COMPILATION_CACHE_DIR`` (even if empty), with
      ``JAX_ENABLE_COMPILATION_CACHE=false``, or by setting another folder in this process. A run of several processes
      keeps no programs of simulations, but the folder is returned.
    """
    import jax

    from jaxpfl.engine import programs
    from jaxpfl.support import processes

    settings: Any = jax.config  # Any: JAX defines the attributes at run time, which type checkers cannot see
    folder = None
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and settings.jax_enable_compilation_cache:
        folder = _prepared(os.environ.get("XDG_CACHE_HOME", ""))
    if settings.jax_compilation_cache_dir not in (None, str(folder)):
        folder = None
    programs.keep_in(None if processes.several() else folder)  # a stored program runs on a single process's devices
    return folder


def enable() -> Path | None:
    """Keep all programs on disk: the programs of simulations (see `keep_programs`), and all others that JAX compiles.

    This must be called before anything is compiled.

    Returns:
      The folder, as `keep_programs` returns it.
    """
    import jax

    folder = keep_programs()
    if folder is None:
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_SECONDS)
    return folder


@functools.cache
def _prepared(home: str) -> Path | None:
    """Return the cache folder, created if it is missing; None if it cannot be used."""
    import jaxlib.version

    try:
        folder = _folder(home, jaxlib.version.__version__)
        # Compiled code from the cache is executed unchecked, so no other user may be able to write there.
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if not all(files.is_own(place.stat()) for place in (folder, folder.parent)):
            return None
        tempfile.TemporaryFile(dir=folder).close()
        trim(folder.parent, LIMIT_BYTES)
    except (OSError, RuntimeError):  # the folder is not writable, or the user has no home
        return None
    return folder


def repair(warning: str) -> bool:
    """Delete the damaged cache entry that a JAX warning reports.

    A killed process or a full disk leaves an incomplete entry. JAX never replaces it, and would warn about it in every
    run.

    Args:
      warning: message of any warning.

    Returns:
      True if the warning was about this cache; the user then need not see it.
    """
    import jax

    match = re.match(TROUBLE, warning)
    settings: Any = jax.config
    folder = Path(settings.jax_compilation_cache_dir or "")
    if match is None or not re.fullmatch("xla-[0-9a-f]{16}", folder.name):
        return False
    # The warning names the program but not the entry, so all entries of that program are checked.
    for entry in folder.glob(f"{match[2]}-*-cache"):
        try:
            zlib.decompress(entry.read_bytes())
        except zlib.error:
            entry.unlink(missing_ok=True)
        except OSError:
            continue
    return True


def trim(root: Path, limit: int) -> None:
    """Delete the least recently used programs and autotuning results until at most ``limit`` bytes remain.

    The files of all machines and versions below ``root`` are counted. JAX's own limit is not used: it needs a
    package that JAX does not install, and refuses every write if an earlier process was killed between writing two
    files.
    """
    entries = []
    for path in (*root.glob("xla-*/*-cache"), *root.glob(f"xla-*/{_AUTOTUNED}/*")):
        try:
            status = path.stat()
        except OSError:  # another process is trimming too
            continue
        # Some file systems update access times only daily or never, so the time of writing counts too.
        entries.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    held = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if held <= limit:
            break
        path.unlink(missing_ok=True)
        held -= size


def _folder(home: str, jaxlib: str) -> Path:
    """Return the folder for this jaxlib and type of CPU.

    A home directory may be shared between machines whose CPUs cannot run each other's code.
    """
    given = Path(home)
    root = given if given.is_absolute() else Path.home() / ".cache"  # the XDG specification ignores relative paths
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        extensions = {platform.processor()}
    else:  # each core has a line, called "flags" on x86 and "Features" on Arm
        extensions = {
            line.partition(":")[2].strip() for line in lines if line.lower().startswith(("flags", "features"))
        }
    words = jaxlib, platform.machine(), *sorted(extensions)
    name = hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
    return root / "jaxpfl" / f"xla-{name}"
