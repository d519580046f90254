"""JSON objects read one member at a time, so that a file may be much larger than memory."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from jaxpfl.support.errors import shown
from jaxpfl.support.files import opened

_CHARACTERS = 2**18
"""Least number of characters read at once."""
_SPACE = re.compile(r"[ \t\n\r]*+")
_SCALAR = re.compile(r"[^\s,:\[\]{}\"]*+")
_MARKS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{}]', re.DOTALL)
"""Whole strings, and brackets outside of them; a quote alone begins a string whose end is not there."""


def open_text(file: Path) -> IO[str]:
    """Open a file in the encoding that JSON's first bytes tell, as `json.loads` does for bytes.

    Raises:
      OSError: as `opened`.
    """
    raw = opened(file)
    encoding = json.detect_encoding(raw.read(4))
    raw.seek(0)
    return io.TextIOWrapper(raw, encoding=encoding, errors="surrogatepass", newline="")


class Text:
    """JSON text of a file, of which only what is not yet taken is held."""

    def __init__(self, file: IO[str]):
        self._file = file
        self._text, self._at = "", 0

    def next(self) -> str:
        """The next character that is no white space, which stays; empty at the end."""
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_on():
                return ""

    def take(self, allowed: str) -> str:
        """Take one of some characters.

        Raises:
          ValueError: if another comes, or the end.
        """
        found = self.next()
        if not found or found not in allowed:
            raise ValueError(f"expected {' or '.join(allowed)}, got {shown(found) if found else 'the end'}")
        self._at += 1
        return found

    def value(self) -> str:
        """Take the text of the next value, which may still be no JSON.

        Raises:
          ValueError: if it has no end.
        """
        first = self.next()
        length = self._nested() if first and first in '{["' else self._scalar()
        text = self._text[self._at : self._at + length]
        self._at += length
        return text

    def members(self) -> Iterator[str]:
        """Names of the members of the object that comes; whoever iterates takes the value after each name.

        Raises:
          ValueError: for text that is no object, and for a name that stands there twice.
        """
        names: set[str] = set()
        self.take("{")
        if self.next() == "}":
            self.take("}")
            return
        while True:
            if self.next() != '"':
                self.take('"')  # which says what is there instead
            name = json.loads(self.value())
            if name in names:
                raise ValueError(f"{shown(name)} stands twice in one object")
            names.add(name)
            self.take(":")
            yield name
            if self.take(",}") == "}":
                return

    def _scalar(self) -> int:
        while True:
            found = _SCALAR.match(self._text, self._at)
            assert found is not None
            if found.end() < len(self._text) or not self._read_on():
                return found.end() - self._at

    def _nested(self) -> int:
        """Length of the list, object or string that comes."""
        depth, length = 0, 0
        while True:
            for found in _MARKS.finditer(self._text, self._at + length):
                mark = self._text[found.start()]
                if mark == '"' and found.end() == found.start() + 1:
                    length = found.start() - self._at
                    break
                depth += (mark in "{[") - (mark in "}]")
                length = found.end() - self._at
                if depth == 0:
                    return length
            else:
                length = len(self._text) - self._at
            if not self._read_on():
                raise ValueError("a value does not end")

    def _read_on(self) -> bool:
        """Read more, at least as much as is held; false at the end."""
        held = self._text[self._at :]
        more = self._file.read(max(_CHARACTERS, len(held)))
        if not more:
            return False
        self._text, self._at = held + more, 0
        return True
