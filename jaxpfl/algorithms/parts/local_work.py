"""Local training of one client: steps on mini-batches of its own examples, in a round or for fine-tuning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpfl.algorithms.parts import linear_kernel, optimizers
from jaxpfl.algorithms.parts.augmentation import Augmentation
from jaxpfl.algorithms.parts.hyper import SgdHyper
from jaxpfl.algorithms.parts.optimizers import Descent, Optimizer, PlainSgd, resolve
from jaxpfl.algorithms.parts.schedules import Schedule
from jaxpfl.core import trees
from jaxpfl.core.protocol import ClientContext, Gradients, LocalEpochs
from jaxpfl.core.randomness import Purpose, stream
from jaxpfl.core.types import Array, ClientData, Key, Metrics, PyTree, Scalar
from jaxpfl.data import batching
from jaxpfl.data.passes import size_classes, switch_length
from jaxpfl.models import Task
from jaxpfl.models.base import Statistics
from jaxpfl.privacy.guarded import GuardedBatch, GuardedData
from jaxpfl.privacy.mechanism import Mechanism, StepNoise
from jaxpfl.similarity.graphs import Graph
from jaxpfl.support.errors import JaxpflError, unknown_name

WEIGHTINGS = ("examples", "uniform")


class Batch(NamedTuple):
    """Mini-batch with b slots: inputs [b, ...], labels [b], and a mask [b], true for slots that contain an example.

    The inputs of other slots are zero.
    """

    x: PyTree
    y: Array
    valid: Array

    @classmethod
    def whole(cls, data: ClientData) -> Batch:
        """Make a batch of all examples of a client."""
        return cls(data.x, data.y, data.mask)

    def mean(self, values: Array) -> Array:
        """Mean of per-example values [b] over the slots with an example."""
        return trees.valid_mean(self.valid, values)


@dataclass(frozen=True, eq=False)
class LocalWork:
    """Static settings of the clients' training in a round, and of the server's aggregation.

    Attributes:
      sizes: each client's number of training examples, as host values, because they determine static bounds in the
        compiled program.
      steps: number tau of local steps in a round; if work is in epochs, the largest number of steps that any client
        takes.
      batch_size: number b of examples in a mini-batch; a client with fewer examples uses all of them.
      draw: sampling of mini-batches: ``epoch``, ``step`` or ``replacement`` (`jaxpfl.data.batching`).
      optimizer: the client optimizer, as a name with arguments (`optimizers`) or a factory function. Every round starts
        with a new optimizer state, unless ``keeps_optimizer`` is true.
      server_optimizer: the server optimizer, for methods that average; see `with_server_optimizer`.
      weighting: clients' weights in the mean, ``examples`` or ``uniform``, for methods that weight clients.
      privacy: the mechanism of differential privacy. `privatize` applies the mechanism to any sum of uploads. The code
        of a method uses this attribute only for noise in every step (`released`) and in AdaMix's private server.
      unseen: number of clients that are never trained; they are the last clients in ``sizes``.
      graph: graph of the trained clients, in the order of ``sizes``, for methods that need a graph (`Method.graph`).
      epochs: number E of passes over a client's own examples in a round; None if all clients take ``steps`` steps.
      schedule: schedule of the learning rates, which the engine applies to any method (`schedules.scheduled`); None if
        each method decays its rates itself.
      clip: norm to which the gradient of each step is clipped (`descent`); None for no clipping.
      keeps_optimizer: whether clients keep their optimizer states; the engine then applies `optimizers.keeping`.
      augment: augmentation of every batch; None for no augmentation.

    Raises:
      JaxpflError: if an optimizer, an optimizer's argument or the weighting is unknown.
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
    epochs: int | None = None
    schedule: Schedule | None = None
    clip: float | None = None
    keeps_optimizer: bool = False
    augment: Augmentation | None = None

    @property
    def own_steps(self) -> LocalEpochs | None:
        """Each client's number of steps, computed from its examples; None if all clients take ``steps`` steps."""
        return None if self.epochs is None else LocalEpochs(self.epochs, self.batch_size)

    @property
    def is_plain_sgd(self) -> bool:
        """True if a local step is SGD without momentum or clipping, so that each parameter changes independently."""
        return self.optimizer == "sgd" and self.clip is None

    def replace_epochs(self, epochs: int) -> LocalWork:
        """Return the same local work with ``epochs`` passes over each client's own examples."""
        steps = int(LocalEpochs(epochs, self.batch_size).on_host(self.sizes).max(initial=1))
        return replace(self, steps=steps, epochs=epochs)

    def refuse_mixing(self, method: str) -> None:
        """Refuse an augmentation that mixes examples (mixup), for methods that use labels outside the loss.

        Raises:
          JaxpflError: if ``augment`` mixes examples; the error names the method.
        """
        if self.augment is not None and self.augment.mixes:
            raise JaxpflError(f"{method} does not support augment = mixup: it requires one label for each example")

    @property
    def num_clients(self) -> int:
        """Number m of clients that are trained."""
        return len(self.sizes) - self.unseen

    def __post_init__(self) -> None:
        resolve(self.optimizer)
        resolve(self.server_optimizer)
        if self.weighting not in WEIGHTINGS:
            raise unknown_name("weighting", self.weighting, WEIGHTINGS)

    def weight(self, data: ClientData) -> Array:
        """Weight of a client in the mean, []: its number of examples or, with uniform weighting, 1."""
        return data.size.astype(jnp.result_type(float)) if self.weighting == "examples" else jnp.ones(())

    @property
    def step_noise(self) -> StepNoise | None:
        """Clipping and noise that are applied in every local step; None if the mechanism has no noise in steps."""
        return None if self.privacy is None else self.privacy.step_noise

    def released(self, key: Key, gradient: PyTree) -> PyTree:
        """If `step_noise` is set, clip the gradient of uploaded parameters and add noise; otherwise return it
        unchanged.

        Args:
          key: key of the local step.
          gradient: gradient with respect to the uploaded parameters.
        """
        return gradient if self.step_noise is None else self.step_noise.release_gradient(key, gradient)

    def batches(self, steps: int, own: LocalEpochs | None = None) -> batching.Batching:
        """Plan the batches of a round of ``steps`` steps.

        If ``own`` (the clients' own numbers of steps) is given, work is in epochs, and clients with fewer examples take
        fewer steps.

        Raises:
          JaxpflError: if ``draw`` is unknown, or the batch size is below one.
        """
        return batching.plan_batches(self.sizes, steps, self.batch_size, self.draw, own)

    def step_limit(self, steps: int | None, ctx: ClientContext, data: ClientData) -> Scalar:
        """Number of steps that a client takes: the smaller of ``steps`` and the round's limit.

        If ``steps`` is None, tau (`LocalWork.steps`) is used, or the client's own number of steps if local work is
        specified in epochs.
        """
        limit = steps_within(self.steps if steps is None else steps, ctx.step_limit)
        own = self.own_steps
        return limit if steps is not None or own is None else jnp.minimum(limit, own.steps(data.size))

    def descent(self, rate: Scalar, weight_decay: Scalar) -> optax.GradientTransformation:
        """Return the client optimizer at a learning rate. Its input is ``gradient + weight_decay * parameters``.

        An optimizer that has its own weight decay (``adamw``) also applies this decay, decoupled from the gradient.
        With ``clip``, the gradient is first multiplied by ``min(1, clip / |gradient|)``.
        """
        steps = optax.add_decayed_weights(weight_decay), resolve(self.optimizer)(rate)
        if self.is_plain_sgd:
            return PlainSgd(*optax.chain(*steps))
        return optax.chain(*steps) if self.clip is None else optax.chain(optax.clip_by_global_norm(self.clip), *steps)


