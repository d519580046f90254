"""Deployment of a method on real clients, by Flower apps that call the same pure functions as a simulation."""

from jaxpfl.deploy.agreement import Agreement
from jaxpfl.deploy.parties import Hub, Node

__all__ = ["Agreement", "Hub", "Node"]
