"""The user's own clients, from a file: estimates with intervals, and their scores on held-out samples.

Everything is computed in double precision: centering by the data would break the privacy of the private estimates, and
single precision without centering would lose small differences.
"""
