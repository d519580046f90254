"""Local training of one client in a round: steps on mini-batches of its own examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpfl import trees
from jaxpfl.algorithms.parts.optimizers import Optimizer, resolve
from jaxpfl.data import batching
from jaxpfl.errors import JaxpflError, unknown_name
from jaxpfl.models import Task
from jaxpfl.privacy.mechanism import Mechanism
from jaxpfl.privacy.step_noise import StepNoise
from jaxpfl.protocol import ClientContext, Gradients
from jaxpfl.similarity.graphs import Graph
from jaxpfl.types import Array, ClientData, Key, Metrics, PyTree, Scalar

WEIGHTINGS = ("examples", "uniform")


class Batch(NamedTuple):
    """Mini-batch of b slots: inputs [b, ...] (zero where not valid), labels [b], and a mask of real slots, [b]."""

    x: PyTree
    y: Array
    valid: Array

    @classmethod
    def whole(cls, data: ClientData) -> Batch:
        """Batch of all examples of a client."""
        return cls(*batching.take_all(data))

    def mean(self, values: Array) -> Array:
        """Mean of per-example values [b] over the real examples."""
        return trees.valid_mean(self.valid, values)


@dataclass(frozen=True, eq=False)
class LocalWork:
    """Static choices of a round: the clients' training and the server's use of the uploads.

    Attributes:
      sizes: numbers of training examples by client, on the host; static bounds of the compiled program.
      steps: tau, local steps in a round.
      batch_size: b; a client with fewer examples uses all of them.
      draw: drawing of mini-batches: ``epoch``, ``step`` or ``replacement``.
      optimizer: the client optimizer, by name with arguments (`optimizers`) or as a factory; its state is new in every
        round.
      server_optimizer: the server optimizer, for methods that average (`with_server_optimizer`).
      weighting: of the clients in the mean, for methods that weigh them: by ``examples``, or ``uniform``.
      privacy: the mechanism of differential privacy. `privatize` applies it to any sum of uploads; methods use it for
        noise in every step (`released`) and for private servers of their own (AdaMix).
      unseen: number of clients, the last of ``sizes``, that are never trained.
      graph: graph of the trained clients in the order of the stack, for methods that need one (`Method.graph`).
      bounds: ``sizes`` are those that clients may have, of an unknown number of clients.

    Raises:
      JaxpflError: if an optimizer or its argument, or the weighting is unknown.
    """

    sizes: np.ndarray
    steps: int
    batch_size: int
    draw: str = "epoch"
    optimizer: Optimizer = "sgd"
    server_optimizer: Optimizer = "sgd"
    weighting: str = "examples"
    privacy: Mechanism | None = None
    unseen: int = 0
    graph: Graph | None = None
    bounds: bool = False

    @property
    def num_clients(self) -> int:
        """Number m of trained clients.

        Raises:
          JaxpflError: if it is unknown.
        """
        if self.bounds:
            raise JaxpflError("the local work is that of any number of clients: it has no num_clients")
        return len(self.sizes) - self.unseen

    def __post_init__(self) -> None:
        resolve(self.optimizer)
        resolve(self.server_optimizer)
        if self.weighting not in WEIGHTINGS:
            raise unknown_name("weighting", self.weighting, WEIGHTINGS)

    def weight(self, data: ClientData) -> Array:
        """Weight of a client in the mean: its number of examples n_i, or 1, []."""
        return data.size.astype(jnp.result_type(float)) if self.weighting == "examples" else jnp.ones(())

    @property
    def step_noise(self) -> StepNoise | None:
        """Clipping and noise of every local step; None without them."""
        return None if self.privacy is None else self.privacy.step_noise

    def released(self, key: Key, gradient: PyTree) -> PyTree:
        """Gradient of uploaded parameters, clipped and noised where `step_noise` asks for it; ``key`` is the step's."""
        return gradient if self.step_noise is None else self.step_noise.of_parameters(key, gradient)

    def batches(self, steps: int) -> batching.Batching:
        """Batches of ``steps`` steps in a round.

        Raises:
          JaxpflError: for an unknown ``draw``, or a batch size below one.
        """
        return batching.plan_batches(self.sizes, steps, self.batch_size, self.draw)

    def descent(self, rate: Scalar, weight_decay: Scalar) -> optax.GradientTransformation:
        """Client optimizer at a learning rate, of ``gradient + weight_decay parameters``.

        An optimizer with a weight decay of its own (``adamw``) applies that as well, decoupled from the gradient.
        """
        return optax.chain(optax.add_decayed_weights(weight_decay), resolve(self.optimizer)(rate))


def taken(steps: int, limit: Scalar) -> Scalar:
    """Number of steps taken, the lesser of ``steps`` and ``limit``; a Python int where both are."""
    # A Python int keeps the trip count static; min() on a tracer would not.
    return min(steps, limit) if isinstance(limit, int) else jnp.minimum(steps, limit)


def gradients(steps: int, *, each: int = 1, personalize: int = 0) -> Gradients:
    """Gradient counts of a client whose round is ``steps`` steps of ``each`` gradients, in the cohort or outside it."""
    return Gradients(
        update=lambda limit, message: each * taken(steps, limit),
        personalize=personalize,
        idle=lambda limit: each * taken(steps, limit),
    )


Step = Callable[..., tuple[PyTree, Metrics]]
"""``(key, carry, batch) -> (carry, metrics)``; with several batches for each step, one argument more for each."""

_Loop = tuple[PyTree, Metrics, tuple[Batch, ...] | None]


