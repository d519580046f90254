"""One page about one or several result folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxpfl import __version__
from jaxpfl.runs.reports import of_run, of_study, of_sweep
from jaxpfl.runs.reports.folders import DAMAGED, RUN, STUDY, Folder, look
from jaxpfl.runs.reports.page import Section, facts, page
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError, expecting


def write(folders: Sequence[Path], output: Path, *, data_dir: str | None = None) -> None:
    """Write a self-contained page about result folders, which needs no network.

    Args:
      folders: of runs, sweeps and studies.
      output: the HTML file.
      data_dir: present folder of the data sets, for pictures of the splits.

    Raises:
      JaxpflError: for a folder that holds no results or damaged ones, and a file that cannot be written.
    """
    looked = [look(folder) for folder in folders]
    for folder in looked:
        if folder.status == DAMAGED:
            raise JaxpflError(folder.done)
    sections: list[Section] = []
    for folder in looked:
        with expecting(folder.path, f"a {folder.kind} of this version"):
            sections += _sections(folder, data_dir, len(looked) > 1)
    title = _title(looked[0]) if len(looked) == 1 else f"{len(looked)} results"
    lead = [facts(_about(looked[0]))] if len(looked) == 1 else []
    text = page(title, lead, sections)
    with files.whole(output) as file:
        file.write(text)


def _sections(folder: Folder, data_dir: str | None, named: bool) -> list[Section]:
    found = (
        of_run.sections(folder, data_dir)
        if folder.kind == RUN
        else of_study.sections(folder)
        if folder.kind == STUDY
        else of_sweep.sections(folder)
    )
    if not named:
        return found
    first = Section(f"{_title(folder)}: {folder.path}", [facts(_about(folder))])
    return [first, *(one._replace(title=f"{folder.path.name}: {one.title}") for one in found)]


def _title(folder: Folder) -> str:
    names = ", ".join(folder.what)
    if folder.kind == STUDY:
        return f"Study {names}"
    of = f"{names} on {folder.data}" if folder.data else f"the study {names}"
    return of if folder.kind == RUN else f"Sweep of {of}"


def _about(folder: Folder) -> dict[str, object]:
    about: dict[str, object] = {
        "folder": folder.path,
        "kind": folder.kind,
        "status": folder.status,
        "progress": folder.done,
    }
    return {name: value for name, value in about.items() if str(value)} | {"report by": f"jaxpfl {__version__}"}
