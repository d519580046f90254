"""Trackers of a run: TensorBoard, MLflow, and Weights & Biases receive the records written to ``metrics.jsonl``."""

from __future__ import annotations

import math
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from jaxpfl.runs.config import flat
from jaxpfl.runs.stored_run import read_record
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError, missing_extra, warn, writing


class Tracker(Protocol):
    """Object that receives a run's records, for one method at a time, in the process that writes the run folder."""

    def begin(self, method: str, done: int) -> None:
        """Start a method, or continue it after ``done`` rounds.

        When a method continues, it repeats the rounds after ``done``. Records that an earlier process sent for these
        rounds are invalid.
        """
        ...

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record, as described in `jaxpfl.support.files.Records`."""
        ...

    def end(self, complete: bool) -> None:
        """Write all records of the method; ``complete`` is True if no error or signal ended the method early."""
        ...


@contextmanager
def end_trackers(trackers: Sequence[Tracker]) -> Iterator[None]:
    """Context manager that calls `Tracker.end` of every tracker when the block ends, also after an error."""
    complete = False
    try:
        yield
        complete = True
    finally:
        for tracker in trackers:
            tracker.end(complete)


class TensorBoard:
    """Tracker that writes TensorBoard's event files, with the means over the seeds after each round.

    ``tensorboard --logdir RUN/tensorboard`` shows these means.

    Args:
      folder: run folder; event files are written to ``folder/tensorboard/METHOD``.

    Raises:
      JaxpflError: if the package tensorboardX is not installed.
    """

    def __init__(self, folder: Path):
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise missing_extra("--tensorboard", "tensorboardX", "tensorboard") from None
        self._open, self._folder = SummaryWriter, folder / "tensorboard"
        self._writer: Any = None

    def begin(self, method: str, done: int) -> None:
        place = self._folder / method
        with writing(place):
            place.mkdir(parents=True, exist_ok=True)
            # If a run continues from a checkpoint, purge_step makes readers drop the records of later rounds. Without
            # the suffix, the file would overwrite a file begun in the same second.
            purge = done + 1 if done else None
            self._writer = self._open(str(place), purge_step=purge, filename_suffix=f".{done:09}")

    def add(self, record: Mapping[str, Any]) -> None:
        for name, value in means(record).items():
            self._writer.add_scalar(f"{record['kind']}/{name}", value, global_step=record["round"])

    def end(self, complete: bool) -> None:
        del complete
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def means(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean over the seeds of every metric in a record.

    Values that are not finite are ignored, and a metric without any finite value is left out.
    """
    found = {}
    for name, values in record.items():
        if isinstance(values, str) or name == "round":
            continue
        every = values if isinstance(values, Sequence) or hasattr(values, "__len__") else [values]
        own = [float(value) for value in every if value is not None and math.isfinite(value)]
        if own:
            found[name] = math.fsum(own) / len(own)
    return found


_MOST_PARAMETERS, _MOST_METRICS = 100, 500  # per request; MLflow accepts 100 parameters and 1000 metrics
_DATABASES = ("sqlite:", "postgresql:", "mysql:", "mssql:")


class _Service(Tracker):
    """Tracker that sends records to an external service.

    An error of the service causes a warning and does not end the run, because ``metrics.jsonl`` has all records. MLflow
    and Weights & Biases cannot delete records, so every start of a method creates a new run in the service. If a method
    continues from a checkpoint, the records of the earlier rounds are sent again first.
    """

    _flag: str

    def __init__(self, folder: Path):
        self._records, self._config = folder / "metrics.jsonl", folder / "config.json"
        self._group = folder.absolute().name
        self._silent = True  # nothing is sent between methods or after an error

    def begin(self, method: str, done: int) -> None:
        self._silent = False
        record = read_record(self._config)
        settings = flat(record["config"]) | flat(record["hyper"].get(method, {}), f"{method}.")
        self._try(lambda: self._start(method, {name: value for name, value in settings.items() if value is not None}))
        for record in files.Records(self._records).read() if done else ():
            if record["method"] == method:
                self.add(record)

    def add(self, record: Mapping[str, Any]) -> None:
        told = {f"{record['kind']}/{name}": value for name, value in means(record).items()}
        self._try(lambda: self._tell(told, record["round"]))

    def end(self, complete: bool) -> None:
        self._try(lambda: self._finish(complete))
        self._silent = True

    def _try(self, do: Callable[[], None]) -> None:
        if self._silent:
            return
        try:
            do()
        except Exception as error:  # errors of the network or the service may have any type
            self._silent = True
            warn(
                f"{self._flag}: {_line(error)}; no more records of this method are sent, but all are written to "
                f"{self._records}"
            )

    @abstractmethod
    def _start(self, method: str, settings: dict[str, Any]) -> None:
        """Create a run in the service for a method."""

    @abstractmethod
    def _tell(self, metrics: dict[str, float], round: int) -> None:
        """Send the metrics of one round."""

    @abstractmethod
    def _finish(self, complete: bool) -> None:
        """End the run in the service; if it is incomplete, mark it as stopped."""


