"""``--warm-start``: the parameters from which every model of a run starts, in place of random ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxpfl.data.npz import read_npz
from jaxpfl.errors import JaxpflError
from jaxpfl.experiment.model_files import CLIENT_IDS, MANIFEST, load_models
from jaxpfl.experiment.parameters import LastModels
from jaxpfl.experiment.stored_run import open_run
from jaxpfl.models.given import by_path


def read(where: str) -> dict[str, np.ndarray]:
    """Reads parameters, by path.

    Args:
      where: a run folder or a folder of exported models, for the global model of its method (``PATH:METHOD`` names one
        of several; of a run, its first seed); or an .npz file with parameter paths as keys.

    Raises:
      JaxpflError: where nothing of this kind is there, and for a method without a global model.
    """
    path, method = Path(where), None
    if not path.exists() and ":" in where:
        before, _, method = where.rpartition(":")
        path = Path(before)
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
