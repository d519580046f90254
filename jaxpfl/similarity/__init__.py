"""Similarity of clients: graphs of clients, and ADMM for the network lasso, which pulls neighbours' models together."""

from jaxpfl.similarity import admm, graphs

__all__ = ["admm", "graphs"]
