"""Sweeps over many settings, run as few compiled programs, with selection by validation scores."""
