"""``jaxpfl estimate histogram``: the study of users' histograms, its table, plots and export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from jaxpfl.cli.flags import UNSAID
from jaxpfl.cli.output import TO, Output, claim_file, write
from jaxpfl.cli.places import NEW_FILE
from jaxpfl.errors import JaxpflError
from jaxpfl.experiment import compile_cache
from jaxpfl.studies.histograms.settings import HistogramSettings

_HISTOGRAM = HistogramSettings()


def histogram(
    settings: Annotated[HistogramSettings, arg(name="")] = _HISTOGRAM,
    to: Annotated[Output, arg(name="")] = TO,
    export: Annotated[Path | None, UNSAID, NEW_FILE] = None,
    export_epsilon: Annotated[float | None, UNSAID] = None,
) -> None:
    """Users' histograms over a vocabulary: alone, averaged, clustered, fine-tuned, without and with privacy.

    Args:
        export: Write every user's personalised histogram to this .npz file.
        export_epsilon: Of the exported centers; without privacy unless given.
    """
    from jaxpfl.data.sources.npz import npz_keys
    from jaxpfl.studies.histograms import report as histogram_report
    from jaxpfl.studies.histograms import study

    compile_cache.enable()
    if export_epsilon is not None and export_epsilon not in settings.epsilon:
        known = ", ".join(f"{e:g}" for e in settings.epsilon)
        raise JaxpflError(f"export_epsilon must be one of --epsilon {known}, got {export_epsilon:g}")
    if export is not None and not export.parent.is_dir():
        raise JaxpflError(f"export: no folder {export.parent}")
    claim_file(export, "--export", "jaxpfl estimate histogram", lambda path: npz_keys(path) == list(study.EXPORTED))
    made = study.run(settings)
    if not to.json:
        from jaxpfl.console import Console

        histogram_report.print_table(Console(), made.result)
    if export is not None:
        study.export(made, export, export_epsilon)
    write(made.result, to, lambda folder: histogram_report.write_plots(folder, made))
