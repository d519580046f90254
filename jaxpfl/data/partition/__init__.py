"""Partitions: assignments of a source's examples to clients; `registry` has them by name."""
