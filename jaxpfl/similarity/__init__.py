"""Similarity of clients: graphs, proximal operators and ADMM that fuse the models of neighbours."""

from jaxpfl.similarity import admm, features, graphs, nearest, proximal

__all__ = ["admm", "features", "graphs", "nearest", "proximal"]