class MLflow(_Service):
    """Tracker that writes to an MLflow server or folder, with one MLflow run for each start of a method.

    The MLflow runs belong to the experiment $MLFLOW_EXPERIMENT_NAME, or ``jaxpfl`` if that variable is not set.

    Args:
      folder: run folder; the folder's name is stored as the tag ``run_folder``.
      uri: address of the server, or a folder (``mlruns``, ``file:///home/me/mlruns``).

    Raises:
      JaxpflError: if MLflow is not installed, or the server or folder cannot be used.
    """

    _flag = "--mlflow"

    def __init__(self, folder: Path, uri: str):
        super().__init__(folder)
        # MLflow discourages folders in favor of databases, but jaxpfl's extra installs no database package.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # the default, 7, takes four minutes
        try:
            from mlflow import MlflowClient
        except ImportError:
            raise missing_extra(self._flag, "mlflow-skinny or mlflow", "mlflow") from None
        if uri.startswith(_DATABASES) and find_spec("sqlalchemy") is None:
            raise JaxpflError(f"--mlflow {uri}: a database requires the full MLflow package: pip install mlflow")
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "jaxpfl"
        try:
            self._client = MlflowClient(uri)
            found = self._client.get_experiment_by_name(name)
            self._experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        except Exception as error:
            raise JaxpflError(f"--mlflow {uri}: {_line(error)}") from None
        self._run, self._waiting = "", list[Any]()

    def _start(self, method: str, settings: dict[str, Any]) -> None:
        from mlflow.entities import Param

        self._waiting = []
        tags = {"method": method, "run_folder": self._group}
        self._run = self._client.create_run(self._experiment, run_name=method, tags=tags).info.run_id
        params = [Param(name, str(value)) for name, value in settings.items()]
        for first in range(0, len(params), _MOST_PARAMETERS):
            self._client.log_batch(self._run, params=params[first : first + _MOST_PARAMETERS])

    def _tell(self, metrics: dict[str, float], round: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._waiting += [Metric(name, value, now, round) for name, value in metrics.items()]
        if len(self._waiting) >= _MOST_METRICS:
            self._send()

    def _send(self) -> None:
        for first in range(0, len(self._waiting), _MOST_METRICS):
            self._client.log_batch(self._run, metrics=self._waiting[first : first + _MOST_METRICS])
        self._waiting = []

    def _finish(self, complete: bool) -> None:
        self._send()
        self._client.set_terminated(self._run, "FINISHED" if complete else "KILLED")


class WandB(_Service):
    """Tracker that writes to a Weights & Biases project, with one W&B run for each start of a method.

    The W&B runs are in a group named after the run folder. With WANDB_MODE=offline, nothing is sent over the network.

    Args:
      folder: run folder.
      project: name of the project.

    Raises:
      JaxpflError: if the package ``wandb`` is not installed, or the user is not logged in.
    """

    _flag = "--wandb"

    def __init__(self, folder: Path, project: str):
        super().__init__(folder)
        try:
            wandb = import_module("wandb")
        except ImportError:
            raise missing_extra(self._flag, "wandb", "wandb") from None
        self._wandb, self._folder, self._project = wandb, folder, project
        self._run: Any = None
        try:
            if wandb.setup().settings.mode in ("online", "shared"):
                wandb.login()  # prompts for a key; done here so that the prompt comes before the first round
        except Exception as error:
            raise JaxpflError(f"--wandb {project}: {_line(error)}; WANDB_MODE=offline needs no network") from None

    def _start(self, method: str, settings: dict[str, Any]) -> None:
        self._run = self._wandb.init(
            project=self._project,
            group=self._group,
            name=method,
            config=settings,
            dir=str(self._folder),
            reinit="create_new",
            settings=self._wandb.Settings(silent=True),
        )

    def _tell(self, metrics: dict[str, float], round: int) -> None:
        self._run.log(metrics, step=round)  # W&B merges the records of the same round into one row

    def _finish(self, complete: bool) -> None:
        self._run.finish(exit_code=0 if complete else 1)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
