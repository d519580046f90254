"""Sweeps: runs of many settings as few programs, with selection on validation examples."""
