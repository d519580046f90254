"""Data sets of a config: registered data sets, the user's files, and saved federations (``federation:FOLDER``).

A data set's preset gives the values of the config's fields that are None. If a paper states settings for the data set,
the preset consists of these settings.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jaxpfl import data
from jaxpfl.core.settings import is_default, part_of
from jaxpfl.data import Source, Split
from jaxpfl.data.partition.registry import options_of
from jaxpfl.data.sources.base import data_folder
from jaxpfl.data.stored import Stored, check_new
from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError, writing

if TYPE_CHECKING:
    from jaxpfl.runs.config import DataConfig, RunConfig

PREFIX = "federation:"
_OF_RUN = ("standardize",)
"""Fields of `Split` that apply when a saved federation is opened, not when it is saved."""
C = TypeVar("C", bound="DataConfig")


def is_stored(name: str) -> bool:
    """Return whether the data set is a saved federation, ``federation:FOLDER``."""
    return name.startswith(PREFIX)


def opened(config: DataConfig) -> Stored | None:
    """Open the saved federation that a config names; return None if it names another kind of data set.

    Raises:
      JaxpflError: if the folder is missing or damaged.
    """
    return data.open_stored(_folder(config.data, config.data_dir)) if is_stored(config.data) else None


def origin(config: DataConfig) -> str:
    """Return the name of the data set whose preset applies.

    For a saved federation, this is the data set from which the federation was made.
    """
    return _manifest(config.data, config.data_dir)["data"] if is_stored(config.data) else config.data


def adopt_split(config: C) -> C:
    """Return the config with the split settings of the saved federation that the config names.

    Raises:
      JaxpflError: if the config sets a different value for one of these settings, or ``unseen_clients = test``; or if
        the folder is missing or damaged.
    """
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
                f"{field.name} must be {fixed}, with which {config.data} was split, got {given}: leave out {field.name}"
            )
    return dataclasses.replace(config, **{field.name: known[field.name] for field in dataclasses.fields(Split)})


def has_validation(config: DataConfig) -> bool:
    """Return whether the config names a saved federation with validation examples."""
    stored = opened(config)
    return stored is not None and len(stored.federation.validation.examples.y) > 0


def checksum(name: str, data_dir: str | None) -> int:
    """Return the CRC-32 of a saved federation, computed from the checksums in its manifest."""
    manifest = _manifest(name, data_dir)
    return zlib.crc32(json.dumps([manifest["client_ids"], manifest["splits"]], sort_keys=True).encode())


def convert(config: RunConfig, folder: Path) -> Stored:
    """Split a data set among clients and save the federation in a folder.

    LEAF's files and .npz archives are read in pieces. Only the inputs of one user (LEAF) or of one block of rows
    (.npz) are in memory at a time, besides the labels, users and indices of all examples.

    Args:
      config: resolved config. The unseen clients are saved together with the other clients.
      folder: folder to create.

    Raises:
      JaxpflError: as in `data.load`, `data.federate` and `data.save_federation`; if the data set is a saved federation;
        or if ``standardize`` or ``unseen_clients = test`` is set.
    """
    if is_stored(config.data):
        raise JaxpflError(f"{config.data} is already a saved federation")
    if config.standardize:
        raise JaxpflError("a saved federation is not standardized: set standardize in the runs that open it instead")
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
            f"unseen_clients must be a number, as a saved federation has no test users, got {config.unseen_clients}"
        )


def _folder(name: str, data_dir: str | None) -> Path:
    argument = name.removeprefix(PREFIX)
    if not argument:
        raise JaxpflError(f"data = {name!r} requires a folder: {PREFIX}FOLDER")
    return data_folder(name, data_dir) / Path(argument).expanduser()


def _manifest(name: str, data_dir: str | None) -> dict[str, Any]:
    return data.read_manifest(_folder(name, data_dir))


FIELDS = (
    *("data", "data_dir", "task", "target", "client", "missing", "ignore", "missing_words", "encoding", "window"),
    *("tokens", "date", "split_date", "person"),
)
"""Fields of a config that determine the data set and how it is read."""


def is_table(config: DataConfig) -> bool:
    """Return whether the data set is a user's table ``csv:FILE``, or a federation saved from such a table.

    The features of tables are always standardized.
    """
    return origin(config).startswith("csv:")


def source_of(config: DataConfig, *, in_files: bool = False) -> data.Source:
    """Load the data set of a config, not yet split among clients.

    Raises:
      JaxpflError: as in `data.load`.
    """
    ignored, dates = (
        tuple(name.strip() for name in (names or "").split(",") if name.strip())
        for names in (config.ignore, config.date)
    )
    table = data.TableOptions(
        config.target, config.client, config.missing, ignored, config.missing_words, config.encoding,
        dates, config.split_date, config.person,
    )  # fmt: skip
    return data.load(
        config.data,
        config.data_dir,
        in_files=in_files,
        task=config.named_task,
        table=table,
        window=config.window,
        tokens=config.tokens,
    )


_COMMON: dict[str, Any] = {
    "partition": "classes",
    "clients": 50,
    "classes_per_client": 3,
    "test_share": 0.5,
    "cohort": 5,
    "local_steps": 10,
    "batch_size": 20,
    "rounds": 300,
    "seeds": 3,
}
"""Settings of Ozkara et al. 2022, Table 1, MNIST (50 epochs of 60 iterations). Every preset starts from them."""

_WRITERS: dict[str, Any] = {
    "model": "cnn",
    "partition": "natural",
    "clients": 66,
    "users_per_client": 3,
    "cohort": 22,
    "batch_size": 4,
    "rounds": 240,
}
"""Settings of Ozkara et al. 2022 for FEMNIST, with sampling ratio 0.33, 40 epochs of 60 iterations and about 240
examples per client.
"""

# Each user of a LEAF data set is a client, and ten clients take part in a round.
_USERS: dict[str, Any] = {
    "partition": "natural",
    "clients": None,
    "cohort": 10,
    "batch_size": 10,
    "rounds": 100,
    "seeds": 1,
}
# LIBSVM tables: the file's authors scaled the features, and a Dirichlet partition varies the class proportions.
_TABLE: dict[str, Any] = {"model": "linear", "partition": "dirichlet", "alpha": 0.5, "cohort": 10, "rounds": 100}
_PLANTED: dict[str, Any] = _USERS | {"model": "linear", "seeds": 3}

PRESETS: dict[str, dict[str, Any]] = {
    "digits": {"model": "mlp", "cohort": 10, "batch_size": 10, "rounds": 100, "seeds": 5},
    "mnist": {"model": "cnn"},
    "fashion-mnist": {"model": "cnn"},
    "kmnist": {"model": "cnn"},
    # The test share is about the same as in FEMNIST, whose test set has 25 to 40 examples per client.
    "mnist-writers": _WRITERS | {"test_share": 0.12},
    "femnist": _WRITERS,
    # CIFAR-10: 250 epochs of 60 iterations on 1000 examples. CIFAR-100: 100 rounds of 2 epochs of 40 iterations.
    "cifar10": {"model": "cnn", "classes_per_client": 4, "cohort": 10, "batch_size": 17, "rounds": 1500},
    "cifar100": {
        "model": "cnn-cifar100",
        "partition": "superclasses",
        "superclasses_per_client": 2,
        "cohort": 10,
        "local_steps": 80,
        "batch_size": 25,
        "rounds": 100,
    },
    "shakespeare": _USERS | {"model": "gru"},
    "reddit": _USERS | {"model": "gru"},
    "a9a": _TABLE,
    # Liu et al. 2022: every school takes part in each round, with a linear model; the features should be standardized.
    "school": _USERS
    | {"model": "linear", "cohort": 139, "batch_size": 32, "rounds": 200, "test_share": 0.2, "lr": 0.01},
    "planted": _PLANTED,
}
"""Presets by data set, as differences from `_COMMON`. If a preset has no ``model``, `model_for` chooses one."""

# A table with a client column. Its features are standardized, and the learning rate suits correlated features.
_OWN_TABLE: dict[str, Any] = _USERS | {
    "model": "linear",
    "test_share": 0.25,
    "seeds": 3,
    "lr": 0.02,
}

_TEXT: dict[str, Any] = _USERS | {"model": "gru", "test_share": 0.2, "seeds": 3}

_BY_PREFIX = {"csv": _OWN_TABLE, "leaf": _USERS, "libsvm": _TABLE, "planted": _PLANTED, "text": _TEXT}
_SMALLEST_IMAGE = 16  # pixels per side; two 5 x 5 convolutions, each with pooling, reduce it to one pixel


def preset(data: str, partition: str | None, users_per_client: int | None = None) -> dict[str, Any]:
    """Return the preset of a data set, adapted to a partition and a number of users per client.

    Options that the partition does not take are left out. The preset's number of clients is meant for the preset's own
    partition and number of users per client. If the number of users per client differs, or the partition ``natural``
    replaces the preset's partition, ``clients`` is None: every group of users is a client. If any other partition
    replaces the preset's partition, there are 50 clients.

    Args:
      data: name of the data set.
      partition: partition, or None for the preset's partition.
      users_per_client: users that make up one client of the partition ``natural``, or None for the preset's number.

    Reference: Ozkara et al. 2023, Figure 2; Ozkara et al. 2023, Table 1; Ozkara et al. 2023, Table 4;
      Ozkara et al. 2023, Table 5; Ozkara et al. 2022, Table 1.
    """
    values = _COMMON | (PRESETS.get(data) or _BY_PREFIX.get(data.partition(":")[0], {}))
    if partition not in (None, values["partition"]):
        values |= {"partition": partition, "clients": None if partition == "natural" else _COMMON["clients"]}
    if values["partition"] == "natural" and users_per_client not in (None, values.get("users_per_client")):
        values |= {"clients": None}
    takes = options_of(values["partition"])
    of_partitions = {name for name in values if name.endswith("_per_client") or name == "alpha"}
    return {name: value for name, value in values.items() if name not in of_partitions or name in takes}


def model_for(source: Source) -> str:
    """Return the default model of a data set whose preset names no model.

    Raises:
      JaxpflError: if no built-in model accepts the inputs: several arrays, or tokens outside 0 ... classes - 1.
    """
    if not hasattr(source.x_train, "shape"):
        raise JaxpflError(
            f"data set {source.name!r} has several input arrays, which no built-in model takes: give model = "
            "FILE.py:NAME"
        )
    shape = source.x_train.shape[1:]
    if source.inputs == "tokens":
        largest = int(source.x_train.max(initial=0))
        if largest >= source.num_classes:
            raise JaxpflError(
                f"data set {source.name!r} has tokens up to {largest} but only {source.num_classes} classes, and gru "
                "predicts the next token: in Python, pass a model with a larger vocabulary to fit"
            )
        return "gru"
    return "cnn" if len(shape) in (2, 3) and min(shape[:2]) >= _SMALLEST_IMAGE else "mlp"
