"""Readers of data sets: one file a format; `registry` has them by name, `base` holds what they share."""

from jaxpfl.data.sources.registry import available, known_sources, load

__all__ = ["available", "known_sources", "load"]
