"""Transformations of uploads: compression, robust aggregation and attacks."""
