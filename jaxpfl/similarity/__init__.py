"""Similarity of clients: graphs of clients, and ADMM for the network lasso, which pulls neighbors' models together."""

from jaxpfl.similarity import admm, graphs

__all__ = ["admm", "graphs"]
