r"""Synthetic clients in planted clusters, each with a logistic regression whose coefficients are known.

.. math:: \theta_c = r\, u_c, \quad u_c \text{ uniform on the sphere}, \qquad x \sim N(0, I_d), \qquad
   P(y = 1 \mid x) = \frac{1}{1 + \exp(-x^T \theta_{c(i)})}

Here theta_c are the coefficients of cluster c, r their norm, and c(i) the cluster of client i. Clusters differ only in
the conditional distribution of labels, so the inputs x do not identify a cluster. Clusters have nearly equal sizes. The
numbers are the same on every platform; see `portable`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from jaxpfl.core import settings
from jaxpfl.core.settings import COUNT, Range, setting
from jaxpfl.data import portable
from jaxpfl.data.sources.base import Source
from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError, unknown_name


@settings.read_help
@dataclasses.dataclass(frozen=True)
class PlantedSettings:
    """Settings of the planted clients."""

    clients: int = setting(50, range=COUNT)
    """Number of clients m."""
    clusters: int = setting(5, range=COUNT)
    """Number of clusters k, at most m."""
    examples: int = setting(40, range=COUNT)
    """Number of training examples n of each client."""
    test_examples: int = setting(100, range=COUNT)
    """Number of test examples of each client."""
    dim: int = setting(10, range=COUNT)
    """Number of features d."""
    strength: float = setting(3.0, range=Range(0, math.inf, False, True))
    """Norm r of each cluster's coefficients; large values give almost noiseless labels."""
    seed: int = setting(0, range=Range(0))
    """Seed of all draws."""

    def check(self) -> None:
        """Check that the settings are valid.

        Raises:
          JaxpflError: if a setting is not valid; the message gives its name, its value, and the allowed values.
        """
        settings.check(self, prefix="planted:")
        if self.clusters > self.clients:
            raise JaxpflError(f"planted:clusters must be at most planted:clients = {self.clients}, got {self.clusters}")


class Planted(NamedTuple):
    """Synthetic data with their true clusters and coefficients.

    Attributes:
      source: examples with binary labels; the users are the clients 0 .. m - 1, for the partition "natural".
      member: cluster of each client, [m] in 0 .. k - 1.
      theta: coefficients of each cluster, [k, d] float64.
    """

    source: Source
    member: np.ndarray
    theta: np.ndarray


def draw_planted(given: PlantedSettings) -> Planted:
    """Draw the data of the clients.

    Raises:
      JaxpflError: as in `PlantedSettings.check`.
    """
    given.check()
    m, d, most = given.clients, given.dim, max(given.examples, given.test_examples)
    host_memory.check(
        8 * (6 * m * most * d + given.clusters * d),  # uniform draws, their transforms and products, in float64
        f"planted: {m} clients with {most} examples in {d} dimensions need",
        "use fewer clients, examples or test_examples, or a smaller dim",
    )
    rng = np.random.default_rng(np.random.SeedSequence(given.seed))
    member = rng.permutation(np.arange(m) % given.clusters)
    theta = portable.normal(rng, given.clusters * d).reshape(-1, d)
    theta = theta * (given.strength / np.sqrt(_sums(theta * theta)))[:, None]
    users, x, y = zip(*(_draw(rng, theta[member], n) for n in (given.examples, given.test_examples)), strict=True)
    description = f"{given.clusters} planted clusters of {m} clients, logistic regression in {d} dimensions"
    source = Source("planted", x[0], y[0], x[1], y[1], 2, description, users[0], users[1])
    return Planted(source, member, theta)


def parse(text: str) -> PlantedSettings:
    """Parse a string such as ``planted:clients=60,clusters=3``.

    Settings missing from the string take their default values; ``planted`` alone means all defaults.

    Raises:
      JaxpflError: if a name is unknown or repeated, or if a value has the wrong type.
    """
    fields = {field.name: field.type for field in dataclasses.fields(PlantedSettings)}
    _, given = settings.split_choice("data set", text, ["planted"])
    for name in given:
        if name not in fields:
            raise unknown_name("setting of planted", name, fields)
    kinds = {"int": int, "float": float}
    values = {n: settings.parse_value(f"planted:{n}", value, kinds[str(fields[n])]) for n, value in given.items()}
    return PlantedSettings(**values)


def enlarged(text: str, clients: int) -> str:
    """Return the name of the planted set that has the same settings, but at least ``clients`` clients.

    Other names, and planted sets that state their number of clients, are returned unchanged.
    """
    name, colon, rest = text.partition(":")
    if name != "planted" or "clients=" in rest or clients <= parse(text).clients:
        return text
    return f"{text},clients={clients}" if colon else f"{text}:clients={clients}"


def _draw(rng: np.random.Generator, theta: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw n examples for each of m clients, whose coefficients are the rows of theta [m, d].

    Returns:
      Users [m n], inputs [m n, d] float32 and labels [m n].
    """
    m, d = theta.shape
    users = np.repeat(np.arange(m, dtype=np.int32), n)
    x = portable.normal(rng, m * n * d).reshape(m * n, d)
    odds = _sums(x * theta[users])
    u = portable.uniform(rng, m * n)
    # This is u < 1 / (1 + exp(-odds)), rearranged so that exp cannot overflow.
    y = portable.log(u) - portable.log(1 - u) < odds
    return users, x.astype(np.float32), y.astype(np.int32)


def _sums(x: np.ndarray) -> np.ndarray:
    """Sum each row in the order of its elements."""
    return np.add.accumulate(x, axis=1)[:, -1]
