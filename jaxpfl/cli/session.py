"""Flags that every command with a folder of runs takes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from jaxpfl.support.console import Console
from jaxpfl.support.errors import JaxpflError
from jaxpfl.support.output_paths import NEW_FOLDER

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


@dataclass(frozen=True)
class Session(Written):
    """Destination of a run's results, and use of an earlier run."""

    output: Annotated[Path | None, NEW_FOLDER] = None
    """Run folder; runs/COMMAND-DATA-HASH unless given."""
    resume: bool = False
    """Continue an earlier run of the same config from its last checkpoint."""
    config: Path | None = None
    """TOML or YAML file of flags and methods (methods = ["local", "adaped"]), or a run folder's config.json; what is
    given on the command line wins."""
    json: bool = False
    """Print the summary as one JSON object, the only thing on standard output."""
    strict: bool = False
    """Refuse what is otherwise warned about."""
    profile: bool = False
    """Show where the time went, and write it and a trace of a few rounds to RUN/profile."""
    tensorboard: bool = False
    """Write TensorBoard's event files to RUN/tensorboard too: means over the seeds, by method and round."""
    mlflow: Annotated[str | None, arg(metavar="URI")] = None
    """Tell MLflow of every method too: the address of its server, or a folder (pip install 'jaxpfl[mlflow]')."""
    wandb: Annotated[str | None, arg(metavar="PROJECT")] = None
    """Tell this project of Weights & Biases of every method too (pip install 'jaxpfl[wandb]')."""
    explain_plan: bool = False
    """Show how the run would execute, what memory it would take and why; nothing is trained or written."""
    distributed: Annotated[str | None, arg(metavar="HOST:PORT")] = None
    """Share the run with other processes: host and a free port of process 0, the same in each; auto finds all three
    under Slurm, Open MPI, Kubernetes and on Cloud TPUs. Process 0 prints and writes."""
    processes: int | None = None
    """Number of processes of a distributed run."""
    process: int | None = None
    """This process's number in a distributed run, from 0."""
    distributed_token: Annotated[Path | None, arg(metavar="FILE")] = None
    """File with a secret that all processes of a distributed run share, readable by you alone; or the variable
    JAXPFL_DISTRIBUTED_TOKEN holds it. Needed unless the address is localhost."""
