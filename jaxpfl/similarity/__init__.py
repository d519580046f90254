"""Similarity of clients: graphs, and ADMM with proximal operators, which draws the models of neighbours together."""

from jaxpfl.similarity import admm, graphs

__all__ = ["admm", "graphs"]
