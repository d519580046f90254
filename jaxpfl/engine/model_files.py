"""Exported models on disk: plain .npz archives with parameter paths as keys, and a JSON manifest.

Contents of a folder::

    manifest.json              methods, model, input shape, config, versions; files and keys of each method
    METHOD/personal.npz        client_ids [m], and the parameters of every client's model: dense0/kernel [m, ...]
    METHOD/clients/ID.npz      with ``--per-client`` instead: one client's parameters, dense0/kernel [...]
    METHOD/global.npz          the global model's parameters, if the method has one
    SHA256SUMS                 checksums of all these files, required by `load_models`

Inputs must be scaled as in training: pixels are in [0, 1], and then the channel's mean in the manifest is subtracted
and the result is divided by the channel's standard deviation. After ``--standardize``, the same holds for features. If
a method has several groups of clients with different models, each group has a file ``personal-GROUP.npz``.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl.core.types import PyTree
from jaxpfl.data.sources.npz import read_npz
from jaxpfl.support import files
from jaxpfl.support.errors import JaxpflError, expecting, unknown_name

MANIFEST = "manifest.json"
FORMAT = "jaxpfl-models-1"
CLIENT_IDS = "client_ids"


def write_npz(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays to an archive one by one, so that only one device array at a time is copied to the host.

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


def nested(arrays: Mapping[str, np.ndarray]) -> PyTree:
    """Convert a dictionary with paths as keys to nested dictionaries.

    Examples:
      >>> nested({"head/kernel": 1, "head/bias": 2})
      {'head': {'kernel': 1, 'bias': 2}}
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

    def client(self, client_id: int) -> PyTree:
        """Parameters of a client's personalised model, in nested dictionaries with the structure of the model's own.

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
            raise JaxpflError(f"{self._folder / file} holds fewer clients than {MANIFEST} lists, at least {row + 1}")
        return nested({key: array[row] for key, array in self._stacks[file].items() if key != CLIENT_IDS})

    @property
    def global_model(self) -> PyTree | None:
        """Parameters of the global model, or None if the method has none."""
        return None if self._global_file is None else nested(self._read(self._global_file))

    def _read(self, file: str) -> dict[str, np.ndarray]:
        path = files.inside(self._folder, file)
        files.check_checksum(self._folder, file)
        return read_npz(path)


def load_models(path: str | Path, method: str | None = None) -> Models:
    """Open a folder written by ``jaxpfl export``.

    Example::

        models = jaxpfl.load_models("runs/first/models", "adaped")
        logits = task.model.apply(models.client(3), x)

    Args:
      path: folder to open.
      method: name of one of its methods; optional if there is only one.

    Raises:
      JaxpflError: if the folder has no manifest of this format, if the manifest is damaged, or if the method is
        unknown. Models are checked only when they are read.
    """
    folder = Path(path)
    if not (folder / MANIFEST).is_file():
        raise JaxpflError(f"{folder} holds no exported models: {MANIFEST} is missing")
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
        raise JaxpflError(f"{where} holds several methods: name one of {', '.join(known)}")
    name = next(iter(known)) if name is None else name
    if name not in known:
        raise unknown_name(f"method of {where}", name, known)
    return name


def no_client(client_id: int, known: np.ndarray) -> JaxpflError:
    """Make the error for an unknown client, with the nearest known id."""
    if not len(known):
        return JaxpflError(f"unknown client {client_id}: the folder holds global models only")
    nearest = known[np.abs(known.astype(np.int64) - client_id).argmin()]
    return JaxpflError(
        f"unknown client {client_id}: did you mean {nearest}? (known: {len(known)} from {known.min()} to {known.max()})"
    )
