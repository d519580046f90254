"""A reader under test, the damage done to what it reads, and what holds of every value that it accepts."""

from __future__ import annotations

import fnmatch
import io
import json
import random
import shutil
import signal
import traceback
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mutate import archive, damaged, damaged_text, npy, odd_array, odd_tree

from jaxpfl.data import Source
from jaxpfl.support.errors import JaxpflError

SLOWEST = 10.0
"""Seconds of CPU for one input of some kilobytes; a hang is a failure."""

MOST = 2000
"""Characters of a message."""


class Slow(BaseException):
    """The alarm: not an Exception, which a reader may catch."""


class Target(NamedTuple):
    """A reader under test.

    Attributes:
      damage: ``rng, folder -> None`` writes a damaged file; the folder is kept between cases.
      read: ``folder -> anything``; may assert what holds of every value that is accepted.
      begin: makes the folder, once.
      share: of the cases that are asked for; less than one for a reader that takes milliseconds.
      slowest: seconds of CPU that an input may take; more for a reader that compiles programs.
    """

    damage: Callable[[random.Random, Path], None]
    read: Callable[[Path], Any]
    begin: Callable[[Path], None] = lambda folder: None
    share: float = 1.0
    slowest: float = SLOWEST


def outcome(read: Callable[[], Any], slowest: float = SLOWEST) -> tuple[str, str | None]:
    """Outcome of reading: ``read``, ``refused`` or another error's name; and the failure in words, if it is one.

    Args:
      read: reads one input.
      slowest: seconds of CPU that it may take.
    """

    def alarm(number: int, frame: Any) -> None:
        raise Slow

    before = signal.signal(signal.SIGPROF, alarm)
    signal.setitimer(signal.ITIMER_PROF, slowest)
    try:
        read()
    except JaxpflError as error:
        text = str(error)
        is_line = text.strip() and len(text.splitlines()) == 1 and len(text) <= MOST
        return "refused", None if is_line else f"no line of text: {text[:200]!r}"
    except (Exception, Slow) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return type(error).__name__, f"{type(error).__name__} at {where}: {str(error)[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return "read", None


def of_file(
    make: Callable[[random.Random], bytes],
    read: Callable[[Path], Any],
    name: str,
    *,
    text: bool = False,
    begin: Callable[[Path], None] = lambda folder: None,
    share: float = 1.0,
    slowest: float = SLOWEST,
) -> Target:
    """A reader of one file.

    Args:
      make: ``rng -> content`` of a file that may be odd in what it says, or good.
      read: ``path -> anything``.
      name: the file's, below the case's folder.
      text: whether bytes are damaged as text is.
      begin: makes the files beside it.
      share, slowest: see `Target`.
    """

    def damage(rng: random.Random, folder: Path) -> None:
        content = make(rng)
        if rng.random() < 0.7:
            content = damaged_text(rng, content) if text and rng.random() < 0.7 else damaged(rng, content)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)

    return Target(damage, lambda folder: read(folder / name), begin, share, slowest)


def of_folder(
    begin: Callable[[Path], None],
    read: Callable[[Path], Any],
    patterns: Sequence[str],
    *,
    seal: Callable[[Path], None] = lambda folder: None,
    share: float = 1.0,
) -> Target:
    """A reader of a folder of which one file is damaged, and whole again for the next case.

    Args:
      begin: makes the good folder.
      read: see `Target`.
      patterns: of the files that are damaged, below the folder.
      seal: writes the folder's checksums anew, so that half of the damage gets past them.
      share: see `Target`.
    """
    good: dict[str, bytes] = {}

    def made(folder: Path) -> None:
        begin(folder)
        good.update({str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()})
        assert good

    def damage(rng: random.Random, folder: Path) -> None:
        for name, content in good.items():
            if not (folder / name).is_file() or (folder / name).read_bytes() != content:
                (folder / name).write_bytes(content)
        names = sorted({name for pattern in patterns for name in good if fnmatch.fnmatch(name, pattern)})
        name = rng.choice(names)
        if rng.random() < 0.02:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(damaged_file(rng, name, good[name]))
        if rng.random() < 0.5:
            seal(folder)

    return Target(damage, read, made, share)


def copied(good: Path) -> Callable[[Path], None]:
    """A folder that begins as a copy of another."""
    return lambda folder: shutil.copytree(good, folder, dirs_exist_ok=True) and None


def damaged_file(rng: random.Random, name: str, content: bytes) -> bytes:
    """A file damaged as those of its kind are: in what it says, in its bytes, or in both."""
    if rng.random() < 0.6:
        if name.endswith(".json"):
            content = json.dumps(odd_tree(rng, json.loads(content))).encode()
        elif name.endswith(".jsonl"):
            content = _odd_lines(rng, content)
        elif name.endswith(".npz"):
            with np.load(io.BytesIO(content)) as arrays:
                content = archive(rng, dict(arrays))
        elif name.endswith(".npy"):
            content = npy(odd_array(rng, np.load(io.BytesIO(content))))
        if rng.random() < 0.8:
            return content
    is_text = name.endswith((".json", ".jsonl", "SHA256SUMS"))
    return damaged_text(rng, content) if is_text and rng.random() < 0.7 else damaged(rng, content)


def _odd_lines(rng: random.Random, content: bytes) -> bytes:
    """JSON lines of which one is odd, perhaps behind a checksum."""
    lines = content.decode().splitlines()
    place = rng.randrange(len(lines))
    before, _, _ = lines[place].partition("{")
    tree = json.loads(lines[place].removeprefix(before))
    text = json.dumps(odd_tree(rng, tree))
    if before:
        before = f"{zlib.crc32(text.encode()):08x} "
    lines[place] = before + text
    return ("\n".join(lines) + "\n").encode()


def whole(source: Source) -> Source:
    """Assert what every reader of data promises of the data set that it returns."""
    for x, y, users in (
        (source.x_train, source.y_train, source.users_train),
        (source.x_test, source.y_test, source.users_test),
    ):
        if y is None:
            assert x is None
            continue
        leaves = [x] if hasattr(x, "shape") else list(x.values())
        assert all(len(leaf) == len(y) for leaf in leaves)
        assert all(np.isfinite(leaf).all() for leaf in leaves if leaf.dtype.kind == "f")
        if source.task == "classification":
            assert y.dtype.kind in "iu"
            assert len(y) == 0 or (y.min() >= 0 and y.max() < source.num_classes)
        else:
            assert np.isfinite(y).all()
        if users is not None:
            assert len(users) == len(y)
            assert source.user_names is None or users.max(initial=-1) < len(source.user_names)
    return source
