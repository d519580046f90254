"""Data sets of a config: registered ones, tables of one's own, and saved federations (``federation:FOLDER``)."""

from __future__ import annotations

import dataclasses
import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jaxpfl import data
from jaxpfl.core.settings import is_default, part_of
from jaxpfl.data import Split
from jaxpfl.data.stored import Stored, check_new
from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError, writing

if TYPE_CHECKING:
    from jaxpfl.runs.config import DataConfig, RunConfig

PREFIX = "federation:"
_OF_RUN = ("standardize",)
"""Settings of the split that apply when a federation is opened."""
C = TypeVar("C", bound="DataConfig")


def is_stored(name: str) -> bool:
    """True for the name of such a data set."""
    return name.startswith(PREFIX)


def opened(config: DataConfig) -> Stored | None:
    """The data of a config; None if they are no such data set.

    Raises:
      JaxpflError: if the folder is missing or damaged.
    """
    return data.open_stored(_folder(config.data, config.data_dir)) if is_stored(config.data) else None


def origin(config: DataConfig) -> str:
    """Name of the data set, for its presets; of a federation, that of the set that it was made of."""
    return _manifest(config.data, config.data_dir)["data"] if is_stored(config.data) else config.data


def with_split(config: C) -> C:
    """The config with the split that a saved federation has; unchanged for any other data set.

    Raises:
      JaxpflError: for a setting of another split.
    """
    if not is_stored(config.data):
        return config
    _refuse_test_users(config)
    known = dataclasses.asdict(Split(partition="natural")) | _manifest(config.data, config.data_dir)["split"]
    if known["clients"] is not None:
        known["clients"] -= config.clients_apart
    for field in dataclasses.fields(Split):
        given, fixed = getattr(config, field.name), known[field.name]
        if field.name in _OF_RUN:
            known[field.name] = given
        elif given not in (None, fixed) and not is_default(config, field.name):
            raise JaxpflError(
                f"{field.name} = {given}: {config.data} is split already, with {field.name} = {fixed}: leave it out"
            )
    return dataclasses.replace(config, **{field.name: known[field.name] for field in dataclasses.fields(Split)})


def has_validation(config: DataConfig) -> bool:
    """True if clients of a saved federation have validation examples."""
    stored = opened(config)
    return stored is not None and len(stored.federation.validation.examples.y) > 0


def checksum(name: str, data_dir: str | None) -> int:
    """CRC-32 of a saved federation, from the checksums in its manifest."""
    manifest = _manifest(name, data_dir)
    return zlib.crc32(json.dumps([manifest["client_ids"], manifest["splits"]], sort_keys=True).encode())


def convert(config: RunConfig, folder: Path) -> Stored:
    """Split a data set and save the federation in a folder.

    LEAF's files and .npz archives are read piece by piece: beside one user, or some rows, memory holds the labels, the
    users and the places of the examples.

    Args:
      config: resolved; its unseen clients are saved with the others.
      folder: the folder to make.

    Raises:
      JaxpflError: as `data.load`, `data.federate` and `data.save_federation`.
    """
    if is_stored(config.data):
        raise JaxpflError(f"{config.data} is a saved federation already")
    if config.standardize:
        raise JaxpflError("standardize is of a run, by the training examples of its clients: leave it out here")
    _refuse_test_users(config)
    check_new(folder)
    split: dict[str, Any] = dataclasses.asdict(part_of(Split, config))
    if config.clients is not None:
        split["clients"] = config.clients + config.clients_apart
    with writing(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with host_memory.files_in(folder.parent):
        source = source_of(config, in_files=True)
        federation = data.federate(source, **split)
        data.save_federation(federation, folder, source=source, split=split)
    return data.open_stored(folder)


def _refuse_test_users(config: DataConfig) -> None:
    if isinstance(config.unseen_clients, str):
        raise JaxpflError(
            f"unseen_clients = {config.unseen_clients} is of a data set, and a saved federation is split already"
        )


def _folder(name: str, data_dir: str | None) -> Path:
    argument = name.removeprefix(PREFIX)
    if not argument:
        raise JaxpflError(f"data = {name!r} needs a folder: {PREFIX}FOLDER")
    return data.data_directory(data_dir) / Path(argument).expanduser()


def _manifest(name: str, data_dir: str | None) -> dict[str, Any]:
    return data.read_manifest(_folder(name, data_dir))


FIELDS = (
    *("data", "data_dir", "task", "target", "client", "missing", "ignore", "missing_words", "encoding", "window"),
    "tokens",
)
"""Fields of a config that decide which data set it has."""


def is_table(config: DataConfig) -> bool:
    """True for a table of the user's own (or a federation made of one), whose features are always standardised."""
    return origin(config).startswith("csv:")


def source_of(config: DataConfig, *, in_files: bool = False) -> data.Source:
    """The data set of a config, before it is split.

    Raises:
      JaxpflError: as `data.load`.
    """
    task = config.task if isinstance(config.task, str) else None
    ignored = tuple(name.strip() for name in (config.ignore or "").split(",") if name.strip())
    table = data.TableOptions(
        config.target, config.client, config.missing, ignored, config.missing_words, config.encoding
    )
    return data.load(
        config.data,
        config.data_dir,
        in_files=in_files,
        task=task,
        table=table,
        window=config.window,
        tokens=config.tokens,
    )
