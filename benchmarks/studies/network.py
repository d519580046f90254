r"""Study of planted client clusters: how well methods recover the clusters, and the error of each client's model.

`data.planted` draws clients in k clusters, and each cluster has a different logistic regression. Every method trains
the same model (softmax regression) for the same number of rounds and local steps, with full-batch gradients and the
same learning rate. Each method is trained once for each value of one hyper-parameter:

- ``network-lasso``: lambda, on a graph of the clients' nearest neighbors;
- ``ditto`` and ``pfedme``: lambda; at every lambda, a step of pFedMe on w halves the distance from w to theta;
- ``local`` and ``fedavg``: weight decay, because they have no lambda;
- ``ifca``: the seed of the initialization, to which IFCA is sensitive; IFCA is given the true k.

For each method, one value is chosen by the loss on validation examples. The results at all values are reported. The
clusters found by the network lasso are the groups of clients whose models it fuses; the network lasso is not given k.
For every other method, clients with the same model form a cluster. If there are more than k distinct models, k-means
with the true k clusters them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import algorithms, data
from jaxpfl.algorithms import LocalWork
from jaxpfl.core import checks, full_precision
from jaxpfl.core.types import Federation
from jaxpfl.data.sources.planted import Planted, PlantedSettings
from jaxpfl.engine.client_graph import client_graph
from jaxpfl.engine.fit import Fit, train
from jaxpfl.engine.spec import RunSpec
from jaxpfl.engine.tasks import make_task
from jaxpfl.estimators import clustering
from jaxpfl.similarity import graphs
from jaxpfl.similarity.graphs import Graph
from jaxpfl.studies.repetitions import measure
from jaxpfl.studies.report import Curve, number, plus_minus, write_curves
from jaxpfl.studies.study import Block, Results, Settings, Study, within
from jaxpfl.support.console import new_table
from jaxpfl.support.errors import JaxpflError, unknown_name

METHODS = ("network-lasso", "local", "fedavg", "ifca", "ditto", "pfedme")
MEASURES = ("error", "ari", "clusters", "accuracy", "validation")
SWEPT = {
    "network-lasso": "lam",
    "local": "weight_decay",
    "fedavg": "weight_decay",
    "ifca": "start",
    "ditto": "lam",
    "pfedme": "lam",
}
"""Hyper-parameter that is varied for each method."""

_STARTS, _LLOYD = 10, 50
"""Number of k-means starts, and number of Lloyd steps from each start."""


def _check_method(name: str, method: str) -> None:
    if method not in METHODS:
        raise unknown_name("method of the study", method, METHODS)


@dataclass(frozen=True)
class NetworkSettings(Settings):
    """Settings of the study.

    There are m clients in k clusters; the coefficients of each cluster have the norm ``strength``.
    """

    clients: int = 50
    """Number of clients, m."""
    clusters: int = 5
    """Number of clusters of nearly equal size, k."""
    samples: int = 40
    """Examples per client; a quarter of them are for validation."""
    dim: int = 10
    """Dimension, d."""
    strength: float = 3.0
    """Norm of a cluster's coefficients; large values give almost noiseless labels."""
    strengths: tuple[float, ...] = within((0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0), checks.positive)
    """Values of lambda and of the weight decay; IFCA has as many initializations."""
    methods: tuple[str, ...] = within(METHODS, _check_method)
    """Methods to compare."""
    graph: Literal["models", "data", "features"] = "models"
    """Space in which the network lasso finds nearest neighbors; inputs do not reveal the clusters, but models do."""
    neighbours: int = within(5, checks.count)
    """Neighbors of each client; if there are as many as clients in its cluster, some are in other clusters."""
    rounds: int = within(100, checks.count)
    """Number of rounds; all clients take part."""
    local_steps: int = within(5, checks.count)
    """Full-gradient steps per client and round."""
    rate: float = within(0.5, checks.positive)
    """Learning rate of every method."""
    repetitions: int = within(3, checks.count)
    """Number of independent draws of clusters and clients, for the standard errors."""
    seed: int = 0
    """Seed of every random draw."""

    def check(self) -> None:
        """Check the settings.

        Raises:
          JaxpflError: if a setting is out of range; the message names the setting, its value and the allowed values.
        """
        super().check()
        if not 2 <= self.clusters <= self.clients:
            raise JaxpflError(f"clusters must be from 2 to the number of clients, {self.clients}, got {self.clusters}")
        if self.neighbours >= self.clients:
            raise JaxpflError(f"neighbours must be below the number of clients, {self.clients}, got {self.neighbours}")
        if self.samples < 2:
            raise JaxpflError(f"samples must be at least 2 (to train and to validate), got {self.samples}")
        self.population(0).check()

    def population(self, repetition: int) -> PlantedSettings:
        """Settings of the planted clients in a repetition."""
        return PlantedSettings(
            clients=self.clients,
            clusters=self.clusters,
            examples=self.samples,
            dim=self.dim,
            strength=self.strength,
            seed=self.seed + repetition,
        )


