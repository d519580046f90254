"""Readers of data sets; `registry` has them by name."""
