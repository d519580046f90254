"""SHA-256 checksums of every file in a folder, stored there in the format of ``sha256sum --check SHA256SUMS``."""

from __future__ import annotations

import hashlib
from pathlib import Path

from jaxpfl.support.errors import JaxpflError
from jaxpfl.support.files import opened

NAME = "SHA256SUMS"


def write(folder: Path) -> None:
    """Write the checksums of all files of a folder into it."""
    (folder / NAME).write_bytes(_sums(folder))


def check(folder: Path) -> None:
    """Verify every file of a folder against its checksums.

    Raises:
      JaxpflError: if a file was changed, removed or added since `write`.
    """
    try:
        with opened(folder / NAME) as file:
            written = file.read()
        found = _sums(folder)
    except FileNotFoundError:
        raise JaxpflError(f"{folder} has no checksums: its {NAME} is missing") from None
    except OSError as error:
        raise JaxpflError(f"cannot read {folder}: {error.strerror or error}") from None
    if found != written:  # to the byte: no change of the checksums themselves passes for one of spelling
        raise JaxpflError(f"{folder} is damaged: {_first_difference(written, found)} does not fit {NAME}")


def check_file(folder: Path, name: str) -> None:
    """Verify one file of a folder, as `check` does for all."""
    try:
        with opened(folder / NAME) as file:
            known = file.read().splitlines()
        found = _line(folder, name)
    except OSError as error:
        missing = f"there is no {Path(error.filename or name).name} in it"
        why = missing if isinstance(error, FileNotFoundError) else error.strerror
        raise JaxpflError(f"cannot read {folder}: {why}") from None
    if found not in known:
        raise JaxpflError(f"{folder} is damaged: {name} does not fit {NAME}")


def _sums(folder: Path) -> bytes:
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return b"".join(_line(folder, name) + b"\n" for name in sorted(names) if name != NAME)


def _line(folder: Path, name: str) -> bytes:
    with opened(folder / name) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{digest}  {name}".encode(errors="surrogateescape")


def _first_difference(written: bytes, found: bytes) -> str:
    for line in (*found.splitlines(), *written.splitlines()):
        if (line in written.splitlines()) != (line in found.splitlines()):
            return line[66:].decode(errors="replace") or NAME
    return NAME