def steps_within(steps: int, limit: Scalar) -> Scalar:
    """Return the smaller of ``steps`` and ``limit``, as a Python int if ``limit`` is a Python int."""
    # Python's min returns a Python int, so that the trip count is static; it cannot compare traced scalars.
    return min(steps, limit) if isinstance(limit, int) else jnp.minimum(steps, limit)


def gradients(steps: int, *, each: int = 1, personalize: int | LocalEpochs = 0) -> Gradients:
    """Make the `Gradients` of a client that takes ``steps`` steps with ``each`` gradients per step in every round.

    The count is the same for rounds in the cohort and outside the cohort.
    """
    return Gradients(
        update=lambda limit, message: each * steps_within(steps, limit),
        personalize=personalize,
        idle=lambda limit: each * steps_within(steps, limit),
    )


Step = Callable[..., tuple[PyTree, Metrics]]
"""One local step, ``(key, carry, batch) -> (carry, metrics)``; a step on several batches takes each as an argument."""

_Loop = tuple[PyTree, Metrics, tuple[Batch, ...] | None]


def batch_loss(task: Task) -> Callable[[PyTree, Key, Batch], Array]:
    """Return the function ``(parameters, key, batch) -> []`` that computes the task's mean loss over a batch.

    Dropout layers use the key.
    """

    def loss(params: PyTree, key: Key, batch: Batch) -> Array:
        return batch.mean(task.loss(task.model.apply(params, batch.x, key=key, train=True), batch.y))

    return loss


