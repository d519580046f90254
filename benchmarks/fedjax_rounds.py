"""The contender fedjax: its own FedAvg on the same split, in an interpreter that has fedjax but need not have jaxpfl.

fedjax 0.0.17 calls ``jax.tree_map``, which newer versions of JAX no longer have, so `work` defines it. fedjax's jit
backend is used. Its backend for several devices (pmap) calls more functions that no longer exist, and was no faster on
two cores.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .worker import Contender


def work(settings: dict[str, Any]) -> Contender:
    """Run rounds of FedAvg on the clients in the file ``data`` (see `save`)."""
    import jax

    if not hasattr(jax, "tree_map"):
        jax.tree_map = jax.tree.map  # type: ignore[attr-defined]
    import fedjax  # pyright: ignore[reportMissingImports]
    from fedjax.algorithms import fed_avg  # pyright: ignore[reportMissingImports]
    from jax.example_libraries import stax

    with np.load(settings["data"]) as saved:
        parts = [np.split(saved[name], np.cumsum(saved["sizes"])[:-1]) for name in ("x", "y")]
        test = {"x": saved["x_test"], "y": saved["y_test"]}
    pool = stax.MaxPool((2, 2), (2, 2))
    layers = [stax.Conv(6, (5, 5)), stax.Relu, pool, stax.Conv(16, (5, 5)), stax.Relu, pool, stax.Flatten]
    layers += [stax.Dense(120), stax.Relu, stax.Dense(84), stax.Relu, stax.Dense(10)]
    model = fedjax.create_model_from_stax(
        *stax.serial(*layers),
        sample_shape=(-1, 28, 28, 1),
        train_loss=lambda batch, logits: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], logits),
        eval_metrics={"accuracy": fedjax.metrics.Accuracy()},
    )
    batches = fedjax.ShuffleRepeatBatchHParams(
        batch_size=settings["batch"], num_steps=settings["steps"], num_epochs=None
    )
    sgd = fedjax.optimizers.sgd
    algorithm = fed_avg.federated_averaging(fedjax.model_grad(model), sgd(0.1), sgd(1.0), batches)
    clients = [fedjax.ClientDataset({"x": x, "y": y}) for x, y in zip(*parts, strict=True)]
    state, key = algorithm.init(model.init(jax.random.PRNGKey(0))), jax.random.PRNGKey(1)

    def run(rounds: int) -> None:
        nonlocal state, key
        for _ in range(rounds):
            key, *keys = jax.random.split(key, len(clients) + 1)
            state, _ = algorithm.apply(state, list(zip(range(len(clients)), clients, keys, strict=True)))
        jax.block_until_ready(state.params)

    def facts() -> dict[str, Any]:
        scores = fedjax.evaluate_model(model, state.params, [test])
        return {"accuracy": float(scores["accuracy"]), "jax": jax.__version__}

    return Contender(run, facts)


def save(path: str, federation: Any) -> None:
    """Write the clients' examples, one client after the other, and all test examples, as plain NumPy arrays."""
    train, test = federation.train, federation.test
    np.savez(
        path,
        x=train.x[train.mask],
        y=train.y[train.mask],
        sizes=train.mask.sum(axis=1),
        x_test=test.x[test.mask],
        y_test=test.y[test.mask],
    )
