"""Lock of a run folder, for one process at a time.

The lock is the kernel's (``flock`` on the hidden file ``.lock``): it is released when its process ends, however that
happens, and leaves nothing to clean up. On a network file system it also excludes other machines' processes if the
server supports locks, as NFS does from Linux 2.6.12; with ``local_lock`` it excludes this machine's processes only, and
without locks none, which is reported.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxpfl.support.errors import JaxpflError, warn, writing

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_NONE_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Create a run folder if needed, and lock it for this process while the block runs.

    Folders created here, those above it among them, that are still empty at the end are removed.

    Raises:
      JaxpflError: if another process holds it, or it cannot be created.
    """
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(folder)
    try:
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):  # the whole folder may be gone
                (folder / ".lock").unlink()
            os.close(descriptor)
        with suppress(OSError):  # one has something in it
            for one in made:
                one.rmdir()


def is_held(folder: Path) -> bool:
    """True if a process is at work in a run folder, as far as locks tell; nothing is written."""
    if fcntl is None:
        return False
    try:
        descriptor = os.open(folder / ".lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    else:
        return False
    finally:
        os.close(descriptor)


def _lock(folder: Path) -> int | None:
    """Descriptor that holds the lock; None without lock support."""
    path = folder / ".lock"
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if fcntl is None:
                raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous holder removes its file at its end: a lock on that file excludes no one.
            if _is_at(descriptor, path):
                os.truncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return descriptor
            os.close(descriptor)
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise JaxpflError(f"{holder} is at work in {folder}: wait for it, or choose another --output") from None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _NONE_HERE:
                raise
            path.unlink(missing_ok=True)
            warn(f"{folder} is on a file system without locks: nothing keeps a second process out of it")
            return None


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
