"""Export of a finished run's models, and the parameters that ``--warm-start`` reads from a run.

Exported files can be read without jaxpfl (see `model_files`).

A method's state may contain more than the parameters of its models, such as control variates, optimizer state, or two
models that a client mixes. Only the method's prediction function knows which of these it passes to the model as
parameters. The function is therefore called once with a model that records the parameters passed to it (`Witness`).
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
from jaxpfl.data import Preparation
from jaxpfl.data.sources.npz import read_npz
from jaxpfl.engine import model_files
from jaxpfl.engine.model_files import CLIENT_IDS, FORMAT, MANIFEST, load_models, no_client, write_npz
from jaxpfl.models import Task
from jaxpfl.models.base import CLASSIFICATION, NEXT_TOKEN, leaves_by_path
from jaxpfl.models.metrics import parse_loss
from jaxpfl.runs import results
from jaxpfl.runs.setup import Experiment, Origin
from jaxpfl.runs.stored_run import StoredRun, last_state, open_run
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError, expecting, writing
from jaxpfl.support.output_paths import partial


class Stack(NamedTuple):
    """Personalized models of a group of clients.

    Attributes:
      client_ids: ids of the m clients [m].
      parameters: pytree of the clients' parameters, with leaves [m, ...].
      of_model: True if ``parameters`` are parameters of the run's model. False if a client predicts with another model
        or with several models; ``parameters`` is then the method's state of the personalized model, unchanged.
      predict: function ``(arrays, x)`` that returns probabilities or expected labels (see `outcome`), given one
        client's parameters by path and inputs [n, ...].
    """

    client_ids: np.ndarray
    parameters: PyTree
    of_model: bool
    predict: Callable[..., Array]


class LastModels:
    """Models of one method after the last round of a finished run, restored for one seed."""

    def __init__(self, run: StoredRun, experiment: Experiment, method: str, seed: int):
        self.task = experiment.task
        self._outcome = outcome(experiment.task, experiment.runs[method].spec.loss)
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
        """Return the parameters of the global model; None if the method has none, or combines several models."""
        predict = self._simulation.algorithm.server.predict_global
        if predict is None:
            return None
        return self._witness.parameters(predict, self._hp, jax.tree.map(lambda a: a[0], self._state.server))

    def personal_models(self) -> list[Stack]:
        """Return the clients' personalized models after adaptation, one stack per group of clients."""
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
        # Under jit, the compiler removes the prediction, whose output is unused. Most methods' models stay unchanged.
        models = models if unchanged else jax.jit(each)(models)
        own = self.task.model.apply if of_model else (lambda personal, x: predict(self._hp, personal, x))
        return Stack(client_ids, models, of_model, self.by_path(own, models))

    def by_path(self, predict: Callable[..., Array], parameters: PyTree) -> Callable[..., Array]:
        """Return a function ``(arrays, x)`` that computes the `outcome` of ``predict``.

        ``arrays`` maps the paths of the leaves in ``parameters`` to arrays.
        """
        structure, paths = jax.tree.structure(parameters), list(leaves_by_path(parameters))
        return lambda arrays, x: self._outcome(predict(jax.tree.unflatten(structure, [arrays[p] for p in paths]), x))


def outcome(task: Task, loss: Any) -> Callable[[Array], Array]:
    """Return the function that converts a model's output to probabilities, or, in a regression, to expected labels.

    For tasks of other kinds, the function returns the output unchanged.
    """
    if task.kind in (CLASSIFICATION, NEXT_TOKEN):
        return jax.nn.softmax
    if task.kind in ("binary", "ranking"):
        return lambda output: jax.nn.sigmoid(output.reshape(-1, 1) * jnp.array([-1, 1]))
    if task.kind == "regression":
        mean, labels = parse_loss("squared" if loss is None else loss).mean, () if task.num_classes == 1 else (-1,)
        return lambda output: mean(output).reshape(output.shape[0], *labels)
    return jax.nn.sigmoid if task.kind == "multilabel" else lambda output: output


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
        """Return the parameters with which the model alone gives the output of ``predict(*args, x)``.

        Return None if there are no such parameters, for example because ``predict`` mixes several models' outputs.
        """
        self._calls.clear()
        logits = predict(*args, jnp.zeros((1, *self.task.input_shape), self.task.input_dtype))
        found = [params for params, output in self._calls if output is logits]
        self._calls.clear()
        return found[0] if found else None


class Selection(NamedTuple):
    """Selection of the models to export from a run.

    Attributes:
      method: name of the method to export; None for all methods.
      clients: ids of the clients to export; None for all clients.
      seed: seed to export; None for the run's first seed.
      only_global: whether to leave out the personalized models.
      private_only: whether to export only what the method's privacy claim covers: the global model and, if the claim is
        about examples, the personalized models. Scaling, names, settings and seeds are left out.
      per_client: whether to write one file per client instead of one file for all clients.
      stablehlo: whether to also write, for each model, a program that includes the parameters and needs no other file.
    """

    method: str | None = None
    clients: tuple[int, ...] | None = None
    seed: int | None = None
    only_global: bool = False
    private_only: bool = False
    per_client: bool = False
    stablehlo: bool = False


