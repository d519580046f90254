"""Runs of experiments: configs, run folders, checkpoints, summaries and plots."""
