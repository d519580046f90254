"""Deployment of a method in a real federation: the pure functions that a simulation runs, as apps of Flower."""

from jaxpfl.deploy.agreement import Agreement
from jaxpfl.deploy.parties import Hub, Node

__all__ = ["Agreement", "Hub", "Node"]
