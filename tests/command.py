"""The command line run in this process, with its output and its exit status."""

import json
from typing import Any, NamedTuple

import pytest

from jaxpfl.cli import main

# A run of a second: a linear model, a few clients, a few rounds.
SMALL = [
    *("--model", "linear", "--clients", "6", "--cohort", "3", "--batch-size", "5", "--local-steps", "2"),
    *("--rounds", "4", "--eval-every", "2", "--checkpoint-every", "2", "--seeds", "2"),
]


class Result(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def timeless(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The methods' rows of a summary without their seconds."""
    return {
        name: {key: value for key, value in row.items() if not key.endswith("seconds")}
        for name, row in summary["methods"].items()
    }


def jaxpfl(capsys: pytest.CaptureFixture[str], *args: object) -> Result:
    """Calls ``jaxpfl ARGS``."""
    try:
        main([str(a) for a in args])
        status = 0
    except SystemExit as stop:
        status = int(stop.code or 0)
    captured = capsys.readouterr()
    return Result(status, captured.out, captured.err)
