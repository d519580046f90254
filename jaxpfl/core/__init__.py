"""Vocabulary of the field: protocol, types, trees, randomness, participation and settings."""