def loss_gradient(task: Task) -> Callable[[PyTree, Key, Batch], tuple[Array, PyTree]]:
    """Return the function that computes `batch_loss` and its gradient.

    If privacy protects individual examples (``privacy.unit = example``), the loss is NaN, and the gradient is the noisy
    mean of the examples' clipped gradients.
    """

    def example_loss(params: PyTree, key: Key, x: PyTree, y: Array) -> Array:
        return task.loss(task.model.apply(params, x, key=key, train=True), y)

    whole = jax.value_and_grad(batch_loss(task))

    def gradient(params: PyTree, key: Key, batch: Batch) -> tuple[Array, PyTree]:
        if isinstance(batch, GuardedBatch):
            return batch.gradient(example_loss, params, key)
        return whole(params, key, batch)

    return gradient


def observed_gradient(
    task: Task, statistics: Statistics
) -> Callable[[PyTree, Key, Batch], tuple[tuple[Array, PyTree], PyTree]]:
    """Return the function that computes the loss, the running statistics after the batch, and the gradient.

    The gradient is zero for running statistics.

    Raises:
      JaxpflError: when the function is called, if privacy protects individual examples.
    """

    def loss(params: PyTree, key: Key, batch: Batch) -> tuple[Array, PyTree]:
        if isinstance(batch, GuardedBatch):
            raise JaxpflError("privacy.unit = example does not support BatchNorm, which mixes examples")
        logits, moved = statistics.observe(params, batch.x, key=key, valid=batch.valid)
        return batch.mean(task.loss(logits, batch.y)), statistics.select(moved)

    return jax.value_and_grad(loss, has_aux=True)


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
    beside: PyTree = None,
) -> tuple[PyTree, Metrics]:
    """Run ``steps`` local steps, or ``ctx.step_limit`` steps if that number is smaller.

    Args:
      work: static settings of the local work.
      key: the client's key for this round; step t uses ``fold_in(key, t)``.
      ctx: information about the run, including the limit on the number of steps.
      data: the client's examples.
      step: function of one step, ``(key, carry, batch) -> (carry, metrics)``.
      carry: state that each step receives from the previous step.
      metrics: names of the scalars that ``step`` returns.
      steps: number of steps; defaults to tau (`LocalWork.steps`), or to the client's own number of steps if local work
        is specified in epochs.
      batches_each: number of consecutive mini-batches that each step receives.
      beside: tree of arrays [capacity, ...] with a row for each of the client's examples. The x of a batch is then the
        pair (inputs, rows of ``beside`` for the same examples).

    Returns:
      The carry after the last step, and each metric's mean over the steps taken.
    """
    limit = work.step_limit(steps, ctx, data)
    own = work.own_steps if steps is None else None
    steps = work.steps if steps is None else steps
    plan = work.batches(steps * batches_each, own and own._replace(batches=batches_each))
    zeros, carry = {name: jnp.zeros(()) for name in metrics}, optimizers.resume_memories(carry)
    if isinstance(limit, int) and limit == 0:
        return optimizers.record_memories(carry), zeros
    if isinstance(data, GuardedData):
        if beside is not None:
            data.refuse("stores a value for each example")
        guarded = data.batches(steps, own, batches_each)

        def private_body(t: Array, loop: tuple[PyTree, Metrics, Array]) -> tuple[PyTree, Metrics, Array]:
            batches = guarded(t)
            carry, values = step(jax.random.fold_in(key, t), loop[0], *batches)
            return carry, jax.tree.map(jnp.add, loop[1], values), loop[2] + batches[-1].loss

        end, sums, losses = jax.lax.fori_loop(0, limit, private_body, (carry, zeros, jnp.zeros(())))
        data.report(losses / jnp.maximum(limit, 1))
        return optimizers.record_memories(end), {name: total / jnp.maximum(limit, 1) for name, total in sums.items()}
    indices, valid = batching.draw_batches(plan, ctx.batch_key, ctx.participations + ctx.idle_rounds, data.size)

    def run(plan: batching.Batching) -> tuple[PyTree, Metrics]:
        whole = _batch(data, beside, indices, valid, plan) if plan.full else None

        def batches_of(t: Scalar) -> tuple[Batch, ...]:
            if whole is not None:
                return (whole,) * batches_each
            places = (t * batches_each + nth for nth in range(batches_each))
            return tuple(_batch(data, beside, indices[place], valid[place], plan) for place in places)

        def body(t: Array, loop: _Loop) -> _Loop:
            carry, sums, batches = loop
            now, key_of_step = batches_of(t) if batches is None else batches, jax.random.fold_in(key, t)
            if work.augment is not None:
                now = tuple(_augmented(work.augment, key_of_step, nth, batch, beside) for nth, batch in enumerate(now))
            carry, values = step(key_of_step, carry, *now)
            following = None if batches is None else batches_of(jnp.minimum(t + 1, steps - 1))
            return carry, jax.tree.map(jnp.add, sums, values), following

        # The carry contains the next batch. If the step gathered its own batch, XLA would fuse the gather into the
        # operations that use the batch. A convolution, which reads each pixel many times, would then gather each pixel
        # many times (5 % of a step's time). A batch of all examples is gathered only once. Small runs on a GPU wait for
        # launches, and a fused gather is one launch less.
        first = None if plan.full or optimizers.one_vector.value else batches_of(0)
        end, sums, _ = jax.lax.fori_loop(0, limit, body, (carry, zeros, first))
        return end, {name: total / jnp.maximum(limit, 1) for name, total in sums.items()}

    if not plan.full:
        end, means = run(plan)
    else:
        # A full batch has the smallest length in `size_classes` that is not below the client's number of examples.
        lengths = size_classes(work.sizes)
        end, means = switch_length(lambda length: run(replace(plan, batch_size=length)), data.size, lengths)
    return optimizers.record_memories(end), means


