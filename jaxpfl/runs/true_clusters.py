"""True clusters of a run's clients, if its data have some, and their agreement with the clusters found."""

from __future__ import annotations

import numpy as np

from jaxpfl import data
from jaxpfl.data.sources import planted
from jaxpfl.runs.config import RunConfig
from jaxpfl.runs.setup import Experiment, require


def client_clusters(config: RunConfig, num_classes: int) -> np.ndarray | None:
    """True cluster of each client of a resolved config, by id; None if the split has none.

    It has clusters under the partition "clusters", and for planted data if every user is a client.
    """
    if config.partition == "clusters":
        clients = require(config.clients) + config.clients_apart
        return data.true_clusters(clients, require(config.clusters), num_classes, config.split_seed).member
    drawn = config.data.partition(":")[0] == "planted" and config.partition == "natural"
    if drawn and config.clients is None and config.users_per_client in (None, 1):
        return planted.draw_planted(planted.parse(config.data)).member
    return None


def rand_index(experiment: Experiment, found: np.ndarray | None) -> list[float] | None:
    """Adjusted Rand index of the clusters found, [S, m], in each run; None if none were found, or none are known."""
    if found is None:
        return None
    truth = client_clusters(experiment.config, experiment.task.num_classes)
    if truth is None:
        return None
    from sklearn.metrics import adjusted_rand_score

    own = truth[np.asarray(experiment.federation.client_ids)]
    return [float(adjusted_rand_score(own, clusters)) for clusters in found]
