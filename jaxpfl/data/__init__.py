"""Data: loading, partitioning among clients, stacking, and mini-batch sampling.

`load` a source, `federate` it (or `stack_clients` from your own arrays), then `plan_batches`; everything up to
there is NumPy on the host. `draw_batches` and `take` run inside the compiled round, for one client.
"""

from jaxpfl.data.batching import Batching, Draw, draw_batches, order_at, orders_at, plan_batches, take
from jaxpfl.data.describe import Summary, describe, format_description, summary
from jaxpfl.data.federate import (
    Split,
    SplitPurpose,
    federate,
    federate_unseen,
    hold_out,
    set_apart,
    split_rng,
    true_clusters,
)
from jaxpfl.data.partition.deals import ClientClusters
from jaxpfl.data.partition.registry import (
    PARTITIONS,
    Assignment,
    Partitioner,
    PartitionOptions,
    options_of,
    partitioner,
)
from jaxpfl.data.plot import plot_split, split_figure
from jaxpfl.data.sources.base import Entry, Source, data_directory, pixel_scale, pooled, seen, unseen
from jaxpfl.data.sources.idx import read_idx
from jaxpfl.data.sources.natural import Elections, load_elections
from jaxpfl.data.sources.pickles import read_pickle
from jaxpfl.data.sources.planted import Planted, PlantedSettings, draw_planted
from jaxpfl.data.sources.registry import available, known_sources, load
from jaxpfl.data.sources.tables import TableOptions
from jaxpfl.data.stack import balanced, check_batch_size, pad, permute, stack_clients
from jaxpfl.data.standardize import Scaling, check_standardizable, scaled, scaling_of, single
from jaxpfl.data.stored import Stored, open_federation, open_stored, read_manifest, save_federation

__all__ = [
    "PARTITIONS",
    "Assignment",
    "Batching",
    "ClientClusters",
    "Draw",
    "Elections",
    "Entry",
    "PartitionOptions",
    "Partitioner",
    "Planted",
    "PlantedSettings",
    "Scaling",
    "Source",
    "Split",
    "SplitPurpose",
    "Stored",
    "Summary",
    "TableOptions",
    "available",
    "balanced",
    "check_batch_size",
    "check_standardizable",
    "data_directory",
    "describe",
    "draw_batches",
    "draw_planted",
    "federate",
    "federate_unseen",
    "format_description",
    "hold_out",
    "known_sources",
    "load",
    "load_elections",
    "open_federation",
    "open_stored",
    "options_of",
    "order_at",
    "orders_at",
    "pad",
    "partitioner",
    "permute",
    "pixel_scale",
    "plan_batches",
    "plot_split",
    "pooled",
    "read_idx",
    "read_manifest",
    "read_pickle",
    "save_federation",
    "scaled",
    "scaling_of",
    "seen",
    "set_apart",
    "single",
    "split_figure",
    "split_rng",
    "stack_clients",
    "summary",
    "take",
    "true_clusters",
    "unseen",
]