def _augmented(augment: Augmentation, key: Key, nth: int, batch: Batch, beside: PyTree) -> Batch:
    """Augment the nth batch of a step; the rows of ``beside`` (see `run_steps`) do not change."""
    if beside is not None and augment.mixes:
        raise JaxpflError("this method does not support augment = mixup: it stores a value for each example")
    x, rows = (batch.x, None) if beside is None else batch.x
    x, y = augment(stream(key, Purpose.AUGMENTATION, nth), x, batch.y, batch.valid)
    return batch._replace(x=x if beside is None else (x, rows), y=y)


def _batch(data: ClientData, beside: PyTree, indices: Array, valid: Array, plan: batching.Batching) -> Batch:
    """Return the batch of a step, together with the rows of ``beside`` (see `run_steps`) for the same examples."""
    batch = Batch(*batching.take(data, indices, valid, plan))
    if beside is None:
        return batch
    return batch._replace(x=(batch.x, batching.rows_beside(beside, indices, batch.valid, plan)))


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
    """Take local steps on the task's mean loss, plus ``(prox/2) |w - anchor|^2`` if an anchor is given.

    Here w are the parameters in training, at first the parameters in ``start``.

    If the trained parameters are ``uploaded``, gradients pass through `LocalWork.released`. Running statistics among
    the parameters are updated from the batches; neither the optimizer nor the proximal term changes these statistics.

    Returns:
      The parameters and optimizer state after the last step, and ``{"train_loss": ...}``, the mini-batch loss without
      the proximal term, averaged over the steps.
    """
    statistics, plain = task.statistics, loss_gradient(task)

    def step(key: Key, at: Descent, batch: Batch) -> tuple[Descent, Metrics]:
        if statistics is None:
            moved, (value, gradient) = None, plain(at.params, key, batch)
        else:
            (value, moved), gradient = observed_gradient(task, statistics)(at.params, key, batch)
        if uploaded:
            gradient = work.released(key, gradient)
        if anchor is not None:
            pulled = at.stored_form(gradient), at.stored, start.stored_form(anchor)
            gradient = jax.tree.map(lambda g, w, a: g + prox * (w - a), *pulled)
        if statistics is None:
            return at.step(optimizer, gradient), {"train_loss": value}
        # Running statistics have a zero gradient, so that they do not contribute to the gradient's norm.
        new = at.step(optimizer, statistics.put(trees.unpack(gradient), jax.tree.map(jnp.zeros_like, moved)))
        return new.replace_params(statistics.put(new.params, moved)), {"train_loss": value}

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
    """Train locally from ``params`` with the client optimizer (plain SGD by default) and a new optimizer state.

    Returns:
      The trained parameters, and the metrics of `train`.
    """
    coefficients = rate, weight_decay, 0.0 if anchor is None else prox
    fused = linear_kernel.local_sgd(work, task, ctx, data, params, coefficients, steps, anchor, uploaded)
    if fused is not None:
        return fused
    optimizer = work.descent(rate, weight_decay)
    start = Descent.start(optimizer, params)
    more = {"steps": steps, "anchor": anchor, "prox": prox, "uploaded": uploaded}
    end, metrics = train(work, task, key, ctx, data, optimizer, start, **more)
    return end.params, metrics