def neighbours(federation: Federation, given: NetworkSettings) -> Graph:
    """Graph of the clients' nearest neighbors."""
    work = LocalWork(np.asarray(federation.train.size), given.local_steps, given.samples)
    task = make_task("linear", federation, 2)
    return client_graph(given.graph, federation, task, work, neighbours=given.neighbours)


def graph_scores(graph: Graph, truth: Planted) -> dict[str, float]:
    """Scores of the graph, which do not depend on a method.

    Returns:
      ``ari``: adjusted Rand index of the graph's connected components. ``components``: number of connected components.
      ``crossing``: fraction of edges that join clients of different clusters.
    """
    from sklearn.metrics import adjusted_rand_score

    components = graphs.components(graph, np.ones(graph.edges, bool))
    return {
        "ari": float(adjusted_rand_score(truth.member, components)),
        "components": float(len(np.unique(components))),
        "crossing": float((truth.member[graph.first] != truth.member[graph.second]).mean()),
    }


def trained(method: str, federation: Federation, graph: Graph, given: NetworkSettings) -> Fit:
    """Train a method at S values of its hyper-parameter (see `SWEPT`), in one program.

    The returned fit has one run for each value, [S].

    Args:
      method: name in `METHODS`.
      federation: m clients with d features and two classes; all of them take part in every round.
      graph: the clients' neighbors, for the network lasso.
      given: settings, with the S values in ``strengths``. pFedMe's eta (``lr_global``) is set to 1 / (2 lambda), so
        that a step halves the distance from w to theta.
    """
    values = np.array(given.strengths, np.float32)
    hyper: dict[str, Any] = {"lr": given.rate}
    seeds = [given.seed] * len(values)
    if method == "ifca":
        seeds = [given.seed + start for start in range(len(values))]
    else:
        hyper[SWEPT[method]] = values
    if method == "ditto":
        hyper["lr_personal"] = given.rate
    if method == "pfedme":
        hyper["lr_global"] = 0.5 / values
    spec = RunSpec(
        method=algorithms.get(method),
        model="linear",
        num_classes=2,
        rounds=given.rounds,
        local_steps=given.local_steps,
        batch_size=given.samples,
        seeds=seeds,
        hyper=hyper,
        options={"clusters": given.clusters} if method == "ifca" else {},
        graph=graph if method == "network-lasso" else None,
    )
    return train(spec, federation)


def measures(found: Fit, truth: Planted) -> dict[str, np.ndarray]:
    r"""Scores of every run, [S] each: error, adjusted Rand index, number of clusters, accuracy and validation loss.

    The error is :math:`mean_i |\hat\theta_i - \theta_{c(i)}|^2`, where :math:`c(i)` is the true cluster of client i.
    """
    from sklearn.metrics import adjusted_rand_score

    # The coefficients of the equivalent logistic regression are the difference between the two classes' columns.
    head = found.simulation.personal_models(found.state)["head"]
    theta = np.asarray(head["kernel"][..., 1] - head["kernel"][..., 0], float)
    error = ((theta - truth.theta[truth.member]) ** 2).sum(axis=-1).mean(axis=-1)
    labels = found.clusters
    if labels is None:
        labels = np.stack([distinct(models, len(truth.theta)) for models in theta])
    assert found.validation is not None
    return {
        "error": error,
        "ari": np.array([adjusted_rand_score(truth.member, own) for own in labels]),
        "clusters": np.array([len(np.unique(own)) for own in labels], float),
        "accuracy": found.personalized_accuracy.mean(axis=-1),
        "validation": np.asarray(found.validation["after"]["loss"][-1], float).mean(axis=-1),
    }


def distinct(models: np.ndarray, k: int) -> np.ndarray:
    """Cluster m models [m, d]: equal models form a cluster; if more than k are distinct, k-means finds k clusters."""
    _, same = np.unique(models, axis=0, return_inverse=True)
    if same.max() < k:
        return same.reshape(-1)
    # The key is fixed, so the clusters depend only on the models, and not on the study's seed.
    scores = jax.random.gumbel(jax.random.key(0), (len(models), _STARTS, k))
    points = jnp.asarray(models, jnp.float32)
    centers = full_precision.jit(clustering.kmeans, static_argnums=3)(
        scores, points, jnp.ones(len(models), bool), _LLOYD
    ).centers
    return np.asarray(clustering.square_distances(points, centers).argmin(axis=1))


