"""Readers of data sets; `registry` lists them by name."""
