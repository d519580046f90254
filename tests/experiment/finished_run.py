"""A small finished run in a folder, made once for the tests that only read it."""

from pathlib import Path

from jaxpfl.runs import export
from jaxpfl.runs.config import RunConfig, resolve
from jaxpfl.runs.control import Reporter
from jaxpfl.runs.run import open_folder, run_methods
from jaxpfl.runs.setup import prepare

SETTINGS = {
    "model": "linear",
    "clients": 7,
    "cohort": 3,
    "local_steps": 2,
    "batch_size": 5,
    "rounds": 3,
    "seeds": 2,
    "eval_every": 3,
}


def run(folder: Path, methods: tuple[str, ...], **changes) -> Path:
    """Run the methods into the folder."""
    config = resolve(RunConfig(**SETTINGS | changes))
    initial = None if config.warm_start is None else export.read_parameters(config.warm_start)
    experiment = prepare(config, methods, initial=initial)
    open_folder(folder, experiment, resume=False)
    run_methods(experiment, folder, Reporter())
    return folder
