"""Foundations of all other packages: protocol, types, trees, randomness, participation and settings."""
