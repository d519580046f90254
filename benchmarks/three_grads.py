"""AdaPeD as three separate ``jax.grad`` calls, each with its own forward passes.

In the traced program, a step has 6 forward and 2 backward passes; in jaxpfl's program, 4 and 2. The measurement shows
whether XLA removes the repeated forward passes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpfl import Algorithm, LocalWork, Message, Task, Upload
from jaxpfl.algorithms import Batch, run_steps
from jaxpfl.algorithms.adaped import Shared, adaped
from jaxpfl.priors import distillation


def three_grads(task: Task, work: LocalWork) -> Algorithm:
    """Return AdaPeD built from the same parts, with two forward passes in each gradient; the numbers are the same."""

    def update(key: Any, hp: Any, ctx: Any, message: Message, theta: Any, splits: Any) -> tuple[Any, Upload, Any]:
        rates = (hp.lr * hp.decay(ctx.round, work.steps), hp.lr_global * hp.decay(ctx.round, work.steps))

        def step(key: Any, carry: Any, batch: Batch) -> tuple[Any, Any]:
            theta, mu, psi = carry

            def descend(params: Any, gradient: Any, rate: Any) -> Any:
                return jax.tree.map(lambda w, g: w - rate * (g + hp.weight_decay * w), params, gradient)

            def forward(params: Any) -> Any:
                return task.model.apply(params, batch.x, key=key, train=True)

            def divergence(teacher: Any, student: Any) -> Any:
                return batch.mean(distillation.divergence(teacher, student))

            def of_theta(theta: Any) -> tuple[Any, Any]:
                student = forward(theta)
                loss = batch.mean(task.loss(student, batch.y))
                return loss + divergence(forward(mu), student) / (2 * psi), loss

            def of_mu(mu: Any) -> Any:
                return divergence(forward(mu), forward(theta)) / (2 * psi)

            def of_psi(psi: Any) -> tuple[Any, Any]:
                f = divergence(forward(mu), forward(theta))
                return jnp.log(2 * psi) / 2 + hp.c * f / (2 * psi), f

            # The functions read theta and mu when they are called, so each gradient is at the newest values.
            gradient, loss = jax.grad(of_theta, has_aux=True)(theta)
            theta = descend(theta, gradient, rates[0])
            mu = descend(mu, jax.grad(of_mu)(mu), rates[1])
            gradient, f = jax.grad(of_psi, has_aux=True)(psi)
            psi = jnp.maximum(psi - hp.lr_psi * gradient, hp.psi_floor)
            return (theta, mu, psi), {"train_loss": loss, "divergence": f}

        carry, names = (theta, message.shared.mu, message.shared.psi), ("train_loss", "divergence")
        (theta, mu, psi), metrics = run_steps(work, key, ctx, splits.train, step, carry, metrics=names)
        return theta, Upload(optax.tree.sub(Shared(mu, psi), message.shared), jnp.ones(())), metrics

    base = adaped(task, work)
    return base._replace(clients=(base.clients[0]._replace(update=update),))


def disagreement(problem: Any) -> float:
    """Return the largest difference between the states of this AdaPeD and jaxpfl's after one round."""
    from .problems import simulate

    states = []
    for method in (None, three_grads):
        simulation = simulate(problem, method=method)
        state, _ = simulation.advance(simulation.init([0]), 1)
        states.append(jax.tree.leaves((state.server, state.clients)))
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(*states, strict=True))
