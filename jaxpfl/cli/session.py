"""Flags that every command with a folder of runs takes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from jaxpfl.console import Console
from jaxpfl.errors import JaxpflError

QUIET = "--quiet"


@dataclass(frozen=True)
class Written:
    """Treatment of earlier results, and of what is said on the way."""

    force: bool = False
    """Replace the earlier results of the same command in --output; a folder with anything else in it is refused."""
    quiet: bool = False
    """Print the result and errors alone: no progress, no notes, no warnings (--strict makes errors of them)."""

    def check_force(self, output: Path | None, *, resume: bool) -> None:
        """Refuse ``--force`` where it does not say what it replaces.

        Raises:
          JaxpflError: without ``--output``, and with ``--resume``.
        """
        if self.force and resume:
            raise JaxpflError("--resume continues the earlier results and --force replaces them: give one")
        if self.force and output is None:
            raise JaxpflError("--force replaces the folder that --output names: give --output too")

    def notes(self, *, writes: bool = True) -> Console:
        """Standard error, for progress and notes; silent under ``--quiet`` and where another process ``writes``."""
        return Console(stderr=True, quiet=self.quiet or not writes)

    def note(self, text: str) -> None:
        """Say something on standard error, but under ``--quiet``."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)
