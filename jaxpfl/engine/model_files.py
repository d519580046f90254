"""Exported models on disk: plain .npz archives with parameter paths as keys, and a JSON manifest.

Contents of a folder::

    manifest.json              methods, model, input shape, config, versions; files and keys of each method
    METHOD/personal.npz        client_ids [m], and the parameters of every client's model: dense0/kernel [m, ...]
    METHOD/clients/ID.npz      with ``--per-client`` instead: one client's parameters, dense0/kernel [...]
    METHOD/global.npz          the global model's parameters, if the method has one
    METHOD/personal.stablehlo  program (parameters by path, scaled inputs) -> predictions, in the format of jax.export
    METHOD/global.stablehlo    the same program for the global model
    METHOD/alone/ID.stablehlo  with ``--stablehlo``: program (inputs) -> predictions for one client;
                               global.stablehlo for the global model
    SHA256SUMS                 checksums of all these files, required by `load_models`

The manifest records how inputs were encoded and scaled in training. If a method has several groups of clients with
different models, each group has its files ``personal-GROUP``.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.export
import numpy as np

from jaxpfl.core.types import Array, PyTree
from jaxpfl.data import TableColumns
from jaxpfl.data.sources.base import pixels
from jaxpfl.data.sources.csv_text import Table
from jaxpfl.data.sources.npz import read_npz
from jaxpfl.engine.execution_plan import PLATFORMS
from jaxpfl.models.base import CLASSIFICATION, leaves_by_path
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError, expecting, listed, unknown_name, warn

if TYPE_CHECKING:
    import pandas

MANIFEST = "manifest.json"
FORMAT = "jaxpfl-models-1"
CLIENT_IDS = "client_ids"
_SCALE = ("mean", "deviation")
_ROWS = 1024
"""Largest number of examples that are predicted together."""


def write_npz(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays to an archive one after the other, so that the host holds a copy of only one device array at a time.

    Args:
      path: archive to write; its folder is created.
      arrays: arrays by key. A dtype that NumPy lacks (bfloat16) is written as float32, which is exact.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        with zipfile.ZipFile(file, "w") as archive:
            for key, array in arrays.items():
                value = np.asarray(array)
                plain = value.astype(np.float32) if value.dtype.kind == "V" else value
                with archive.open(f"{key}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, plain, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())


def write_program(path: Path, function: Callable[..., Array], *shapes: Any) -> None:
    """Write a function as a program for any number of examples, which ``jax.export.deserialize`` reads without jaxpfl.

    Args:
      path: file to write; its folder is created.
      function: function to write. Its last argument is an array of inputs [n, ...].
      shapes: shapes of the arguments, as dictionaries and ``jax.ShapeDtypeStruct``; the last is the shape of ONE input.
    """
    *before, one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), shapes)
    inputs = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("n"), *one.shape), one.dtype)

    def one_by_one(*given: Any) -> Array:
        return jax.vmap(lambda row: function(*given[:-1], row[None])[0])(given[-1])

    try:
        exported = jax.export.export(jax.jit(function), platforms=PLATFORMS)(*before, inputs)
    except Exception:  # the function cannot be traced with a symbolic number of examples, only with a Python number
        exported = jax.export.export(jax.jit(one_by_one), platforms=PLATFORMS)(*before, inputs)
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.whole(path, "wb") as file:
        file.write(exported.serialize())


def nested(arrays: Mapping[str, np.ndarray]) -> PyTree:
    """Convert a dictionary with paths as keys to nested dictionaries.

    Examples:
      >>> nested({"head/kernel": 1, "head/bias": 2})
      {'head': {'kernel': 1, 'bias': 2}}

    Raises:
      JaxpflError: if a path names both a parameter and a group of parameters.
    """
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise JaxpflError(f"parameter {path!r} is inside {parent!r}, which is a parameter too")
        if name in node:
            raise JaxpflError(f"parameter {path!r} is also a group of other parameters")
        node[name] = array
    return tree


def scaled(x: Any, manifest: Mapping[str, Any]) -> Any:
    """Scale inputs [n, ...] as in the training of the models that a manifest describes."""
    if manifest["pixels"]:  # per channel, and in single precision because `data.load` scales pixels in single precision
        mean, deviation = (np.array([c[part] for c in manifest["pixels"]], np.float32) for part in _SCALE)
    elif manifest["features"]:
        mean, deviation = (np.array(manifest["features"][0][part]) for part in _SCALE)
    else:
        return x
    return (x - mean) / deviation


class Models:
    """One method's exported models; files are read on demand.

    Attributes:
      manifest: the folder's manifest, which covers all methods.
      method: name of the method.
      client_ids: ids of the clients with exported models, [m]; empty if only the global model was exported.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], method: str):
        self._folder, self.manifest, self.method = folder, manifest, method
        entry = manifest["methods"][method]
        groups: list[dict[str, Any]] = entry["groups"]
        self._place = {id: (str(group["file"]), row) for group in groups for row, id in enumerate(group[CLIENT_IDS])}
        shared = entry["global"]  # null where a method has no global model
        self._global_file = None if shared is None else str(shared["file"])
        self.client_ids = np.array(list(self._place), np.int32)
        self._stacks: dict[str, dict[str, np.ndarray]] = {}
        self._program_files: dict[int | None, str] = {
            id: str(group.get("program")) for group in groups for id in group[CLIENT_IDS]
        }
        self._program_files[None] = str((shared or {}).get("program"))
        self._programs: dict[str, Callable[..., Array]] = {}
        names = manifest.get("client_names") or {}
        self._ids = {str(names.get(str(id), id)): id for id in self._place}

    def client(self, client_id: int) -> PyTree:
        """Parameters of a client's personalized model, as nested dictionaries (`nested`).

        Raises:
          JaxpflError: if the client's model was not exported, or if its file is damaged.
        """
        if client_id not in self._place:
            raise no_client(client_id, self.client_ids)
        file, row = self._place[client_id]
        if (own := file.replace("{client}", str(client_id))) != file:
            return nested(self._read(own))
        if file not in self._stacks:
            self._stacks[file] = self._read(file)
        if any(array.ndim == 0 or len(array) <= row for array in self._stacks[file].values()):
            raise JaxpflError(
                f"{self._folder / file} contains fewer clients than {MANIFEST}, which lists at least {row + 1}"
            )
        return nested({key: array[row] for key, array in self._stacks[file].items() if key != CLIENT_IDS})

    @property
    def global_model(self) -> PyTree | None:
        """Parameters of the global model, or None if the method has none."""
        return None if self._global_file is None else nested(self._read(self._global_file))

    def predict(self, client: int | str | None, x: Any) -> np.ndarray:
        """Predict the labels of new inputs, as the run predicted the labels of the client's test examples.

        Args:
          client: name of the client (a string) or its id (a number); None for the global model.
          x: inputs in the form that the user's data had before the run scaled them. For a table: a data frame, a
            dictionary of columns, or an array [n, d] of the features that ``manifest`` lists. For other data: an array
            [n, ...]; pixels are bytes, or real numbers from 0 to 1.

        Returns:
          Probabilities of the classes, [n, classes], or of the labels of a multilabel task, [n, labels]; expected
          labels [n] or [n, d] for a regression; the model's output for a task of your own.

        Raises:
          JaxpflError: if the client is unknown, if there is no global model, if the inputs differ from the inputs of
            the run, or if the folder does not record how inputs are encoded (``--private-only``).
        """
        return self._predict(self._known(client), x)

    def predict_table(
        self, table: Table, column: str | None, adapt: Callable[[list[str]], list[np.ndarray]] | None = None
    ) -> pandas.DataFrame:
        """Predict the label of each row of a table with the model of the row's client, or with the global model if the
        client is new.

        Args:
          table: table with the columns of the run's features, and possibly others.
          column: column with the clients' names; None to predict each row with the global model.
          adapt: function that replaces the global model for new clients. It takes the names of the new clients, and
            returns one array for each of them, with the predictions for its rows.

        Returns:
          A data frame with the columns ``client`` (empty if ``column`` is None), ``prediction``, and a probability for
          each class, such as ``probability_yes``. With several labels, there is a prediction for each label.

        Raises:
          JaxpflError: as in `predict`; or if a new client needs a global model and there is none, if a model has
            diverged, or if a table cannot show the predictions of the run's task.
        """
        import pandas

        clients = pandas.Series([""] * len(table.cells) if column is None else table.texts(column))
        self._encoded(table, None)  # check all rows first, so that an error names the first wrong line
        new = [name for name in dict.fromkeys(clients) if column is not None and name not in self._ids]
        adapted = dict(zip(new, adapt(new), strict=True)) if new and adapt is not None else {}
        if new and not adapted:
            rows = f"{table.path}: {clients.isin(new).sum()} row(s) of new clients ({listed(new, new[0])})"
            if self._global_file is None:
                raise JaxpflError(f"{rows} require a global model, but {self.method} has none: leave these rows out")
            warn(f"{rows} are predicted by the global model")
        places = clients.groupby(clients).groups
        parts = [
            adapted[name]
            if name in adapted
            else self._predict(self._ids.get(str(name)), table._replace(cells=table.cells.iloc[rows]))
            for name, rows in places.items()
        ]
        found = np.concatenate(parts)[np.argsort(np.concatenate(list(places.values())))]
        return pandas.DataFrame({"client": clients, **self._columns(found)})

    def _columns(self, found: np.ndarray) -> dict[str, np.ndarray]:
        """Return the columns of a prediction table, given the result of `predict`."""
        kind, classes = self.manifest["task"], self.manifest["class_names"]
        if not np.isfinite(found).all():
            raise JaxpflError(f"a model of {self.method} has diverged: its predictions are not finite numbers")
        if kind in ("regression", "multilabel"):
            targets = (self.manifest["config"]["target"] or ",".join(map(str, range(found.shape[-1])))).split(",")
            heads = [""] if found.size == len(found) else [f"_{name.strip()}" for name in targets]
            values = dict(zip(heads, found.reshape(len(found), -1).T, strict=True))
            if kind == "regression":
                return {f"prediction{head}": own for head, own in values.items()}
            labels = {f"prediction{head}": (own > 0.5).astype(int) for head, own in values.items()}
            return labels | {f"probability{head}": own for head, own in values.items()}
        if kind not in (CLASSIFICATION, "binary", "ranking"):
            raise JaxpflError(f"a table cannot show predictions of the task {kind!r}: use predict in Python")
        names = np.array(range(found.shape[1]) if classes is None else classes)
        probabilities = {f"probability_{name}": own for name, own in zip(names, found.T, strict=True)}
        return {"prediction": names[found.argmax(axis=1)], **probabilities}

    def _known(self, client: int | str | None) -> int | None:
        """Return the id of a client, given its name or id."""
        if isinstance(client, str):
            if client not in self._ids:
                raise unknown_name("client", client, self._ids)
            return self._ids[client]
        if client in self._place and self._ids.get(str(client), client) != client:
            raise JaxpflError(f"client {client} is the id of one client and the name of another: pass names as strings")
        return client

    def _encoded(self, x: Any, client_id: int | None) -> np.ndarray:
        """Convert inputs to an array [n, ...]; the columns of a table are encoded as in the client's training."""
        if "inputs" not in self.manifest:
            raise JaxpflError(
                f"{self._folder} lacks the encoding of inputs, which predict requires: export the run again, "
                "without --private-only"
            )
        record = self.manifest["columns"]
        if not (isinstance(x, Table | Mapping) or hasattr(x, "columns")):
            return np.asarray(x)
        if record is None:
            shape = self.manifest["input_shape"]
            raise JaxpflError(
                f"the models in {self._folder} were not trained on a table: in Python, predict an array {['n', *shape]}"
            )
        if isinstance(x, Mapping):
            import pandas

            x = pandas.DataFrame({name: np.atleast_1d(np.asarray(values, object)) for name, values in x.items()})
        return TableColumns.from_json(record).of_client(client_id).apply(x)

    def _scaled(self, x: np.ndarray) -> np.ndarray:
        """Check inputs, and scale them as in training."""
        manifest = self.manifest
        kind, shape = manifest["inputs"], tuple(manifest["input_shape"])
        if kind == "pixels":
            x = x[..., None] if x.ndim == len(shape) and shape[-1] == 1 else x
            x = pixels(x) if x.dtype == np.uint8 else x
        most = np.finfo(np.float32).max
        kinds, low, high, what = {
            "pixels": ("f", 0, 1, "bytes (uint8), or real numbers from 0 to 1"),
            "tokens": ("iu", 0, manifest["classes"] - 1, f"integers from 0 to {manifest['classes'] - 1}"),
        }.get(kind, ("iufb", -most, most, "finite numbers, within the range of float32"))
        if x.dtype.kind not in kinds or not ((x >= low) & (x <= high)).all():
            got = f", from {x.min()} to {x.max()}" if x.size and x.dtype.kind in "iuf" else ""
            raise JaxpflError(f"{kind} must be {what}, got {x.dtype}{got}")
        if x.shape[1:] != shape:
            raise JaxpflError(f"inputs must have the shape {['n', *shape]}, got {[*x.shape]}")
        # First round to the precision to which the reader rounded the run's data.
        return scaled(x.astype(manifest["raw_dtype"]), manifest).astype(manifest["input_dtype"])

    def _predict(self, client_id: int | None, x: Any) -> np.ndarray:
        """Return the predictions of a client's model, or of the global model."""
        x = self._scaled(self._encoded(x, client_id))
        parameters = self.global_model if client_id is None else self.client(client_id)
        if parameters is None:
            raise JaxpflError(f"{self.method} in {self._folder} has no global model: pass a client's name or id")
        file = self._program_files[client_id]
        if file not in self._programs:
            path = self._checked(file)
            with expecting(path, "a program that this version of jax reads; export the run again"):
                self._programs[file] = jax.jit(jax.export.deserialize(bytearray(files.contents(path))).call)
        program, arrays, parts = self._programs[file], leaves_by_path(parameters), []
        for first in range(0, max(len(x), 1), _ROWS):
            rows = x[first : first + _ROWS]
            more = (1 << (len(rows) - 1).bit_length()) - len(rows)  # few sizes, few programs to compile
            padded = np.pad(rows, [(0, more), *[(0, 0)] * (x.ndim - 1)])
            parts.append(np.asarray(program(arrays, padded))[: len(rows)])
        return np.concatenate(parts)

    def _read(self, file: str) -> dict[str, np.ndarray]:
        return read_npz(self._checked(file))

    def _checked(self, file: str) -> Path:
        path = files.inside(self._folder, file)
        files.check_checksum(self._folder, file)
        return path


