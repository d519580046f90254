r"""PersFL: personalization by distillation from the global model that is best for each client.

Stage 1 is FedAvg. In each round r of stage 1, client i evaluates the received global model mu_r on its validation
examples. The client keeps the model with the smallest cross-entropy CE as its teacher O_i:

.. math:: O_i = \mu_{r^*}, \qquad r^* = \arg\min_r CE(\mu_r; \text{validation}_i), \text{ the first of equals}

A client receives a global model in each round in which it takes part, and the last global model after training. The
teacher of a new client is the last global model. The server can also keep up to ``stored`` earlier models, about
equally spaced in rounds (`parts.servers`). The new client then chooses its teacher among these models and the last
model, by the loss on its validation examples; in a tie, it chooses the earliest model.

Stage 2 is local. The student is initialized with the teacher. With student logits a and teacher logits o, the student
minimizes, over the client's training examples,

.. math:: (1 - \lambda)\, CE(a) + \lambda T^2\, KL(\operatorname{softmax}(o / T) \,\|\, \operatorname{softmax}(a / T))

A student is trained for each pair of an imitation weight lambda and a temperature T in a grid, all in parallel. The
personalized model is the student with the greatest validation accuracy; in a tie, the student with the smallest lambda,
then with the smallest T. If lambda is 0, T has no effect, and only the smallest T is tried. The first argument of KL is
the teacher in the paper's Algorithm 1, but the student in its equation (3). PersFL-GD replaces KL by the cross-entropy
to the soft labels softmax(o / T).

The paper's experiments have 10 users with full participation, and use 60 / 20 / 20 % of each user's examples for
training, validation and testing. The data set is MNIST, in three partitions: DS-1 (4 classes per user), DS-2
(``--partition dirichlet-class --alpha 0.9``, 25 rounds) and DS-3 (``--classes-per-client 2 --sigma 2``: two classes per
user, log-normal numbers of examples). The command for DS-1 is::

    jaxpfl compare local fedavg persfl persfl-gd --data mnist --model mlp:100 --clients 10 --cohort 10 --pool-test
      --test-share 0.2 --validation-share 0.25 --classes-per-client 4 --rounds 100 --eval-every 100 --seeds 5

Without ``--pool-test``, the official test set is used only for testing. ``--set persfl.teacher=last`` selects the
paper's ablation, in which every teacher is the last global model.

Stage 2 uses the learning rate of the last round. Every evaluation repeats stage 2 for all students of the grid.

Reference: Divi et al. 2021, "Unifying Distillation with Personalization in Federated Learning",
https://arxiv.org/abs/2105.15191.
Reference: Divi et al. 2021, Table 2; Divi et al. 2021, Table 3; Divi et al. 2021, Table 7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpfl.algorithms.fedavg import fedavg
from jaxpfl.algorithms.parts.hyper import AveragingHyper
from jaxpfl.algorithms.parts.local_work import Batch, Descent, LocalWork, gradients, run_steps
from jaxpfl.algorithms.parts.servers import StoredModels, keeping_models
from jaxpfl.core import trees
from jaxpfl.core.protocol import Algorithm, ClientContext, Message, Upload
from jaxpfl.core.types import Array, Federation, Key, Metrics, PyTree, Splits
from jaxpfl.data import passes
from jaxpfl.models import PerClient, PerExample, Pooled, Task, correct
from jaxpfl.priors import distillation
from jaxpfl.support.errors import JaxpflError, shown

TEMPERATURES = (1.0, 5.0, 9.0, 13.0, 17.0, 21.0, 25.0)
IMITATIONS = (0.0, 0.25, 0.5, 0.75, 1.0)

SoftLoss = Callable[[Array, Array, Array], Array]
"""Loss of each example: function of teacher logits / T, student logits / T (each [n, classes]) and labels."""


class Teacher(NamedTuple):
    """Best global model that a client has received, and the model's validation loss, [].

    At first, the loss is the largest float.

    Reference: Divi et al. 2021, Figure 1; Divi et al. 2021, Figure 2.
    """

    params: PyTree
    loss: Array


class Student(NamedTuple):
    """Personalized model, and the imitation weight lambda and temperature T with which it was distilled, both [].

    Reference: Divi et al. 2021, Table 5; Divi et al. 2021, Figures 3 to 8.
    """

    params: PyTree
    imitation: Array
    temperature: Array


def persfl(
    task: Task,
    work: LocalWork,
    *,
    distill_steps: int = 60,
    temperatures: tuple[float, ...] = TEMPERATURES,
    imitations: tuple[float, ...] = IMITATIONS,
    teacher: str = "best",
    stored: int = 0,
    teacher_first: bool = True,
) -> Algorithm:
    """PersFL: FedAvg, then local distillation from each client's best global model.

    The personalized model is the student with the greatest validation accuracy, or the teacher if the client takes no
    step. The global model is mu. For a task without classes, the student with the smallest validation loss is chosen,
    `Task.divergence` replaces KL, and there are no temperatures.

    Implements: Divi et al. 2021, equation (2); Divi et al. 2021, equation (3); Divi et al. 2021, Algorithm 1.
    Reference: Divi et al. 2021, Table 4.

    Args:
      task: a classification task, or a task with a distance between predictions.
      work: the local work in a round of stage 1, which is FedAvg.
      distill_steps: number of steps in stage 2, the distillation.
      temperatures: temperatures T in the grid of students.
      imitations: imitation weights lambda in the grid.
      teacher: ``best`` for the model with the smallest validation loss, or ``last`` for the last global model (the
        paper's ablation).
      stored: maximum number of earlier global models that the server keeps for new clients, at least 2; 0 to keep none.
      teacher_first: whether to use KL(teacher || student); otherwise KL(student || teacher).

    Raises:
      JaxpflError: if a value is outside its range, or the task defines no distance between predictions. If models are
        selected on validation examples, `Algorithm.check_data` also refuses clients without validation examples.
    """

    def soft(of_teacher: Array, of_student: Array, y: Array) -> Array:
        pair = (of_teacher, of_student) if teacher_first else (of_student, of_teacher)
        return divergence(*pair, y)

    divergence = distillation.divergence_of(task)

    return _two_stages("persfl", task, work, soft, distill_steps, temperatures, imitations, teacher, stored)


def persfl_gd(
    task: Task,
    work: LocalWork,
    *,
    distill_steps: int = 60,
    temperatures: tuple[float, ...] = TEMPERATURES,
    imitations: tuple[float, ...] = IMITATIONS,
    teacher: str = "best",
    stored: int = 0,
) -> Algorithm:
    """PersFL-GD: PersFL with the cross-entropy to the teacher's soft labels instead of KL; the two losses have the same
    gradient.

    The personalized model, the global model and the errors are as in `persfl`.

    Implements: Divi et al. 2021, equation (1); Divi et al. 2021, Algorithm 1.
    Reference: Divi et al. 2021, Table 6.

    Args:
      task, work: task and local work, as in `persfl`.
      distill_steps: number of steps in stage 2, the distillation.
      temperatures: temperatures T in the grid of students.
      imitations: imitation weights lambda in the grid.
      teacher: ``best`` for the model with the smallest validation loss, or ``last`` for the last global model (the
        paper's ablation).
      stored: maximum number of earlier global models that the server keeps for new clients, at least 2; 0 to keep none.
    """

    divergence = distillation.divergence_of(task)

    def soft(of_teacher: Array, of_student: Array, y: Array) -> Array:
        if task.has_classes:
            return optax.safe_softmax_cross_entropy(of_student, jax.nn.softmax(of_teacher))
        return divergence(of_teacher, of_student, y)  # a cross-entropy, up to a constant in the student

    return _two_stages("persfl-gd", task, work, soft, distill_steps, temperatures, imitations, teacher, stored)


def _two_stages(
    method: str,
    task: Task,
    work: LocalWork,
    soft: SoftLoss,
    distill_steps: int,
    temperatures: Sequence[float],
    imitations: Sequence[float],
    teacher: str,
    stored: int,
) -> Algorithm:
    distillation.check_task(method, task)
    if task.has_classes and task.num_classes < 2:
        raise JaxpflError(f"{method} distills probabilities: it requires at least 2 classes, got {task.num_classes}")
    if distill_steps < 1:
        raise JaxpflError(f"{method}.distill_steps must be >= 1, got {distill_steps}")
    if teacher not in ("best", "last"):
        raise JaxpflError(f"{method}.teacher must be best or last, got {shown(teacher)}")
    if stored < 0 or stored == 1:
        raise JaxpflError(f"{method}.stored must be 0 or >= 2, got {stored}")
    if stored and teacher == "last":
        raise JaxpflError(f"{method}.stored requires teacher = best: teacher = last does not use the stored models")
    if not task.has_classes:
        if tuple(temperatures) not in (TEMPERATURES, (1.0,)):
            raise JaxpflError(f"{method}.temperatures applies to classification tasks only, got {task.kind}")
        temperatures = (1.0,)
    grid = _grid(method, imitations, temperatures)
    keeps = teacher == "best"
    scored = task.metrics.get("loss")  # preferred for validation, because the training loss may use label smoothing
    validation_loss = task.loss if scored is None or isinstance(scored, PerClient | Pooled) else scored
    stage_1 = fedavg(task, work)
    (fedavg_client,) = stage_1.clients

    def validated(mu: PyTree, splits: Splits) -> Teacher:
        def sums(x: PyTree, y: Array, valid: Array) -> Array:
            return trees.valid_sum(valid, validation_loss(task.model.apply(mu, x), y))

        loss = passes.total(sums, splits.validation) / jnp.maximum(splits.validation.size, 1)
        return Teacher(mu, loss.astype(jnp.result_type(float)))

    def better(kept: Teacher, mu: PyTree, splits: Splits) -> Teacher:
        new = validated(mu, splits)
        return trees.where(new.loss < kept.loss, new, kept)

    def best_stored(stored: StoredModels, splits: Splits) -> Teacher:
        losses = jax.lax.map(lambda mu: validated(mu, splits).loss, stored.models)
        losses = jnp.where(stored.present & ~jnp.isnan(losses), losses, jnp.inf)
        least = stored.present & (losses == losses.min())
        first = jnp.argmin(jnp.where(least, stored.rounds, jnp.iinfo(stored.rounds.dtype).max))
        return Teacher(jax.tree.map(lambda a: a[first], stored.models), losses[first])

    def teacher_of(message: Message, kept: PyTree, splits: Splits) -> PyTree:
        if not keeps:
            return message.shared
        if message.per_client is not None:  # a new client receives the stored models, in addition to the last model
            kept = best_stored(message.per_client, splits)
        return better(kept, message.shared, splits).params

    def init(key: Key, hp: AveragingHyper, ctx: ClientContext, message: Message) -> PyTree:
        # No model has been validated yet. The loss is the largest float instead of infinity, because a client with
        # infinite state counts as diverged.
        return Teacher(message.shared, jnp.asarray(jnp.finfo(jnp.result_type(float)).max)) if keeps else ()

    def update(
        key: Key, hp: AveragingHyper, ctx: ClientContext, message: Message, kept: PyTree, splits: Splits
    ) -> tuple[PyTree, Upload, Metrics]:
        _, upload, metrics = fedavg_client.update(key, hp, ctx, message, (), splits)
        return better(kept, message.shared, splits) if keeps else kept, upload, metrics

    def personalize(
        key: Key, hp: AveragingHyper, ctx: ClientContext, message: Message, kept: PyTree, splits: Splits
    ) -> Student:
        imitation, temperature = jnp.asarray(grid).T
        chosen = teacher_of(message, kept, splits)
        if isinstance(ctx.step_limit, int) and ctx.step_limit == 0:  # without a step, all students equal the teacher
            return Student(chosen, imitation[0], temperature[0])
        rate = hp.lr * hp.decay(jnp.maximum(ctx.round - 1, 0), work.steps)
        optimizer = work.descent(rate, hp.weight_decay)
        students = jax.tree.map(lambda a: jnp.broadcast_to(a, (len(grid), *a.shape)), chosen)

        def step(key: Key, at: Descent, batch: Batch) -> tuple[Descent, Metrics]:
            target = task.model.apply(chosen, batch.x)

            def objective(params: PyTree, imitation: Array, temperature: Array) -> Array:
                logits = task.model.apply(params, batch.x, key=key, train=True)
                far = soft(target / temperature, logits / temperature, batch.y)
                return batch.mean((1 - imitation) * task.loss(logits, batch.y) + imitation * temperature**2 * far)

            def one(at: Descent, imitation: Array, temperature: Array) -> Descent:
                return at.step(optimizer, jax.grad(objective)(at.params, imitation, temperature))

            return jax.vmap(one)(at, imitation, temperature), {}

        start = jax.vmap(partial(Descent.start, optimizer))(students)
        end, _ = run_steps(work, key, ctx, splits.train, step, start, metrics=(), steps=distill_steps)
        best = _best(task, validation_loss, end.params, splits) if len(grid) > 1 else 0
        return jax.tree.map(lambda a: a[best], Student(end.params, imitation, temperature))

    def check_data(federation: Federation) -> None:
        lacking = int((np.asarray(federation.validation.size) == 0).sum())
        if lacking and (keeps or len(grid) > 1):
            raise JaxpflError(
                f"{method} selects models on validation examples, but {lacking} of {federation.num_clients} clients "
                "have none: set validation_share, or set teacher = last and only one imitation and one temperature"
            )

    client = fedavg_client._replace(
        init=init,
        update=update,
        personalize=personalize,
        predict=lambda hp, student, x: task.model.apply(student.params, x),
        gradients=gradients(work.steps, personalize=distill_steps * len(grid)),
    )
    server = keeping_models(stage_1.server, stored) if stored else stage_1.server
    return stage_1._replace(clients=(client,), server=server, check_data=check_data)


def _best(task: Task, loss: PerExample, students: PyTree, splits: Splits) -> Array:
    """Index of the student with the best validation accuracy or, without classes, the smallest loss; [].

    In a tie, the first such student is chosen.
    """

    def score(predictions: Array, y: Array) -> Array:
        return correct(predictions, y) if task.has_classes else -loss(predictions, y)

    def right(x: PyTree, y: Array, valid: Array) -> Array:
        return jax.lax.map(lambda params: trees.valid_sum(valid, score(task.model.apply(params, x), y)), students)

    sums = passes.total(right, splits.validation)
    return jnp.argmax(sums if task.has_classes else jnp.where(jnp.isnan(sums), -jnp.inf, sums))


def _grid(method: str, imitations: Sequence[float], temperatures: Sequence[float]) -> np.ndarray:
    """The g pairs (lambda, T) of the grid, [g, 2], in the order in which ties are broken."""
    for name, values, allowed, fits in (
        ("imitations", imitations, ">= 0 and <= 1", lambda value: 0 <= value <= 1),
        ("temperatures", temperatures, "> 0", lambda value: 0 < value < np.inf),
    ):
        if not values or not all(isinstance(value, int | float) and fits(value) for value in values):
            raise JaxpflError(f"{method}.{name} must be one or more numbers {allowed}, got {values}")
    least, *others = sorted(set(temperatures))
    pairs = [(imitation, t) for imitation in sorted(set(imitations)) for t in ([least] + others * (imitation > 0))]
    return np.array(pairs, float)
