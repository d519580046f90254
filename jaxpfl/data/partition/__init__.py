"""Partitions: assignments of a source's examples to clients; `registry` lists them by name."""