def load_models(path: str | Path, method: str | None = None) -> Models:
    """Open a folder written by ``jaxpfl export``.

    Example::

        models = jaxpfl.load_models("run/models", "ditto")
        probabilities = models.predict("H03", pandas.read_csv("new.csv"))

    Args:
      path: folder to open.
      method: name of one of its methods; optional if there is only one.

    Raises:
      JaxpflError: if the folder has no manifest of this format, if the manifest is damaged, or if the method is
        unknown. Models are checked only when they are read.
    """
    folder = Path(path)
    if not (folder / MANIFEST).is_file():
        remedy = f": jaxpfl export {folder} writes them" if (folder / "config.json").is_file() else ""
        raise JaxpflError(f"{folder} contains no exported models: {MANIFEST} is missing{remedy}")
    files.check_checksum(folder, MANIFEST)
    manifest = files.read_json(folder / MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise JaxpflError(f"{folder / MANIFEST} does not have the format {FORMAT}")
    with expecting(folder / MANIFEST, "a manifest of exported models"):
        return Models(folder, manifest, one_method(method, manifest["methods"], str(folder)))


def one_method(name: str | None, known: Mapping[str, Any] | list[str], where: str) -> str:
    """Name of the chosen method: the given name, or the only known name.

    Raises:
      JaxpflError: if the name is unknown, or if no name is given and there are several methods.
    """
    if name is None and len(known) != 1:
        raise JaxpflError(f"{where} contains several methods: choose one of {', '.join(known)}")
    name = next(iter(known)) if name is None else name
    if name not in known:
        raise unknown_name(f"method of {where}", name, known)
    return name


def no_client(client_id: int, known: np.ndarray) -> JaxpflError:
    """Make the error for an unknown client, with the nearest known id."""
    if not len(known):
        return JaxpflError(f"unknown client {client_id}: the folder contains global models only")
    nearest = known[np.abs(known.astype(np.int64) - client_id).argmin()]
    return JaxpflError(
        f"unknown client {client_id}: did you mean {nearest}? (known: {len(known)} ids, {known.min()} to {known.max()})"
    )