def fine_tuning(method: str, work: LocalWork, steps: int, epochs: int) -> LocalWork | None:
    """Return the local work of fine-tuning, or None if fine-tuning has no steps.

    Args:
      method: the method's name, for errors.
      work: local work in a round.
      steps: the option ``fine_tune_steps``.
      epochs: the option ``fine_tune_epochs``. If 0, ``steps`` is used; otherwise ``steps`` is ignored.

    Raises:
      JaxpflError: if ``steps`` or ``epochs`` is negative.
    """
    for name, value in (("fine_tune_steps", steps), ("fine_tune_epochs", epochs)):
        if value < 0:
            raise JaxpflError(f"{method}.{name} must be >= 0, got {value}")
    if epochs:
        return work.replace_epochs(epochs)
    return replace(work, steps=steps, epochs=None) if steps else None


def fine_tuning_steps(tuning: LocalWork | None) -> int | LocalEpochs:
    """Number of fine-tuning steps; a `LocalEpochs` if the number depends on the client's number of examples."""
    return 0 if tuning is None else tuning.own_steps or tuning.steps


def fine_tuned(
    tuning: LocalWork | None,
    task: Task,
    key: Key,
    hp: SgdHyper,
    ctx: ClientContext,
    data: ClientData,
    params: PyTree,
    round_steps: int,
    factor: Scalar = 1.0,
) -> PyTree:
    """Return the parameters after fine-tuning from ``params``, or ``params`` if fine-tuning has no steps.

    The learning rate is ``factor`` times the learning rate of the last round, which had ``round_steps`` local steps.
    """
    if tuning is None:
        return params
    rate = factor * hp.lr * hp.decay(jnp.maximum(ctx.round - 1, 0), round_steps)
    return sgd(tuning, task, key, ctx, data, params, rate=rate, weight_decay=hp.weight_decay)[0]
