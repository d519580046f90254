"""Data sets of a config, tables of one's own among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpfl import data
from jaxpfl.experiment import stored_data

if TYPE_CHECKING:
    from jaxpfl.experiment.config import DataConfig

FIELDS = (
    "data",
    "data_dir",
    "task",
    "target",
    "client",
    "missing",
    "ignore",
    "missing_words",
    "encoding",
    "window",
    "tokens",
)
"""Fields of a config that decide which data set it has."""


def is_table(config: DataConfig) -> bool:
    """True for a table of the user's own (or a federation made of one), whose features are always standardised."""
    return stored_data.origin(config).startswith("csv:")


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
