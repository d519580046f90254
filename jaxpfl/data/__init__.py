"""Load data, partition it among clients, stack the clients, and sample mini-batches.

First load a source with `load` and split it with `federate`, or pass your own arrays to `stack_clients`. Then call
`plan_batches`. These steps run in NumPy on the host. `draw_batches` and `take` run inside the compiled round, for one
client.
"""

from jaxpfl.data.batching import draw_batches, plan_batches, take
from jaxpfl.data.describe import Summary, describe, format_description, summary
from jaxpfl.data.federate import Split, federate, federate_unseen, set_apart, true_clusters
from jaxpfl.data.labels import single
from jaxpfl.data.plot import plot_split, split_figure
from jaxpfl.data.sources.base import Entry, Preparation, Source, data_directory, pooled, seen, unseen
from jaxpfl.data.sources.planted import PlantedSettings, draw_planted
from jaxpfl.data.sources.registry import available, load
from jaxpfl.data.sources.table_columns import Column, TableColumns
from jaxpfl.data.sources.tables import TableOptions
from jaxpfl.data.stack import check_batch_size, stack_clients
from jaxpfl.data.standardize import Scaling, check_standardizable, filled, fills_of, own_fills, scaled, scaling_of
from jaxpfl.data.stored import open_federation, open_stored, read_manifest, save_federation

__all__ = [
    "Column",
    "Entry",
    "PlantedSettings",
    "Preparation",
    "Scaling",
    "Source",
    "Split",
    "Summary",
    "TableColumns",
    "TableOptions",
    "available",
    "check_batch_size",
    "check_standardizable",
    "data_directory",
    "describe",
    "draw_batches",
    "draw_planted",
    "federate",
    "federate_unseen",
    "filled",
    "fills_of",
    "format_description",
    "load",
    "open_federation",
    "open_stored",
    "own_fills",
    "plan_batches",
    "plot_split",
    "pooled",
    "read_manifest",
    "save_federation",
    "scaled",
    "scaling_of",
    "seen",
    "set_apart",
    "single",
    "split_figure",
    "stack_clients",
    "summary",
    "take",
    "true_clusters",
    "unseen",
]
