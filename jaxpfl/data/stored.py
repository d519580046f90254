"""Federations in folders of ``.npy`` files, which are memory-mapped when they are opened.

A folder contains ``client_ids.npy`` and several files for each split: ``SPLIT-size.npy`` contains the clients' numbers
of examples, ``SPLIT-y.npy`` the labels, ``SPLIT-x-I.npy`` one array of the inputs, and ``SPLIT-persons.npy`` the person
of each example, if known. All but the sizes are in client order. The manifest, ``federation.json``, describes these
files, and records each file's size and CRC-32. The folder is written under a temporary name, and renamed when it is
complete.
"""

from __future__ import annotations

import dataclasses
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpfl.core.trees import checksum
from jaxpfl.core.types import ClientData, Examples, Federation, Names, PersonExamples
from jaxpfl.data.labels import are_classes, task_for
from jaxpfl.data.sources.base import Preparation, Source
from jaxpfl.data.sources.npz import read_npy
from jaxpfl.data.sources.table_columns import TableColumns
from jaxpfl.data.standardize import Scaling
from jaxpfl.support import files, host_memory
from jaxpfl.support.errors import JaxpflError, expecting, shown, writing
from jaxpfl.support.output_paths import partial

MANIFEST = "federation.json"
FORMAT = 1
_SPLITS = ("train", "validation", "test")
_EXAMPLES = 2**15
"""Number of examples that are copied together."""


class Stored(NamedTuple):
    """An opened federation, with the source and the split that its manifest records.

    Attributes:
      federation: the clients; inputs and labels are memory-mapped.
      source: data set from which the federation was made, with the name, classes and kind of inputs in the manifest.
        The manifest does not contain the data set's own arrays, so ``source`` has the federation's arrays instead.
      split: settings of the split (`Split`), by name; empty if unknown.
    """

    federation: Federation
    source: Source
    split: dict[str, Any]


def save_federation(
    federation: Federation, folder: str | Path, *, source: Source | None = None, split: Mapping[str, Any] | None = None
) -> None:
    """Save a federation in a folder, which `open_federation` can memory-map.

    The federation may itself be memory-mapped: examples are copied in small blocks.

    Args:
      federation: clients to save, as NumPy or JAX arrays; inputs are arrays, or dictionaries of arrays.
      folder: folder to create; it may exist if it is empty.
      source: data set from which the federation was made; its name, classes and kind of inputs are saved too.
      split: settings of the split by name, as JSON values; they are saved too.

    Raises:
      JaxpflError: if the folder is not empty, if inputs are neither arrays nor dictionaries of arrays, or if the disk
        has too little space. All written files are then removed.

    Examples:
      >>> import tempfile
      >>> import jaxpfl
      >>> federation = jaxpfl.federate(jaxpfl.load("digits"), clients=5, classes_per_client=3)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     jaxpfl.save_federation(federation, f"{folder}/digits")
      ...     jaxpfl.open_federation(f"{folder}/digits").num_clients
      5
    """
    folder = Path(folder)
    check_new(folder)
    splits = {name: getattr(federation, name) for name in _SPLITS}
    for data in splits.values():
        data.check()
        _check_structure(data.examples.x)
    said = _about(federation, source)
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        host_memory.check_room("the federation", sum(map(_bytes, splits.values())), folder.parent)
        with partial(folder) as place:
            place.mkdir()
            ids = _write(place / "client_ids.npy", np.asarray(federation.client_ids))
            entries = {name: _write_split(place, name, data) for name, data in splits.items()}
            manifest = {"format": FORMAT, **said, "split": dict(split or {}), "client_ids": ids, "splits": entries}
            files.write_json(place / MANIFEST, manifest)


