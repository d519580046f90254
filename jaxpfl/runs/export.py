"""Output of a stored run: its models as files that need no jaxpfl to be read (see `model_files`), and parameters from
which another run starts (``--warm-start``).

A server may hold control variates or optimizer state beside its model, and a client two models that it mixes. Which
parameters it predicts with is known to the prediction alone, so it is run once on a task whose model records the
parameters that it is called with.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import __version__
from jaxpfl.core.types import Array, Key, PyTree
from jaxpfl.data.sources.npz import read_npz
from jaxpfl.engine.model_files import CLIENT_IDS, FORMAT, MANIFEST, load_models, no_client, write_npz
from jaxpfl.models import Task
from jaxpfl.models.base import leaves_by_path
from jaxpfl.runs import data_sets
from jaxpfl.runs.setup import Experiment, Origin
from jaxpfl.runs.stored_run import StoredRun, last_state, open_run
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError, expecting, writing
from jaxpfl.support.output_paths import partial


class Stack(NamedTuple):
    """The models of a group of clients.

    Attributes:
      client_ids: [m].
      parameters: leaves [m, ...].
      of_model: true for parameters of the run's own model; false if a client predicts with another model or several,
        and ``parameters`` is the method's personalised model as it is.
    """

    client_ids: np.ndarray
    parameters: PyTree
    of_model: bool


class LastModels:
    """Models of a method of a finished run, restored for one seed."""

    def __init__(self, run: StoredRun, experiment: Experiment, method: str, seed: int):
        self._witness = Witness(experiment.task)
        watched = experiment._replace(task=self._witness.task)
        self._client_ids = np.asarray(experiment.federation.client_ids)
        self._simulation, self._state = last_state(run, watched, method, seed)
        self._hp = jax.tree.map(lambda a: a.reshape(-1)[0], self._simulation.hp)

    @property
    def round(self) -> int:
        """Number of finished rounds."""
        return int(self._state.round[0])

    def global_model(self) -> PyTree | None:
        """Parameters of the global model; None if the method has none, or one that consists of several."""
        predict = self._simulation.algorithm.server.predict_global
        if predict is None:
            return None
        return self._witness.parameters(predict, self._hp, jax.tree.map(lambda a: a[0], self._state.server))

    def personal_models(self) -> list[Stack]:
        """Clients' models after adaptation, one stack per group of clients."""
        algorithm = self._simulation.algorithm
        models = self._simulation.personal_models(self._state)
        count = len(algorithm.clients)
        if count == 1:
            return [self._stack(0, models, self._client_ids)]
        numbers = algorithm.group_of(self._client_ids, count)
        return [self._stack(i, group, self._client_ids[numbers == i]) for i, group in enumerate(models)]

    def _stack(self, group: int, models: PyTree, client_ids: np.ndarray) -> Stack:
        predict = self._simulation.algorithm.clients[group].predict
        models = jax.tree.map(lambda a: np.asarray(a)[0, : len(client_ids)], models)
        of_model, unchanged = True, True

        def parameters(personal: PyTree) -> PyTree:
            nonlocal of_model, unchanged
            found = self._witness.parameters(predict, self._hp, personal)
            of_model = found is not None
            unchanged = found is None or found is personal
            return personal if unchanged else found

        each = jax.vmap(parameters)
        jax.eval_shape(each, models)
        # Compiled, so that the prediction itself is not computed. Most methods' models need no copy.
        return Stack(client_ids, models if unchanged else jax.jit(each)(models), of_model)


class Witness:
    """Wrapper of a task that records the parameters with which an algorithm's prediction calls the model."""

    def __init__(self, task: Task):
        self._calls: list[tuple[PyTree, Array]] = []
        self._apply = task.model.apply
        self.task = task._replace(model=task.model._replace(apply=self._watched))

    def _watched(self, params: PyTree, x: Array, key: Key | None = None, train: bool = False) -> Array:
        logits = self._apply(params, x, key=key, train=train)
        self._calls.append((params, logits))
        return logits

    def parameters(self, predict: Callable[..., Array], *args: Any) -> PyTree | None:
        """Parameters with which ``predict(*args, x)`` is the model's own output; None if it is something else.

        A mixture of several models' outputs is an example.
        """
        self._calls.clear()
        logits = predict(*args, jnp.zeros((1, *self.task.input_shape), self.task.input_dtype))
        found = [params for params, output in self._calls if output is logits]
        self._calls.clear()
        return found[0] if found else None


class Selection(NamedTuple):
    """Selection of the models to export from a run.

    Attributes:
      method: one method; None for all.
      clients: ids of clients; None for all.
      seed: one of the run's seeds; None for the first.
      only_global: leave the personalised models out.
      per_client: write a file per client instead of one with all.
    """

    method: str | None = None
    clients: tuple[int, ...] | None = None
    seed: int | None = None
    only_global: bool = False
    per_client: bool = False


EVERYTHING = Selection()


