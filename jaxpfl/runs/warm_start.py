"""``--warm-start``: given parameters as the initial ones of every model of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxpfl.support import files
from jaxpfl.data.sources.npz import read_npz
from jaxpfl.engine.model_files import CLIENT_IDS, MANIFEST, load_models
from jaxpfl.support.errors import JaxpflError, expecting
from jaxpfl.runs.parameters import LastModels
from jaxpfl.runs.privacy import Origin
from jaxpfl.runs.stored_run import open_run
from jaxpfl.models.base import by_path


def origin(where: str) -> Origin | None:
    """Origin of the parameters in a run folder or a folder of exported models; None for a file of parameters."""
    path, _ = _place(where)
    for name in (MANIFEST, "config.json"):
        if (path / name).is_file():
            record = files.read_json(path / name)
            with expecting(path / name, "that of a run"):
                asked = record["config"].get("privacy") or {}
                private = asked.get("epsilon") is not None or bool(asked.get("noise_multiplier"))
                return Origin(record["data"], private)
    return None


def _place(where: str) -> tuple[Path, str | None]:
    """Path, and the method named after it, if any."""
    path = Path(where)
    if path.exists() or ":" not in where:
        return path, None
    before, _, method = where.rpartition(":")
    return Path(before), method


def read(where: str) -> dict[str, np.ndarray]:
    """Read parameters, by path.

    Args:
      where: a run folder or a folder of exported models, for the global model of its method (``PATH:METHOD`` names one
        of several; of a run, its first seed); or an .npz file with parameter paths as keys.

    Raises:
      JaxpflError: if there is nothing of this kind, or the method has no global model.
    """
    path, method = _place(where)
    if path.is_file():
        arrays = read_npz(path)
        if CLIENT_IDS in arrays:
            raise JaxpflError(
                f"{path} holds the models of several clients: jaxpfl export --per-client writes single ones"
            )
        return arrays
    if (path / MANIFEST).is_file():
        models = load_models(path, method)
        name, parameters = models.method, models.global_model
    elif (path / "config.json").is_file():
        run = open_run(path)
        name = run.finished(method)
        parameters = LastModels(run, run.experiment(), name, run.seeds[0]).global_model()
    else:
        raise JaxpflError(f"warm_start: {where} is neither a run folder, nor exported models, nor an .npz file")
    if parameters is None:
        raise JaxpflError(f"warm_start: {name} of {path} has no global model")
    return {key: np.asarray(array) for key, array in by_path(parameters).items()}