def measured(given: NetworkSettings) -> dict[str, dict[str, np.ndarray]]:
    """Results of `measures` for every method, [repetitions, S] each, and of `graph_scores` as "graph", [repetitions].

    Raises:
      JaxpflError: as in `NetworkSettings.check`.
    """
    given.check()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ("graph", *given.methods)}
    for repetition in range(given.repetitions):
        truth = data.draw_planted(given.population(repetition))
        federation = data.federate(truth.source, partition="natural", validation_share=0.25)
        graph = neighbours(federation, given)
        found["graph"].append(graph_scores(graph, truth))
        for name in given.methods:
            found[name].append(measures(trained(name, federation, graph, given), truth))
    return {name: {part: np.stack([row[part] for row in rows]) for part in rows[0]} for name, rows in found.items()}


def simulated(given: NetworkSettings) -> Results:
    """Score every method at all of its values, and at the value chosen by validation loss in each repetition.

    Raises:
      JaxpflError: as in `NetworkSettings.check`.
    """
    found = measured(given)
    result = {
        "study": "network",
        "settings": dict(vars(given)),
        "graph": {part: _row(values) for part, values in found["graph"].items()},
        "methods": {name: _summary(name, found[name], given) for name in given.methods},
    }
    return Results(
        json=result,
        tables=lambda: tables(result),
        plots=lambda folder: write_plots(folder, result),
        series={f"{name}, {part}": values for name, rows in found.items() for part, values in rows.items()},
    )


def _summary(name: str, rows: dict[str, np.ndarray], given: NetworkSettings) -> dict[str, Any]:
    """Summary of one method from its scores in all runs."""
    values = list(range(len(given.strengths))) if name == "ifca" else list(given.strengths)
    loss = np.where(np.isfinite(rows["validation"]), rows["validation"], np.inf)
    best = loss.argmin(axis=1)
    return {
        "swept": SWEPT[name],
        "values": values,
        "chosen_values": [values[place] for place in best],
        "chosen": {part: _row(rows[part][np.arange(len(best)), best]) for part in MEASURES},
        "path": {part: [_row(column) for column in rows[part].T] for part in MEASURES},
    }


def _row(values: np.ndarray) -> dict[str, float | None]:
    found = measure(values)
    return {"mean": found.mean, "stderr": found.stderr}


_SHOWN = {"error": "parameter error", "ari": "adjusted Rand index", "clusters": "clusters"}


def tables(result: dict[str, Any]) -> list[Block]:
    """Table of the methods, and a line on the graph, from the study's summary."""
    given = result["settings"]
    table = new_table(
        f"{given['clients']} clients of {given['samples']} samples in {given['clusters']} planted clusters, "
        f"d = {given['dim']}, {given['repetitions']} repetitions",
        "at the value that the validation loss chooses in each repetition; ± one standard error; ARI: adjusted Rand "
        "index of the clusters; best: the least mean error on the path, by the true models",
    )
    table.add_column("method", style="bold", no_wrap=True)
    for name in ("chosen", "parameter error", "best", "ARI", "clusters", "accuracy"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, row in result["methods"].items():
        chosen = row["chosen"]
        values = sorted(set(row["chosen_values"]))
        table.add_row(
            name,
            f"{row['swept']} {', '.join(f'{value:g}' for value in values)}",
            plus_minus(chosen["error"]),
            number(min(point["mean"] for point in row["path"]["error"])),
            plus_minus(chosen["ari"]),
            f"{chosen['clusters']['mean']:.3g}",
            plus_minus(chosen["accuracy"], percent=True),
        )
    graph = {name: row["mean"] for name, row in result["graph"].items()}
    return [
        table,
        f"the graph alone ({given['graph']}, {given['neighbours']} neighbours): {100 * graph['crossing']:.1f} % of its "
        f"edges are between clusters, {graph['components']:.3g} components, ARI {graph['ari']:.3g}",
    ]


def write_plots(folder: Path, result: dict[str, Any]) -> list[Path]:
    """Plot errors, Rand indices and numbers of clusters against lambda (or weight decay); write into ``folder``.

    IFCA is drawn as a horizontal line at the score of its chosen initialization.
    """
    given = result["settings"]
    title = f"{given['clients']} clients in {given['clusters']} planted clusters"
    found = []
    for part, label in _SHOWN.items():
        curves = {}
        for name, row in result["methods"].items():
            if part == "clusters" and name != "network-lasso":  # only the network lasso is not given k
                continue
            if row["swept"] == "start":
                curves[f"{name}, chosen start"] = Curve.level(row["chosen"][part]["mean"], given["strengths"])
            else:
                curves[name] = Curve.measured(row["values"], row["path"][part])
        if part == "clusters":
            curves["true"] = Curve.level(given["clusters"], given["strengths"])
        style: dict[str, Any] = {"xlabel": "lambda; weight decay of local and fedavg", "ylabel": label, "title": title}
        scale = "x" if part == "ari" else "xy"
        found.append(write_curves(folder / f"{part}.png", given["strengths"], curves, logarithmic=scale, **style))
    return found


STUDY = Study(NetworkSettings, simulated)
