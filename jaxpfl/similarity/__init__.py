"""Similarity of clients: graphs, and ADMM with its proximal operators, which fuses the models of neighbours."""

from jaxpfl.similarity import admm, graphs

__all__ = ["admm", "graphs"]
