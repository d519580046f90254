"""The histogram study as registered: its settings, the export of users' histograms, table and plots."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from jaxpfl.data.sources.npz import npz_keys
from jaxpfl.data.sources.token_counts import TokenCounts
from jaxpfl.studies.histograms import report, study
from jaxpfl.studies.histograms.data import read
from jaxpfl.studies.histograms.settings import HistogramSettings
from jaxpfl.studies.study import Options, Read, Results, Study
from jaxpfl.support.errors import JaxpflError
from jaxpfl.support.places import NEW_FILE, claim_file


@dataclass(frozen=True)
class HistogramOptions(Options):
    """Export of every user's estimate to an archive."""

    export: Annotated[Path | None, NEW_FILE] = None
    """Write every user's personalised histogram to this .npz file."""
    export_epsilon: float | None = None
    """Epsilon of the exported centers; without privacy unless given."""

    def check(self, given: HistogramSettings) -> None:
        """Check that the study has these centers, and that the file can be written.

        Raises:
          JaxpflError: the name, its value, and what is allowed.
        """
        if self.export_epsilon is not None and self.export_epsilon not in given.epsilon:
            known = ", ".join(f"{e:g}" for e in given.epsilon)
            raise JaxpflError(f"export_epsilon must be one of --epsilon {known}, got {self.export_epsilon:g}")
        if self.export is not None and not self.export.parent.is_dir():
            raise JaxpflError(f"export: no folder {self.export.parent}")
        claim_file(self.export, "--export", "jaxpfl estimate histogram", lambda p: npz_keys(p) == list(study.EXPORTED))


def _results(given: HistogramSettings, options: HistogramOptions, counts: TokenCounts | None) -> Results:
    options.check(given)
    made = study.run(given, counts)
    if options.export is not None:
        study.export(made, options.export, options.export_epsilon)
    return Results(
        json=made.result,
        tables=lambda: report.tables(made.result),
        plots=lambda folder: report.write_plots(folder, made),
        series=made.series,
    )


def _read(given: HistogramSettings) -> Read:
    given.check()
    found = read(given)
    return Read(found, None if found is None else (found.indptr, found.indices, found.counts))


STUDY = Study(HistogramSettings, _results, HistogramOptions, reads=_read)
