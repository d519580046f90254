"""Your own text files, ``text:FOLDER``: each file or subfolder is a client, and the task is to predict the next byte.

Tokens are the 256 byte values of UTF-8 text, so the vocabulary reveals nothing about any client's text. A client's text
(for a subfolder, the concatenation of all its files, in the order of their paths) is cut into windows of T + 1 bytes.
The first T bytes of a window are an input, and the last T bytes are its labels. Windows do not overlap, and the rest of
the text after the last full window is left out. Test and validation examples are always the last windows of a text
(`Source.ordered`). A partition can combine several texts into one client; the last windows of each text are then held
out.

Names that begin with a dot, and ``__pycache__``, are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxpfl.data.sources.base import Source, warn_of_empty
from jaxpfl.support.errors import JaxpflError, shown
from jaxpfl.support.files import check_fits, contents

WINDOW = 64
"""Default length T of windows."""

BYTES = 256
"""Number of tokens."""

_SKIPPED = "__pycache__"


def load_text(name: str, folder: Path, window: int | None = None) -> Source:
    """Load the text files in a folder.

    Args:
      name: name of the data set.
      folder: folder of files, subfolders or both.
      window: length T of windows; by default, `WINDOW`.

    Raises:
      JaxpflError: if the folder is missing or has no text; if a text is shorter than a window; or if bytes are not
        UTF-8.
    """
    window = WINDOW if window is None else window
    if window < 1:
        raise JaxpflError(f"window must be >= 1, got {window}")
    if not folder.is_dir():
        found = "a file" if folder.exists() else "no such folder"
        raise JaxpflError(f"text:FOLDER must be a folder with a file or subfolder per client, got {folder} ({found})")
    clients = {entry.name: list(_files(entry)) for entry in _entries(folder)}
    if not clients:
        raise JaxpflError(f"{folder} contains no file or subfolder, so there are no clients")
    size = sum(file.stat().st_size for files in clients.values() for file in files)
    check_fits(folder, 10 * size)  # memory for the text, and for its tokens twice as int32
    texts = {client: b"".join(map(_read, files)) for client, files in clients.items()}
    warn_of_empty(folder, [client for client, text in texts.items() if not text])
    texts = {client: text for client, text in texts.items() if text}
    if not texts:
        raise JaxpflError(f"{folder} contains no text")
    windows = [_windows(folder / client, text, window) for client, text in texts.items()]
    whole = np.concatenate(windows).astype(np.int32)
    x, y = np.ascontiguousarray(whole[:, :-1]), np.ascontiguousarray(whole[:, 1:])
    users = np.repeat(np.arange(len(windows), dtype=np.int32), [len(own) for own in windows])
    description = f"the next byte of {len(texts)} clients' texts in {folder}, windows of {window}"
    source = Source(name, x, y, None, None, BYTES, description, users, user_names=np.array(list(texts)))
    return source._replace(inputs="tokens", task="next-token", ordered=True)


def _entries(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith(".") and entry.name != _SKIPPED)


def _files(entry: Path) -> Iterator[Path]:
    """Yield the files of a client, in the order of their paths."""
    if not entry.is_dir():
        yield entry
        return
    for inner in _entries(entry):
        if not inner.is_symlink() or not inner.is_dir():  # a link to a folder may form a cycle
            yield from _files(inner)


def _windows(client: Path, text: bytes, window: int) -> np.ndarray:
    """Cut a client's text into windows of bytes, [n, window + 1]."""
    if len(text) <= window:
        raise JaxpflError(
            f"{client} has {len(text)} bytes, but a window of {window} requires {window + 1}: use a shorter window, or "
            "remove this text from the folder"
        )
    length = window + 1
    return np.frombuffer(text, np.uint8)[: len(text) // length * length].reshape(-1, length)


def _read(file: Path) -> bytes:
    content = contents(file)
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        found = shown(content[error.start : error.start + 4])
        raise JaxpflError(f"{file}: byte {error.start} is not UTF-8, {found}: save the file as UTF-8") from None
    return content