def batch_loss(task: Task) -> Callable[[PyTree, Key, Batch], Array]:
    """Mean loss of the task over a batch, as ``(parameters, key, batch) -> []``; the key is for dropout."""

    def loss(params: PyTree, key: Key, batch: Batch) -> Array:
        return batch.mean(task.loss(task.model.apply(params, batch.x, key=key, train=True), batch.y))

    return loss


def run_steps(
    work: LocalWork,
    key: Key,
    ctx: ClientContext,
    data: ClientData,
    step: Step,
    carry: PyTree,
    *,
    metrics: tuple[str, ...],
    steps: int | None = None,
    batches_each: int = 1,
) -> tuple[PyTree, Metrics]:
    """Run ``steps`` local steps (default: tau), or ``ctx.step_limit`` where that is less.

    Args:
      key: the client's key of this round; step t gets ``fold_in(key, t)``.
      data: the client's examples.
      step: ``(key, carry, batch) -> (carry, metrics)``.
      carry: what the steps hand on.
      metrics: names of the scalars that ``step`` returns.
      batches_each: how many mini-batches, drawn one after the other, each step is given.

    Returns:
      The final carry, and each metric's mean over the steps taken.
    """
    steps = work.steps if steps is None else steps
    plan = work.batches(steps * batches_each)
    limit = taken(steps, ctx.step_limit)
    zeros = {name: jnp.zeros(()) for name in metrics}
    if isinstance(limit, int) and limit == 0:
        return carry, zeros
    indices, valid = batching.draw_batches(plan, ctx.batch_key, ctx.participations + ctx.idle_rounds, data.mask)

    if not plan.full and 2 * plan.steps * plan.batch_size <= data.mask.shape[0]:
        # Far fewer examples than the client has: fetched at once, its data need not be copied out of the stack.
        fetched = Batch(*batching.take(data, indices, valid, plan))

        def batch_of(t: Scalar) -> Batch:
            return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, t, keepdims=False), fetched)

    else:

        def batch_of(t: Scalar) -> Batch:
            return Batch(*batching.take(data, indices[t], valid[t], plan))

    def batches_of(t: Scalar) -> tuple[Batch, ...]:
        return tuple(batch_of(t * batches_each + nth) for nth in range(batches_each))

    def body(t: Array, loop: _Loop) -> _Loop:
        carry, sums, batches = loop
        carry, values = step(jax.random.fold_in(key, t), carry, *(batches_of(t) if batches is None else batches))
        following = None if batches is None else batches_of(jnp.minimum(t + 1, steps - 1))
        return carry, jax.tree.map(jnp.add, sums, values), following

    # The next batch travels in the carry: fetched within the step, XLA fuses the fetching into whatever reads the
    # batch, and a convolution that reads each pixel many times fetches it as often (5 % of a step). A batch that is
    # the whole data set needs no fetching.
    first = None if plan.full else batches_of(0)
    carry, sums, _ = jax.lax.fori_loop(0, limit, body, (carry, zeros, first))
    return carry, {name: total / jnp.maximum(limit, 1) for name, total in sums.items()}


class Descent(NamedTuple):
    """State of a descent: the parameters, and the optimizer state (empty for plain SGD)."""

    params: PyTree
    memory: PyTree

    @classmethod
    def start(cls, optimizer: optax.GradientTransformation, params: PyTree) -> Descent:
        """Descent with a new optimizer state."""
        return cls(params, optimizer.init(params))

    def step(self, optimizer: optax.GradientTransformation, gradient: PyTree) -> Descent:
        """One step; with `LocalWork.descent` of SGD, to ``params - rate (gradient + weight_decay params)``."""
        updates, memory = optimizer.update(gradient, self.memory, self.params)
        return Descent(optax.apply_updates(self.params, updates), memory)


def train(
    work: LocalWork,
    task: Task,
    key: Key,
    ctx: ClientContext,
    data: ClientData,
    optimizer: optax.GradientTransformation,
    start: Descent,
    *,
    steps: int | None = None,
    anchor: PyTree | None = None,
    prox: Scalar = 0.0,
    uploaded: bool = False,
) -> tuple[Descent, Metrics]:
    """Take local steps on the task's mean loss, plus ``(prox/2) |w - anchor|^2`` where an anchor is given.

    Where the result is ``uploaded``, gradients pass through `LocalWork.released`.

    Returns:
      The final descent, and ``{"train_loss": mean over the steps of the mini-batch loss}`` without the proximal term.
    """
    loss = batch_loss(task)

    def step(key: Key, at: Descent, batch: Batch) -> tuple[Descent, Metrics]:
        value, gradient = jax.value_and_grad(loss)(at.params, key, batch)
        if uploaded:
            gradient = work.released(key, gradient)
        if anchor is not None:
            gradient = jax.tree.map(lambda g, w, a: g + prox * (w - a), gradient, at.params, anchor)
        return at.step(optimizer, gradient), {"train_loss": value}

    return run_steps(work, key, ctx, data, step, start, metrics=("train_loss",), steps=steps)


def sgd(
    work: LocalWork,
    task: Task,
    key: Key,
    ctx: ClientContext,
    data: ClientData,
    params: PyTree,
    *,
    rate: Scalar,
    weight_decay: Scalar,
    steps: int | None = None,
    anchor: PyTree | None = None,
    prox: Scalar = 0.0,
    uploaded: bool = False,
) -> tuple[PyTree, Metrics]:
    """Local training from ``params`` by the client optimizer (plain SGD by default) with a new state.

    Returns:
      The parameters, and the metrics of `train`.
    """
    optimizer = work.descent(rate, weight_decay)
    start = Descent.start(optimizer, params)
    more = {"steps": steps, "anchor": anchor, "prox": prox, "uploaded": uploaded}
    end, metrics = train(work, task, key, ctx, data, optimizer, start, **more)
    return end.params, metrics
