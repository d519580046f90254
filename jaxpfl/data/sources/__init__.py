"""Readers of data sets, one file per format; `registry` has them by name, `base` their common parts."""

from jaxpfl.data.sources.registry import available, known_sources, load

__all__ = ["available", "known_sources", "load"]