def check_new(folder: Path) -> None:
    """Check that a folder is empty or missing, before the slow creation of its files.

    Raises:
      JaxpflError: if the folder is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise JaxpflError(f"{folder} already exists: choose another folder, or delete it")


def open_federation(folder: str | Path, *, check: bool = False) -> Federation:
    """Open a folder that `save_federation` wrote, with memory-mapped inputs and labels.

    The federation may be larger than memory: train it with ``ExecutionPlan(clients_in="disk")``, or with ``"host"`` if
    the clients' states fit into memory.

    Args:
      folder: folder to open.
      check: whether to read all files and compare their checksums with the recorded ones. Sizes and dtypes are always
        compared.

    Raises:
      JaxpflError: if the folder is missing, does not contain a federation, or was changed.
    """
    return open_stored(Path(folder), check=check).federation


def open_stored(folder: Path, *, check: bool = False) -> Stored:
    """Open a folder that `save_federation` wrote, and also return its recorded source and split.

    Raises:
      JaxpflError: as in `open_federation`.
    """
    manifest = read_manifest(folder)
    with expecting(folder / MANIFEST, "the manifest of a federation"):
        federation = _opened(folder, manifest, check)
        name, classes, inputs, note = (manifest[key] for key in ("data", "classes", "inputs", "description"))
        scales = manifest["scales"]
        task = manifest.get("task", "classification")  # older manifests have no task: all sets were classifications
        scales = None if scales is None else [(np.float32(mean), np.float32(scale)) for mean, scale in scales]
        if not (type(classes) is int and inputs in ("pixels", "features", "tokens")):
            raise ValueError("its classes or inputs are of an unknown kind")
        if not isinstance(task, str):
            raise ValueError("its task is not a name")
        columns = manifest.get("columns")
        columns = None if columns is None else TableColumns.from_json(columns)
    train, test = federation.train.examples, federation.test.examples
    source = Source(name, train.x, train.y, test.x, test.y, classes, f"{note}, in {folder}", inputs=inputs)
    names = manifest.get("class_names")
    class_names = None if names is None else np.array(names)
    source = source._replace(
        scales=scales, task=task, class_names=class_names, columns=columns, persons=federation.train.persons
    )
    preparation = Preparation.of(source, columns)
    dtype, scaling = manifest.get("raw_dtype") or preparation.raw_dtype, manifest.get("scaling")
    if scaling is not None:
        with expecting(folder / MANIFEST, "the manifest of a federation"):
            structure = jax.tree.structure(train.x)
            scaling = Scaling(*(jax.tree.unflatten(structure, map(np.array, part)) for part in scaling))
    persons = bool(manifest.get("persons"))
    preparation = dataclasses.replace(preparation, raw_dtype=dtype, persons=persons, scaling=scaling)
    return Stored(federation._replace(preparation=preparation), source, dict(manifest["split"]))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read only the manifest of a folder.

    Raises:
      JaxpflError: if the folder contains no federation or a damaged manifest, or if the version of the format differs.
    """
    if not (folder / MANIFEST).is_file():
        lacks = f"it has no {MANIFEST}" if folder.is_dir() else "there is no such folder"
        raise JaxpflError(f"{folder} is not a saved federation: {lacks}")
    manifest = files.read_json(folder / MANIFEST)
    split = manifest.get("split") if isinstance(manifest, dict) else None
    if not (isinstance(split, dict) and isinstance(manifest.get("data"), str)):
        raise JaxpflError(f"{folder / MANIFEST} is damaged or is not the manifest of a federation")
    if manifest.get("format") != FORMAT:
        found = shown(manifest.get("format"))
        raise JaxpflError(f"{folder / MANIFEST} has format {found}, but this version reads {FORMAT}")
    if not isinstance(split.get("clients"), int | None):
        raise JaxpflError(f"{folder / MANIFEST} is damaged: clients = {shown(split['clients'])}")
    return manifest


def _about(federation: Federation, source: Source | None) -> dict[str, Any]:
    if source is None:
        labels = [np.asarray(data.examples.y) for data in federation.all_splits]
        classes = labels[0].shape[1] if labels[0].ndim > 1 else 1
        if are_classes(labels[0]):
            classes += max(int(part.max()) for y in labels for part in host_memory.iterate(y))
        source = Source("federation", None, labels[0], None, None, classes, "a saved federation")
        source = source._replace(task=task_for(labels[0]))
    known = federation.preparation or Preparation.of(source, source.columns)
    said = {
        "data": source.name,
        "description": source.description,
        "classes": source.num_classes,
        "task": source.task,
        "client_names": None if federation.client_names is None else list(federation.client_names),
        **known.to_json(),
    }
    if names := said["class_names"]:  # the largest class may have no examples here
        classes = 2 if source.task in ("binary", "ranking") else source.num_classes
        said["class_names"] = [*names, *range(len(names), classes)][:classes]
    return said


def _bytes(data: ClientData) -> int:
    """Number of bytes of a split's examples."""
    examples = int(np.asarray(data.size).sum(dtype=np.int64))
    return sum(
        examples * math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tuple(data.examples))
    )


def _check_structure(x: Any) -> None:
    """Check that inputs are arrays or dictionaries of arrays with strings as keys."""
    if isinstance(x, Mapping) and all(isinstance(name, str) for name in x):
        for own in x.values():
            _check_structure(own)
    elif not hasattr(x, "shape"):
        raise JaxpflError(
            "cannot save the inputs: each must be an array, or a dictionary of arrays with strings as keys, got "
            f"{type(x).__name__}"
        )


