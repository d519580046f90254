"""Report of a study's results: its numbers, and the pictures in its folder."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from jaxpfl.runs.reports import sheets
from jaxpfl.runs.reports.folders import SUMMARY, Folder
from jaxpfl.runs.reports.page import Section, code, facts, folded, picture
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError

_ABOUT = ("study", "settings", "plots", "files", "command")


def sections(folder: Folder) -> list[Section]:
    """Sections of the report.

    Raises:
      JaxpflError: for damaged files.
    """
    path = folder.path / SUMMARY
    summary = files.read_json(path)
    plots = summary.get("plots", [])
    if not isinstance(plots, list) or not all(isinstance(one, str) for one in plots):
        raise JaxpflError(f"{path} is damaged: plots must be names of files in the folder")
    settings = summary.get("settings")
    settings = settings if isinstance(settings, Mapping) else {}
    return [
        Section("Results", [sheets.of_json(name, one) for name, one in summary.items() if name not in _ABOUT]),
        Section("Pictures", [picture(files.inside(folder.path, one), one) for one in plots]),
        Section(
            "Settings, and how to run it again",
            [
                *_again(summary.get("command")),
                facts({str(name).replace("_", " "): "-" if v is None else v for name, v in settings.items()}),
                folded("All results", code(files.contents(path).decode())),
            ],
        ),
    ]


def _again(command: Any) -> list[str]:
    """The command that gives the same results; nothing for results of earlier versions, which do not hold it."""
    if not command or not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        return []
    return [code(f"{shlex.join(command)} --output NEW_FOLDER")]
