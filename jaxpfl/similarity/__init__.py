"""Which clients are alike, and what pulls the models of those together: graphs, proximal operators, ADMM."""

from jaxpfl.similarity import admm, features, graphs, proximal

__all__ = ["admm", "features", "graphs", "proximal"]