def _write_split(folder: Path, name: str, data: ClientData) -> dict[str, Any]:
    leaves, structure = jax.tree.flatten(data.examples.x)
    persons = {} if data.persons is None else {"persons": _write(folder / f"{name}-persons.npy", data.persons, data)}
    return persons | {
        "capacity": data.capacity,
        "chunk": data.chunk,
        "size": _write(folder / f"{name}-size.npy", np.asarray(data.size)),
        "y": _write(folder / f"{name}-y.npy", data.examples.y, data),
        "structure": jax.tree.unflatten(structure, range(len(leaves))),
        "x": [_write(folder / f"{name}-x-{i}.npy", leaf, data) for i, leaf in enumerate(leaves)],
    }


def _write(path: Path, values: Any, data: ClientData | None = None) -> dict[str, Any]:
    """Write an array, and return its entry in the manifest; with ``data``, write only the rows of its clients."""
    array = np.asarray(values)
    rows = len(array) if data is None else int(np.asarray(data.size).sum(dtype=np.int64))
    shape, check = (rows, *array.shape[1:]), 0
    with open(path, "wb") as file:
        head = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, head)
        for part in (array,) if data is None else (array[places] for places in _places(data)):
            content = np.ascontiguousarray(part).data
            check = zlib.crc32(content, check)
            file.write(content)
            host_memory.give_back(array)
        file.flush()
        os.fsync(file.fileno())
    return {"shape": list(shape), "dtype": array.dtype.str, "bytes": path.stat().st_size, "crc32": check}


def _places(data: ClientData) -> Iterator[np.ndarray]:
    """Yield the rows of the clients' examples in the split's arrays, in client order, as blocks of indices."""
    start, size = np.asarray(data.start, np.int64), np.asarray(data.size, np.int64)
    ends = np.cumsum(size)
    for first in range(0, int(ends[-1]), _EXAMPLES):
        numbers = np.arange(first, min(first + _EXAMPLES, int(ends[-1])))
        client = np.searchsorted(ends, numbers, side="right")
        yield (start - (ends - size))[client] + numbers


def _opened(folder: Path, manifest: dict[str, Any], check: bool) -> Federation:
    def opened(name: str, entry: dict[str, Any], into_memory: bool = False) -> np.ndarray:
        path = folder / f"{name}.npy"
        try:
            found = path.stat().st_size
            if found != entry["bytes"]:
                raise JaxpflError(f"{path} is damaged: it has {found} bytes, but {shown(entry['bytes'])} were written")
            array = read_npy(path, mode=None if into_memory else "r")
        except OSError as error:
            raise JaxpflError(f"{path} is missing or damaged: {error.strerror or error}") from error
        if list(array.shape) != entry["shape"] or array.dtype.str != entry["dtype"]:
            raise JaxpflError(f"{path} is damaged: its array has shape {array.shape} and type {array.dtype.str}")
        if (check or into_memory) and checksum(array) != entry["crc32"]:
            raise JaxpflError(f"{path} is damaged: its checksum does not match")
        return array

    def split(name: str, entry: dict[str, Any], clients: int) -> ClientData:
        size, y = opened(f"{name}-size", entry["size"], into_memory=True), opened(f"{name}-y", entry["y"])
        leaves = [opened(f"{name}-x-{i}", leaf) for i, leaf in enumerate(entry["x"])]
        x = jax.tree.map(lambda place: leaves[place], entry["structure"])
        examples = Examples(x, y)
        if "persons" in entry:
            examples = PersonExamples(x, y, opened(f"{name}-persons", entry["persons"]))
        lengths = {len(leaf) for leaf in jax.tree.leaves(examples)}
        if size.shape != (clients,) or lengths != {int(size.sum(dtype=np.int64))}:
            raise ValueError("its clients' numbers of examples do not match its files")
        made, capacity, chunk = ClientData.stacked(examples, size), int(entry["capacity"]), int(entry["chunk"])
        if not made.capacity <= capacity or not min(capacity, 1) <= chunk <= capacity:
            raise ValueError(f"a capacity of {capacity} and chunks of {chunk} do not fit its clients")
        return ClientData(examples, made.start, made.size, capacity, chunk)

    ids = opened("client_ids", manifest["client_ids"], into_memory=True)
    names = None if manifest.get("client_names") is None else Names(map(str, manifest["client_names"]))
    if names is not None and len(names) != len(ids):
        raise ValueError(f"it has {len(names)} names for {len(ids)} clients")
    return Federation(ids, *(split(name, manifest["splits"][name], len(ids)) for name in _SPLITS), client_names=names)
