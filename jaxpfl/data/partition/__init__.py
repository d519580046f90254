"""Partitions: assignments of a source's examples to clients; `registry` has them by name."""

from jaxpfl.data.partition.registry import (
    PARTITIONS,
    Assignment,
    Partitioner,
    PartitionOptions,
    options_of,
    partitioner,
)

__all__ = ["PARTITIONS", "Assignment", "PartitionOptions", "Partitioner", "options_of", "partitioner"]
