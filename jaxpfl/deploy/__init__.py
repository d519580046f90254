"""Deployment of a method in a real federation: Flower apps that run the same pure functions as a simulation."""

from jaxpfl.deploy.agreement import Agreement
from jaxpfl.deploy.parties import Hub, Node

__all__ = ["Agreement", "Hub", "Node"]