EVERYTHING = Selection()


def export(
    run: Path,
    output: Path | None = None,
    wanted: Selection = EVERYTHING,
    *,
    data_dir: str | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Export the personalized models (after adaptation) and the global models of a finished run.

    Methods are exported one after the other. For one method and one seed, the state and the models of all clients must
    fit into memory. The output folder is written atomically: if the process is killed, a hidden folder remains, which
    the next export to the same path removes.

    Args:
      run: run folder.
      output: folder to create; RUN/models by default.
      wanted: selection of the models to export.
      data_dir: current folder of the data, if it was moved since the run.

    Returns:
      The output folder, and its manifest.

    Raises:
      JaxpflError: if ``wanted`` has an empty list of clients, or options that exclude each other; if the folder is not
        a run, or the run lacks the method, client or seed; if a method is unfinished; if the data differ from the
        run's; if ``private_only`` is set but the number of private methods is not one; if ``stablehlo`` is set but
        features need float64; or if the output exists or cannot be written.
    """
    if wanted.only_global and (wanted.clients is not None or wanted.per_client):
        raise JaxpflError("--global exports only the global model: leave out --global, or --clients and --per-client")
    if wanted.clients is not None and not wanted.clients:
        raise JaxpflError("clients must name at least one id, got none")
    stored = open_run(run)
    methods = [stored.finished(name) for name in ([wanted.method] if wanted.method else stored.methods)]
    claim: dict[str, Any] = {}
    if wanted.private_only:
        methods, claim = _claimed(stored, methods, wanted)
        wanted = wanted._replace(only_global=wanted.only_global or claim["unit"] == "user")
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
        output.parent.mkdir(parents=True, exist_ok=True)  # `partial` needs the parent
    with writing(output), partial(output) as place:
        place.mkdir()
        entries: dict[str, Any] = {}
        manifest = _manifest(stored, experiment, seed, entries)
        if claim:
            manifest = {name: manifest[name] for name in _COVERED} | {"privacy": claim}
        if wanted.stablehlo and manifest["raw_dtype"] == "float64":
            raise JaxpflError(
                "a feature of this table needs float64, but --stablehlo reads float32 inputs: leave out --stablehlo"
            )
        for name in methods:
            models = LastModels(stored, experiment, name, seed)
            entries[name] = _write_method(place, name, models, wanted, manifest)
            if wanted.private_only and not (entries[name]["global"] or entries[name]["groups"]):
                raise JaxpflError(
                    f"--private-only exports what a privacy claim covers, here a global model, but {name} has none"
                )
        manifest = files.jsonable(manifest)
        files.write_json(place / MANIFEST, manifest)
        files.write_checksums(place)
    return output, manifest


_COVERED = ("format", "methods", "model", "task", "classes", "input_shape", "input_dtype", "versions")
"""Entries of the manifest that do not depend on examples or seeds."""


def _claimed(run: StoredRun, methods: list[str], wanted: Selection) -> tuple[list[str], dict[str, Any]]:
    """Return the method to export with ``--private-only``, and the method's privacy claim.

    Raises:
      JaxpflError: if no method or several methods have a privacy claim (the costs of several claims would add up); if
        early stopping chose the last round by scores to which no noise was added; or if ``wanted`` sets ``clients``,
        ``per_client`` or ``stablehlo``.
    """
    if wanted.clients is not None or wanted.per_client or wanted.stablehlo:
        raise JaxpflError("--private-only chooses the files itself: leave out --clients, --per-client and --stablehlo")
    found = {name: results.finished(run.folder, name) or {} for name in methods}
    claims = {name: claim for name, one in found.items() if (claim := one.get("privacy") or {}).get("epsilon")}
    if len(claims) != 1:
        some = f"{', '.join(claims)} have claims, whose epsilons add up: choose one with --method"
        none = f"{', '.join(methods)} of {run.folder} {'has' if len(methods) == 1 else 'have'} no privacy claim"
        raise JaxpflError(f"--private-only exports one private method: {some if claims else none}")
    ((name, claim),) = claims.items()
    if found[name].get("stopped_after"):
        raise JaxpflError(f"--private-only cannot export {name}, whose last round was chosen without noise (patience)")
    return [name], {key: claim[key] for key in ("unit", "relation", "epsilon", "delta", "says")}


def _write_method(folder: Path, name: str, models: LastModels, wanted: Selection, manifest: dict) -> dict[str, Any]:
    """Write the models of one method, and return its entry in the manifest."""
    entry: dict[str, Any] = {"round": models.round, "groups": [], "global": None}
    task = models.task
    x = jax.ShapeDtypeStruct(task.input_shape, jax.dtypes.canonicalize_dtype(task.input_dtype or float))

    def write_alone(client: object, predict: Callable[..., Array], arrays: dict[str, Any]) -> None:
        path = folder / name / "alone" / f"{client}.stablehlo"
        model_files.write_program(path, lambda inputs: predict(arrays, model_files.scaled(inputs, manifest)), x)

    parameters = models.global_model()
    if parameters is not None:
        arrays = leaves_by_path(parameters)
        write_npz(folder / name / "global.npz", arrays)
        predict, program = models.by_path(task.model.apply, parameters), f"{name}/global.stablehlo"
        model_files.write_program(folder / program, predict, arrays, x)
        entry["global"] = {"file": f"{name}/global.npz", "program": program, "parameters": _described(arrays)}
        if wanted.stablehlo:
            write_alone("global", predict, arrays)
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
        stem = f"{name}/personal{f'-{number}' if len(stacks) > 1 else ''}"
        file, program = f"{name}/clients/{{client}}.npz" if wanted.per_client else f"{stem}.npz", f"{stem}.stablehlo"
        _write_stack(folder / file, stack)
        arrays = leaves_by_path(stack.parameters)
        shapes = {path: jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for path, a in arrays.items()}
        model_files.write_program(folder / program, stack.predict, shapes, x)
        for row, client_id in enumerate(stack.client_ids if wanted.stablehlo else ()):
            own = {path: jnp.asarray(array[row]) for path, array in arrays.items()}
            write_alone(client_id, stack.predict, own)
        about = {"file": file, "program": program, "parameters": _described(shapes)}
        entry["groups"].append({**about, "of_model": stack.of_model, CLIENT_IDS: stack.client_ids})
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


def _described(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the shape and dtype of each array, by path."""
    return {path: {"shape": a.shape, "dtype": str(a.dtype)} for path, a in arrays.items()}


def _scaling(experiment: Experiment) -> list[dict[str, Any]] | None:
    """Return the scaling of the run's features, which also applies to the exported models' inputs; None if unscaled."""
    if experiment.scaling is None:
        return None
    mean, deviation = map(leaves_by_path, experiment.scaling)
    return [{"input": path, "mean": mean[path].tolist(), "deviation": deviation[path].tolist()} for path in mean]


def _manifest(run: StoredRun, experiment: Experiment, seed: int, entries: dict[str, Any]) -> dict[str, Any]:
    task, config, federation = experiment.task, experiment.config, experiment.federation
    ids, names = map(str, np.asarray(federation.client_ids).tolist()), federation.client_names
    prepared: Preparation = federation.preparation
    return {
        "format": FORMAT,
        "methods": entries,
        "model": config.model,
        "task": task.kind,
        "classes": task.num_classes,
        "class_names": None if prepared.class_names is None else prepared.class_names.tolist(),
        "client_names": names and dict(zip(ids, names, strict=True)),
        "columns": experiment.columns and experiment.columns.to_json(),
        "inputs": prepared.inputs,
        "raw_dtype": prepared.raw_dtype,
        "input_shape": list(task.input_shape),
        "input_dtype": str(experiment.federation.train.examples.x.dtype),
        "features": _scaling(experiment),
        "pixels": [{"mean": float(mean), "deviation": float(deviation)} for mean, deviation in prepared.scales or []]
        or None,
        "seed": seed,
        "config": run.record["config"],
        "data": run.record["data"],
        "versions": {"jaxpfl": __version__, "jax": jax.__version__, "run": run.record.get("versions")},
    }


def parameters_origin(where: str) -> Origin | None:
    """Return the `Origin` of the parameters in a run folder or a folder of exported models.

    The origin of the parameters in an .npz file, or in models that were exported with ``--private-only``, is unknown;
    the result is then None.
    """
    path, _ = _place(where)
    for name in (MANIFEST, "config.json"):
        if (path / name).is_file():
            record = files.read_json(path / name)
            if "privacy" in record:  # exported with --private-only, without the checksum of the data
                return None
            with expecting(path / name, "a run's config"):
                asked = record["config"].get("privacy") or {}
                private = asked.get("epsilon") is not None or bool(asked.get("noise_multiplier"))
                return Origin(record["data"], private)
    return None


def _place(where: str) -> tuple[Path, str | None]:
    """Split PATH:METHOD into the path and the method; the method is None if it is omitted."""
    path = Path(where)
    if path.exists() or ":" not in where:
        return path, None
    before, _, method = where.rpartition(":")
    return Path(before), method


def read_parameters(where: str) -> dict[str, np.ndarray]:
    """Read the parameters of a global model from a run folder, a folder of exported models or an .npz file.

    Args:
      where: path of the folder or file; ``PATH:METHOD`` if the folder has several methods. From a run folder, the model
        of the first seed is read. The keys of an .npz file are parameter paths.

    Returns:
      The arrays, by parameter path.

    Raises:
      JaxpflError: if ``where`` is not such a folder or file, if the method has no global model, or if the file has
        several clients' models.
    """
    path, method = _place(where)
    if path.is_file():
        arrays = read_npz(path)
        if CLIENT_IDS in arrays:
            raise JaxpflError(
                f"warm_start needs one model, but {path} contains several clients' models: export with --per-client"
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
    return {key: np.asarray(array) for key, array in leaves_by_path(parameters).items()}
