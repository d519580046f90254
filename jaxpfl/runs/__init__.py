"""Experiments: configs, run folders, checkpoints, summaries and plots."""