def export(
    run: Path,
    output: Path | None = None,
    wanted: Selection = EVERYTHING,
    *,
    data_dir: str | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Export the personalised models (after adaptation) and the global models of a finished run.

    The models of all clients, for one method and one seed, are in memory at once beside the method's state; they are
    written array by array. The folder is written atomically: a kill leaves a hidden one, which the next export to the
    same place removes.

    Args:
      run: the run folder.
      output: the folder to create; RUN/models by default.
      wanted: selection of models.
      data_dir: present folder of the data, if moved since the run.

    Returns:
      The folder, and its manifest.

    Raises:
      JaxpflError: for clients together with ``only_global``, or an empty list of them; for a folder without a run, or
        without this method, client or seed; an unfinished method; other data than the run's; and an output that exists
        or cannot be written.
    """
    if wanted.only_global and (wanted.clients is not None or wanted.per_client):
        raise JaxpflError("--global exports no clients' models: leave out --clients and --per-client, or --global")
    if wanted.clients is not None and not wanted.clients:
        raise JaxpflError("clients must name at least one id, got none")
    stored = open_run(run)
    methods = [stored.finished(name) for name in ([wanted.method] if wanted.method else stored.methods)]
    seed = stored.seeds[0] if wanted.seed is None else wanted.seed
    if seed not in stored.seeds:
        raise JaxpflError(f"unknown seed {seed} (known: {stored.seeds[0]} to {stored.seeds[-1]})")
    output = run / "models" if output is None else output
    if output.exists():
        raise JaxpflError(f"{output} exists: choose another --output")
    experiment = stored.experiment(data_dir)
    known = np.asarray(experiment.federation.client_ids)
    for client_id in wanted.clients or ():
        if client_id not in known:
            raise no_client(client_id, known)

    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)  # before `partial`, which looks whether it stays the same
    with writing(output), partial(output) as place:
        place.mkdir()
        entries = {}
        for name in methods:
            models = LastModels(stored, experiment, name, seed)
            entries[name] = _write_method(place, name, models, wanted)
        manifest = files.jsonable(_manifest(stored, experiment, seed, entries))
        files.write_json(place / MANIFEST, manifest)
        files.write_checksums(place)
    return output, manifest


def _write_method(folder: Path, name: str, models: LastModels, wanted: Selection) -> dict[str, Any]:
    """Write one method's models, and return its entry in the manifest."""
    entry: dict[str, Any] = {"round": models.round, "groups": [], "global": None}
    parameters = models.global_model()
    if parameters is not None:
        arrays = leaves_by_path(parameters)
        write_npz(folder / name / "global.npz", arrays)
        entry["global"] = {"file": f"{name}/global.npz", "parameters": _shapes(arrays)}
    if wanted.only_global:
        return entry
    stacks = models.personal_models()
    for number, stack in enumerate(stacks):
        if wanted.clients is not None:
            rows = np.flatnonzero(np.isin(stack.client_ids, wanted.clients))
            if not len(rows):
                continue
            parameters = jax.tree.map(lambda a, rows=rows: a[rows], stack.parameters)
            stack = stack._replace(client_ids=stack.client_ids[rows], parameters=parameters)
        file = f"{name}/personal{f'-{number}' if len(stacks) > 1 else ''}.npz"
        if wanted.per_client:
            file = f"{name}/clients/{{client}}.npz"
        _write_stack(folder / file, stack)
        described = _shapes(leaves_by_path(stack.parameters), of_one=True)
        about = {"file": file, "parameters": described, "of_model": stack.of_model, CLIENT_IDS: stack.client_ids}
        entry["groups"].append(about)
    return entry


def _write_stack(path: Path, stack: Stack) -> None:
    """Write the models of a group of clients into one archive, or one per client if the path contains ``{client}``."""
    arrays = leaves_by_path(stack.parameters)
    if "{client}" not in path.name:
        write_npz(path, {CLIENT_IDS: stack.client_ids} | arrays)
        return
    hosted = {key: np.asarray(array) for key, array in arrays.items()}
    for row, client_id in enumerate(stack.client_ids):
        write_npz(path.with_name(f"{client_id}.npz"), {key: array[row] for key, array in hosted.items()})


def _shapes(arrays: dict[str, Any], *, of_one: bool = False) -> dict[str, Any]:
    """Shapes and types by path; with ``of_one``, for one client, without the leading axis."""
    return {path: {"shape": a.shape[1:] if of_one else a.shape, "dtype": str(a.dtype)} for path, a in arrays.items()}


def _scaling(experiment: Experiment) -> list[dict[str, Any]] | None:
    """Scaling of the run's features, which the models' inputs need too; None without scaling."""
    if experiment.scaling is None:
        return None
    mean, deviation = map(leaves_by_path, experiment.scaling)
    return [{"input": path, "mean": mean[path].tolist(), "deviation": deviation[path].tolist()} for path in mean]


def _manifest(run: StoredRun, experiment: Experiment, seed: int, entries: dict[str, Any]) -> dict[str, Any]:
    task, config = experiment.task, experiment.config
    stored = data_sets.opened(config)
    data_set = data_sets.source_of(config) if stored is None else stored.source
    return {
        "format": FORMAT,
        "methods": entries,
        "model": config.model,
        "classes": task.num_classes,
        "class_names": None if data_set.class_names is None else data_set.class_names.tolist(),
        "input_shape": list(task.input_shape),
        "input_dtype": str(experiment.federation.train.examples.x.dtype),
        "features": _scaling(experiment),
        "pixels": [{"mean": float(mean), "deviation": float(deviation)} for mean, deviation in data_set.scales or []]
        or None,
        "seed": seed,
        "config": run.record["config"],
        "data": run.record["data"],
        "versions": {"jaxpfl": __version__, "jax": jax.__version__, "run": run.record.get("versions")},
    }


def parameters_origin(where: str) -> Origin | None:
    """Origin of the parameters in a run folder or among exported models; None for a file of parameters."""
    path, _ = _place(where)
    for name in (MANIFEST, "config.json"):
        if (path / name).is_file():
            record = files.read_json(path / name)
            with expecting(path / name, "a run's config"):
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


def read_parameters(where: str) -> dict[str, np.ndarray]:
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
            raise JaxpflError(f"{path} holds several clients' models: export them with --per-client")
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
    return {key: np.asarray(array) for key, array in leaves_by_path(parameters).items()}
