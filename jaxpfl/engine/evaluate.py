"""Scores of the global model and each client's own model, before and after adaptation, and their means.

`milestones` and `chosen` choose the rounds of evaluation, the best evaluation, and the round of early stopping. The
best evaluation and early stopping use validation scores only, never test scores. The functions after them compute
headline metrics of runs, and statistics of per-client scores, for S seeds and m clients.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.algorithms.parts.schedules import unscheduled
from jaxpfl.core import protocol, trees
from jaxpfl.core.protocol import ALL_STEPS, Algorithm, Client, ClientContext, Message
from jaxpfl.core.randomness import Purpose, stream
from jaxpfl.core.types import Array, ClientData, Federation, Key, Metrics, PyTree, Scalar, Splits
from jaxpfl.data import passes
from jaxpfl.data.labels import labelled_tokens
from jaxpfl.engine.cohort import ModelAxis, Outcome, gather, lay, run_cohort
from jaxpfl.engine.round import Clients, RoundPlan
from jaxpfl.engine.state import RunState, server_context
from jaxpfl.models import PerClient, Pooled, Task
from jaxpfl.models.base import CLASSIFICATION, NEXT_TOKEN
from jaxpfl.models.metrics import OUTPUTS
from jaxpfl.support.errors import JaxpflError, label

Scores = Mapping[str, Metrics]
"""Scores of each client, as ``scores[model][metric]``, arrays [m] of means over the client's examples. The models are
``global``, ``before`` and ``after``.

``global`` is missing if the method has no global model. The scores of a client without examples in the split are NaN.
``after`` has an additional entry ``diverged``, [m] bool: whether the client's adapted model is not finite. Such a
client is scored with its model before adaptation.
"""

Part = Literal["test", "validation", "attackers"]


class Personal(NamedTuple):
    """A client's personalized model before and after its adaptation.

    Attributes:
      before: model before the first step of adaptation.
      after: adapted model, or ``before`` if the adapted model is not finite.
      finite: whether the adapted model is finite, [] bool.
    """

    before: PyTree
    after: PyTree
    finite: Array


class Today(NamedTuple):
    """Inputs that are the same for all clients.

    Attributes:
      key: the run's key.
      round: number of finished rounds.
      hp: hyper-parameters.
      server: the server's state.
      sent: `Message.shared` of the server's message.
      welcome: for unseen clients, `Message.per_client` of the server's message to a new client.
      rounds: number of rounds in which unseen clients adapt.
      start: key of the unseen clients' initial states.
    """

    key: Key
    round: Array
    hp: PyTree
    server: PyTree
    sent: PyTree
    welcome: PyTree = None
    rounds: Scalar = 0
    start: PyTree = None


Work = Callable[[Client, Today, PyTree, PyTree], PyTree]
"""Function ``(client, today, state, data) -> result`` that computes a result for one client."""


def score_all(
    algorithm: Algorithm, task: Task, plan: RoundPlan, state: RunState, hp: PyTree, clients: Clients
) -> dict[Part, Scores]:
    """Score clients on their test and validation examples.

    The result has no validation scores if no client has validation examples. Personalization uses the training and
    validation examples only. Its random stream depends on the client, but not on the round. Its mini-batches are drawn
    as in a client's first round.
    """

    def score(client: Client, today: Today, own: PyTree, given: tuple[Any, ...]) -> dict[Part, Scores]:
        splits, client_id, per_client, test = given
        personal = personalize_client(plan.model, client, today, client_id, per_client, own, splits)
        scored: dict[Part, ClientData] = {"test": test}
        if splits.validation.capacity:
            scored["validation"] = splits.validation
        return {part: score_client(algorithm, client, task, today, personal, data) for part, data in scored.items()}

    return gather(_each_client(algorithm, plan, score, state, hp, clients, "test"), plan.groups)


def personalize_all(
    algorithm: Algorithm, plan: RoundPlan, state: RunState, hp: PyTree, clients: Clients
) -> tuple[PyTree, ...]:
    """Personalize every client's model; `score_all` scores these models as ``after``.

    The result has one tree for each group of clients (`Algorithm.clients`). The leaves are [size, ...] for a group of
    this size.
    """

    def adapted(client: Client, today: Today, own: PyTree, data: tuple[Splits, Array, PyTree]) -> PyTree:
        splits, client_id, per_client = data
        return personalize_client(plan.model, client, today, client_id, per_client, own, splits).after

    return tuple(_each_client(algorithm, plan, adapted, state, hp, clients))


def cluster_all(algorithm: Algorithm, plan: RoundPlan, state: RunState, hp: PyTree, clients: Clients) -> Array:
    """Return each client's cluster, [m]."""

    def choose(client: Client, today: Today, own: PyTree, data: tuple[Splits, Array, PyTree]) -> Array:
        assert client.cluster is not None
        splits, _, per_client = data
        return client.cluster(today.hp, Message(today.sent, per_client), own, splits)

    return gather(_each_client(algorithm, plan, choose, state, hp, clients), plan.groups)


def adapt_client(
    algorithm: Algorithm,
    task: Task,
    model: ModelAxis | None,
    client: Client,
    today: Today,
    own: PyTree,
    data: tuple[Splits, ClientData, Array],
) -> Scores:
    """Adapt one unseen client, and score it, as in `adapt_all`.

    Args:
      algorithm: the method.
      task: model, loss and metrics.
      model: mesh axis over which one client's arrays are sharded, as in `RoundPlan`; None if they are not sharded.
      client: the client's functions.
      today: inputs that are the same for all clients.
      own: state of the one trained client if the method is pooled; otherwise unused.
      data: the client's training and validation examples, its examples to score, and its id.
    """
    splits, examples, client_id = data
    batch_key = stream(today.key, Purpose.BATCHES, client_id)
    last_round = jnp.maximum(today.round - 1, 0)
    message = Message(today.sent, today.welcome)

    own_steps = algorithm.own_steps
    limit = ALL_STEPS if own_steps is None else own_steps.steps(splits.train.size)

    def context(participations: Scalar) -> ClientContext:
        return ClientContext(last_round, client_id, participations, limit, batch_key)

    start = own if algorithm.pooled else client.init(today.start, today.hp, context(jnp.int32(0)), message)
    rounds = 0 if algorithm.pooled else today.rounds

    def one(nth: Array, own: PyTree) -> PyTree:
        key = stream(today.key, Purpose.ADAPT, client_id, nth)
        new, _, _ = protocol.call_update(client, key, today.hp, context(nth), message, own, splits)
        return trees.where(trees.all_finite(new), new, own)

    adapted = start if algorithm.pooled else jax.lax.fori_loop(0, rounds, one, start)
    personal = personalize_client(model, client, today, client_id, today.welcome, adapted, splits)
    on_arrival = _personal(client, today, client_id, message, start, splits, 0)
    scores = score_client(algorithm, client, task, today, personal._replace(before=on_arrival), examples)
    if client.gradients is not None:
        in_rounds = rounds * protocol.call_gradients(client.gradients.update, limit, message)
        adapting = client.gradients.personalize
        adapting = adapting if isinstance(adapting, int) else adapting.steps(splits.train.size)
        scores["after"]["gradients"] = jnp.int32(in_rounds + adapting)
    return scores


def adapt_all(
    algorithm: Algorithm,
    task: Task,
    plan: RoundPlan,
    state: RunState,
    hp: PyTree,
    clients: Clients,
    rounds: Array,
) -> Scores:
    """Adapt unseen clients, and score them on their test examples.

    Each unseen client starts from ``Client.init`` and runs ``Client.update`` for ``rounds`` rounds. In each round, it
    receives the server's current message and uses the learning rate of the last round; with an ``lr_schedule``, it uses
    the rate without the schedule's factor. Its uploads are discarded. The client is then personalized and scored like
    any other client.

    ``before`` scores the client's model on arrival, without a local step. If the method counts gradients, ``after`` has
    the entry ``gradients``: the number of gradients that each client evaluated in these rounds and for its personalized
    model, [u] int32 for u unseen clients. In a pooled method, an unseen client has the trained client's state and runs
    no round.

    Args:
      algorithm: the method.
      task: model, loss and metrics.
      plan: plan of a round, with the groups of the unseen clients.
      state: state of the run.
      hp: hyper-parameters of the run.
      clients: the unseen clients' data.
      rounds: number of rounds in which each unseen client adapts, [] int32.

    Raises:
      JaxpflError: if the server sends each client its own message and has no ``welcome``.
    """
    today, per_client = _today(algorithm, plan, state, unscheduled(hp), clients, newcomers=True)
    today = today._replace(rounds=rounds, start=stream(state.key, Purpose.CLIENT_INIT))
    if algorithm.server.welcome is not None:
        today = today._replace(welcome=per_client)
    elif jax.tree.leaves(per_client):
        raise JaxpflError("unseen clients are not supported: the method's server sends each client its own message")
    data = [(f.splits, f.test, jnp.asarray(f.client_ids)) for f in clients.federations]
    states = _copies(plan, state.clients) if algorithm.pooled else ((),) * len(data)
    work = partial(adapt_client, algorithm, task, plan.model)
    return gather(_each_group(algorithm, plan, work, today, states, data), plan.groups)


def _today(
    algorithm: Algorithm, plan: RoundPlan, state: RunState, hp: PyTree, clients: Clients, *, newcomers: bool = False
) -> tuple[Today, PyTree]:
    """Return the inputs that all clients (unseen clients if ``newcomers``) share, and `Message.per_client`."""
    ctx = server_context(plan.participation, state.round)
    key = stream(state.key, Purpose.BROADCAST, state.round)
    send = (newcomers and algorithm.server.welcome) or algorithm.server.broadcast
    message = send(key, hp, ctx, state.server)
    per_client = message.per_client
    if not newcomers:
        per_client = clients.received(per_client)
        per_client = _copies(plan, per_client) if algorithm.pooled else per_client
    # With example-level privacy, personalization draws noise, so its key must be the private one, as in the rounds.
    run_key = state.released if algorithm.guarded else state.key
    return Today(run_key, state.round, hp, state.server, message.shared), per_client


def _copies(plan: RoundPlan, stacked: PyTree) -> PyTree:
    """Give each scored client of a pooled method the values of the one trained client."""
    (group,) = plan.groups
    return jax.tree.map(lambda a: jnp.broadcast_to(a[:1], (group.rows, *a.shape[1:])), stacked)


def personalize_client(
    model: ModelAxis | None,
    client: Client,
    today: Today,
    client_id: Array,
    per_client: PyTree,
    own: PyTree,
    splits: Splits,
) -> Personal:
    """One client's personalized model, before and after its adaptation, from the client's state ``own``."""
    given = (client, today, client_id, Message(today.sent, per_client), lay(model, own), splits)
    before, after = (lay(model, _personal(*given, steps)) for steps in (0, ALL_STEPS))
    protocol.check_same("client.personalize: model", after, before, like="without a step: model", dtypes=False)
    finite = trees.all_finite(after)
    # If the method does not adapt its models, both are the same traced value, which `score_client` scores once.
    same = all(map(operator.is_, jax.tree.leaves(before), jax.tree.leaves(after)))
    return Personal(before, before if same else trees.where(finite, after, before), finite)


def _personal(
    client: Client, today: Today, client_id: Array, message: Message, own: PyTree, splits: Splits, step_limit: int
) -> PyTree:
    """The personalized model of a client with state ``own`` after at most ``step_limit`` steps of adaptation."""
    key = stream(today.key, Purpose.PERSONALIZE, client_id)
    batch_key = stream(today.key, Purpose.PERSONALIZE_BATCHES, client_id)
    ctx = ClientContext(today.round, client_id, jnp.int32(0), step_limit, batch_key)
    return client.personalize(key, today.hp, ctx, message, own, splits)


def score_client(
    algorithm: Algorithm, client: Client, task: Task, today: Today, personal: Personal, examples: ClientData
) -> dict[str, Metrics]:
    """Scores of one client's models on some of its examples, as in `Scores`."""
    predict_global = algorithm.server.predict_global
    own = ("after",) if personal.after is personal.before else ("before", "after")

    def predictions(x: PyTree, y: Array, valid: Array) -> Metrics:
        logits = {name: client.predict(today.hp, getattr(personal, name), x) for name in own}
        if predict_global is not None:
            logits["global"] = predict_global(today.hp, today.server, x)
        for name, values in logits.items():
            function = "server.predict_global" if name == "global" else "client.predict"
            protocol.check_prediction(function, values, len(valid))
        return logits

    sums = passes.total(
        lambda x, y, valid: {name: _sums(task, values, y, valid) for name, values in predictions(x, y, valid).items()},
        examples,
    )
    count = examples.size
    means = {name: _means(task, totals, count) for name, totals in sums.items()}
    # NaN means that a client has no examples, so a diverged model gets the worst score instead of NaN.
    worst = {"loss": jnp.inf, "mae": jnp.inf, task.headline: jnp.inf if task.lower else -jnp.inf}
    for scores in means.values():
        for name, value in worst.items():
            if name in scores and not isinstance(task.metrics.get(name), Pooled):
                scores[name] = jnp.where(jnp.isnan(scores[name]) & (count > 0), value, scores[name])
    if any(isinstance(metric, PerClient) for metric in task.metrics.values()):
        rows, y = passes.each(lambda x, y, valid: (predictions(x, y, valid), y), examples)
        for name, values in rows.items():
            means[name] |= _client_metrics(task, values, y, count)
    if "before" not in own:
        means["before"] = dict(means["after"])
    means["after"]["diverged"] = ~personal.finite
    return means


def _each_client(
    algorithm: Algorithm, plan: RoundPlan, work: Work, state: RunState, hp: PyTree, clients: Clients, *scored: Part
) -> list[PyTree]:
    """Apply ``work`` to each group's clients.

    The arguments of ``work`` include the training and validation examples, and the examples of the splits in
    ``scored``.
    """
    today, per_client = _today(algorithm, plan, state, hp, clients)
    data = [
        (f.splits, jnp.asarray(f.client_ids), group.take(per_client), *(getattr(f, split) for split in scored))
        for f, group in zip(clients.federations, plan.groups, strict=True)
    ]
    states = _copies(plan, state.clients) if algorithm.pooled else state.clients
    return _each_group(algorithm, plan, work, today, states, data)


def _each_group(
    algorithm: Algorithm,
    plan: RoundPlan,
    work: Work,
    today: Today,
    states: tuple[PyTree, ...],
    data: list[PyTree],
) -> list[PyTree]:
    """Results of the clients in each group, leaves [size, ...]. Groups without clients are left out."""
    kept = []
    for client, group, own, given in zip(algorithm.clients, plan.groups, states, data, strict=True):
        if not group.size:
            continue

        def one(today: Today, present: Array, own: PyTree, given: PyTree, client: Client = client) -> Outcome:
            return Outcome((), (), work(client, today, own, given))

        outcome = run_cohort(
            one,
            today,
            group.every(),
            own,
            given,
            num_clients=group.end,
            block=plan.block,
            everyone=True,
            spread=plan.spread and plan.spread._replace(even=False),
        )
        kept.append(group.restore_order(outcome.kept))
    return kept


def _sums(task: Task, logits: Array, y: Array, valid: Array) -> dict[str, tuple[Array, ...]]:
    """Sum each per-example metric, and both numerator and denominator of each `Pooled` metric, over valid examples."""
    sums = {}
    for name, metric in task.metrics.items():
        if isinstance(metric, PerClient):
            continue
        parts = (metric.total, metric.number) if isinstance(metric, Pooled) else (metric,)
        values = tuple(part(logits, y) for part in parts)
        for part in values:
            protocol.check_metric(name, part, len(valid))
        sums[name] = tuple(trees.valid_sum(valid, part) for part in values)
    return sums


def _means(task: Task, sums: Mapping[str, tuple[Array, ...]], count: Array) -> Metrics:
    """Each metric [] of a client: `Pooled.score`, or the mean over the client's examples (NaN without examples)."""
    means = {}
    for name, totals in sums.items():
        metric = task.metrics[name]
        if isinstance(metric, Pooled):
            means[name] = metric.score(*totals)
        else:
            means[name] = jnp.where(count > 0, totals[0] / jnp.maximum(count, 1), jnp.nan)
    return means


def _client_metrics(task: Task, logits: Array, y: Array, count: Array) -> Metrics:
    """Each `PerClient` metric [], computed from all of a client's examples together; NaN without examples."""
    valid = jnp.arange(len(y)) < count
    logits, y = (jnp.where(valid.reshape(-1, *[1] * (a.ndim - 1)), a, jnp.zeros((), a.dtype)) for a in (logits, y))
    found = {}
    for name, metric in task.metrics.items():
        if isinstance(metric, PerClient):
            value = metric.function(logits, y, valid)
            if metric is not OUTPUTS:
                protocol.check_metric(name, value)
            found[name] = jnp.where(count > 0, value, jnp.nan)
    return found


def example_weights(data: ClientData, kind: str | None = None) -> np.ndarray:
    """Weight of each client in means over all examples, [m].

    The weight is the client's number of examples. For next-token prediction, it is the number of labeled tokens,
    because the scores of this task are means over tokens.
    """
    return labelled_tokens(data) if kind == NEXT_TOKEN else np.asarray(data.size, np.int64)


def mean_over_examples(scores: np.ndarray, sizes: np.ndarray, *, root: bool = False) -> np.ndarray:
    """Mean over clients of scores [..., m], weighted by the clients' numbers of examples [m].

    Clients whose score is NaN are left out; if all scores are NaN, so is the result. If the metric is a mean over a
    client's examples (accuracy, loss, MAE) or the root of such a mean (RMSE), the result is the score of all examples
    together. For an AUC, F1, R^2 or calibration error, which are not means over examples, the result is only the
    weighted mean of the clients' scores.

    Examples:
      >>> scores, sizes = np.array([0.0, 4.0]), np.array([30, 10])
      >>> float(mean_over_examples(scores, sizes))
      1.0
      >>> float(mean_over_examples(scores, sizes, root=True))  # the root of (30 * 0 + 10 * 16) / 40
      2.0

    Args:
      scores: the clients' scores, [..., m].
      sizes: weight of each client (`example_weights`), [m].
      root: whether the metric is the root of a mean over examples.
    """
    scores = np.asarray(scores, np.float64)
    weights = np.where(np.isnan(scores), 0.0, np.asarray(sizes, np.float64))
    values = np.square(scores) if root else scores
    total = weights.sum(axis=-1)
    sums = np.where(weights > 0, values, 0.0) * weights  # zero times an infinite score would be NaN
    means = np.where(total > 0, sums.sum(axis=-1) / np.where(total > 0, total, 1.0), np.nan)
    return np.sqrt(means) if root else means


def is_root(task: Task | None, metric: str) -> bool:
    """True if the metric is the root of a mean over a client's examples, such as RMSE."""
    found = None if task is None else task.metrics.get(metric)
    return isinstance(found, PerClient) and found.root


def mean_over_clients(scores: np.ndarray) -> np.ndarray:
    """Mean of scores [..., m] over the clients whose score is not NaN; NaN if all scores are NaN."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy warns of an empty mean
        return np.nanmean(scores, axis=-1)


class Chosen(NamedTuple):
    """Best evaluation in each of S runs, and result of early stopping.

    Attributes:
      best: index of the best evaluation, [S]; the first one if several are equal, and 0 if all scores are NaN.
      over: whether the run's patience has run out, [S] bool.
    """

    best: np.ndarray
    over: np.ndarray


def chosen(validation: np.ndarray, patience: int | None = None, *, lower: bool = False) -> Chosen:
    """Best evaluation of each run, and whether the run's patience has run out.

    A run's patience runs out after ``patience`` consecutive evaluations without a new best score. Later evaluations of
    this run are ignored; they exist because the other runs in the same program continue. A NaN score is never the best.

    Examples:
      >>> chosen(np.array([[0.5], [0.7], [0.6], [0.7], [0.9]]), patience=2)
      Chosen(best=array([1]), over=array([ True]))

    Args:
      validation: mean validation scores at E evaluations of S runs, [E, S].
      patience: number of evaluations; None for no early stopping.
      lower: whether lower scores are better.
    """
    runs = validation.shape[1]
    best, over = np.zeros(runs, int), np.zeros(runs, bool)
    record, waited = np.full(runs, -np.inf), np.zeros(runs, int)
    for nth, scores in enumerate(-validation if lower else validation):
        better = ~over & (scores > record)
        best, record = np.where(better, nth, best), np.where(better, scores, record)
        waited = np.where(better, 0, waited + 1)
        if patience is not None:
            over = over | (waited >= patience)
    return Chosen(best, over)


def first_time(scores: np.ndarray, seconds: np.ndarray, score: float, *, lower: bool = False) -> np.ndarray:
    """Time of each run's first evaluation that reaches a score, [S]; NaN if the run never reaches the score.

    Examples:
      >>> first_time(np.array([[0.5, 0.9], [0.8, 0.7]]), np.array([[10.0, 20.0], [30.0, 40.0]]), 0.8)
      array([30., 20.])

    Args:
      scores: score at each of E evaluations in S runs, [E, S].
      seconds: time of each evaluation, [E, S].
      score: score to reach. A score at least this high reaches it, or at most this high if ``lower``.
      lower: whether lower scores are better.
    """
    there = scores <= score if lower else scores >= score
    first = np.argmax(there, axis=0)[None]
    return np.where(there.any(axis=0), np.take_along_axis(seconds, first, axis=0)[0], np.nan)


def milestones(start: int, rounds: int, *every: int) -> Iterator[int]:
    """Yield, in order, the rounds after ``start`` that are multiples of a number in ``every``; the last is ``rounds``.

    An ``every`` of 0 has no multiples. Rounds are counted from the run's beginning, so a resumed run stops at the same
    rounds as an uninterrupted run.

    Examples:
      >>> list(milestones(3, 10, 4))
      [4, 8, 10]
    """
    while start < rounds:
        start = min([rounds, *((start // n + 1) * n for n in every if n)])
        yield start


class Headline(NamedTuple):
    """Main metric of a task.

    Attributes:
      name: name of the metric, such as accuracy.
      lower: whether smaller values are better.
      percent: whether values are fractions that are shown in percent.
    """

    name: str = "accuracy"
    lower: bool = False
    percent: bool = True

    @property
    def validation(self) -> str:
        """Key of the scores on validation examples in the record of an evaluation."""
        return f"validation_{self.name}"

    @property
    def personalized(self) -> str:
        """Key of the personalized models' scores on test examples in the record of an evaluation."""
        return f"personalized_{self.name}"

    @property
    def words(self) -> str:
        """Name of the metric for display, such as macro F1."""
        return _WORDS.get(self.name, self.name)

    @property
    def scale(self) -> float:
        """Factor by which values are multiplied when they are shown."""
        return 100.0 if self.percent else 1.0

    @property
    def ticks(self) -> str:
        """Format of an axis's tick labels."""
        return "{x:g} %" if self.percent else "{x:g}"

    @property
    def unit(self) -> str:
        """Unit after the metric's name in a table's title, if any."""
        return " in %" if self.percent else ""

    def number(self, value: float | None) -> str:
        """Format a value for a table; None gives a dash."""
        if value is None:
            return "-"
        return f"{100 * value:.2f}" if self.percent else f"{value:.4g}"

    def better(self, values: Any) -> Any:
        """Return the values, negated if smaller values are better, so that larger values are always better."""
        return -np.asarray(values) if self.lower else values


ACCURACY = Headline()
HEADLINES: Mapping[str, Headline] = {
    one.name: one
    for one in (ACCURACY, Headline("rmse", lower=True, percent=False), Headline("macro_f1"), Headline("auc"))
}
"""Headlines of the registered tasks."""
UNBOUNDED = ("r2",)
"""Metrics without a lower bound. Tables show their median over clients instead of the mean."""
_WORDS = {
    "rmse": "RMSE",
    "mae": "MAE",
    "r2": "R^2",
    "macro_f1": "macro F1",
    "auc": "AUC",
    "calibration_error": "calibration error",
    "balanced_accuracy": "balanced accuracy",
}


def find_headline(names: Iterable[str]) -> Headline:
    """Return the headline whose scores appear first among the names of results; accuracy if no headline appears.

    Examples:
      >>> find_headline(["train_loss", "personalized_auc", "personalized_accuracy"]).name
      'auc'
    """
    by_name = {name: one for one in HEADLINES.values() for name in (one.personalized, one.validation)}
    return next((by_name[name] for name in names if name in by_name), ACCURACY)


def stored_headline(summary: Mapping[str, Any]) -> Headline:
    """Return the headline that a stored summary names; accuracy if the summary names none."""
    name = summary.get("metric", ACCURACY.name)
    return HEADLINES.get(name, Headline(name, summary.get("lower_is_better", False), percent=False))


_NO_METRICS = ("loss", "diverged")
"""Names of clients' scores that are not metrics of a task."""
_OF_OTHERS = ("mean", "std", "median", "mean_examples", "std_examples")


def over_clients(
    scores: np.ndarray, *, lower: bool = False, sizes: np.ndarray | None = None, root: bool = False
) -> dict[str, float | None]:
    """Return statistics of the clients' scores, without the clients that have no score (NaN).

    Args:
      scores: scores [S, m].
      lower: whether smaller scores are better.
      sizes: numbers of examples of the clients, [m], for the statistics weighted by examples.
      root: whether the score is the square root of a mean over a client's examples.

    Returns:
      The statistics by name. Each is computed over the clients and then averaged over the seeds, except ``std`` and
      ``std_examples``. ``mean`` is the unweighted mean over clients, and ``std`` the standard deviation of the seeds'
      means (ddof 1; None for one seed). ``std_clients`` is the standard deviation over clients (ddof 0, because the
      clients are the whole population). ``median`` is the median, ``p10`` the 10 % quantile, and ``worst_decile`` the
      mean of the ceil(m / 10) lowest scores. If smaller scores are better, ``p10`` is the 90 % quantile, and
      ``worst_decile`` the mean of the highest scores. If ``sizes`` is given, ``mean_examples`` and ``std_examples`` are
      the mean and the standard deviation of `mean_over_examples` over the seeds. If a score is infinite, ``mean``,
      ``p10`` and ``worst_decile`` have the worst possible value, infinity or minus infinity, and ``std`` and
      ``std_clients`` are None. If there is no score at all, all entries are None.
    """
    found = _over_clients(scores, lower)
    if sizes is not None:
        means = mean_over_examples(np.atleast_2d(scores), sizes, root=root)
        found |= _over_seeds(means[~np.isnan(means)], "mean_examples", "std_examples")
    return found


def _over_seeds(means: np.ndarray, mean: str = "mean", std: str = "std") -> dict[str, float | None]:
    """Return the mean and the standard deviation of the seeds' means [S]."""
    spread = len(means) > 1 and bool(np.isfinite(means).all())
    return {mean: float(means.mean()) if len(means) else None, std: float(means.std(ddof=1)) if spread else None}


def _over_clients(scores: np.ndarray, lower: bool) -> dict[str, float | None]:
    rows = [row[~np.isnan(row)] for row in np.atleast_2d(np.asarray(scores, float))]
    rows = [row for row in rows if len(row)]
    if not rows:
        return dict.fromkeys(("mean", "std", "std_clients", "median", "p10", "worst_decile"))
    means = np.array([row.mean() for row in rows])
    if not all(np.isfinite(row).all() for row in rows):  # predictions may overflow although the parameters are finite
        bad = math.inf if lower else -math.inf
        middle = float(np.mean([np.median(row) for row in rows]))
        return {"mean": bad, "std": None, "std_clients": None, "median": middle, "p10": bad, "worst_decile": bad}
    sign = -1 if lower else 1
    worst = [sign * np.sort(sign * row)[: math.ceil(len(row) / 10)].mean() for row in rows]
    return _over_seeds(means) | {
        "std_clients": float(np.mean([row.std() for row in rows])),
        "median": float(np.mean([np.median(row) for row in rows])),
        "p10": float(np.mean([np.quantile(row, 0.9 if lower else 0.1) for row in rows])),
        "worst_decile": float(np.mean(worst)),
    }


def undefined(scores: Mapping[str, np.ndarray], metric: str, examples: np.ndarray) -> int:
    """Count the clients whose test examples leave a metric undefined, such as the AUC if there is only one class.

    Args:
      scores: arrays [S, m] named ``after_METRIC`` and ``attackers_after_METRIC``. Attackers are not counted.
      metric: name of the metric.
      examples: numbers of test examples of the clients [m]; clients without test examples are not counted.
    """
    attacks = [~np.isnan(of) for key, of in scores.items() if key.startswith("attackers_after_")]
    scored = (np.asarray(examples) > 0) & ~np.any(attacks, axis=0) if attacks else np.asarray(examples) > 0
    return int((scored & np.isnan(scores[f"after_{metric}"])).any(axis=0).sum())


def other_metrics(
    scores: Mapping[str, np.ndarray],
    headline: Headline,
    sizes: np.ndarray,
    task: Task | None = None,
    examples: np.ndarray | None = None,
) -> dict[str, Any]:
    """Return statistics of the task's metrics other than the headline.

    Args:
      scores: arrays [S, m] named ``after_METRIC`` (personalized models) and ``global_METRIC`` (global model).
      headline: metric to leave out.
      sizes: the clients' weights [m] in means over examples.
      task: task of the metrics.
      examples: numbers of test examples of the clients [m]; ``sizes`` by default.

    Returns:
      A dictionary for each metric, with the entries ``personalized``, ``global`` and ``undefined``. ``personalized``
      and ``global`` have the statistics ``mean``, ``std``, ``median``, ``mean_examples`` and ``std_examples`` of
      `over_clients`; ``global`` is None if there is no global model. ``undefined`` is the number of clients for which
      the metric is undefined.
    """
    found: dict[str, Any] = {}
    for key, of_clients in scores.items():
        name = key.removeprefix("after_")
        if name == key or name in (headline.name, *_NO_METRICS):
            continue
        entry: dict[str, Any] = {}
        for of, own in (("personalized", of_clients), ("global", scores.get(f"global_{name}"))):
            over = None if own is None else over_clients(own, sizes=sizes, root=is_root(task, name))
            entry[of] = None if over is None else {name: over[name] for name in _OF_OTHERS}
        found[name] = entry | {"undefined": undefined(scores, name, sizes if examples is None else examples)}
    return found


def fraction_hurt(scores: np.ndarray, local: np.ndarray, *, lower: bool = False) -> float:
    """Return the fraction of clients, over all seeds, whose score is worse than under local training.

    Args:
      scores: clients' scores [S, m].
      local: clients' scores under local training [S, m].
      lower: whether smaller scores are better.
    """
    both = ~np.isnan(scores) & ~np.isnan(local)
    worse = scores > local if lower else scores < local
    return float(worse[both].mean()) if both.any() else math.nan


def client_means(scores: np.ndarray) -> np.ndarray:
    """Average the finite scores of each client over the seeds, [S, m] -> [m]; NaN if no seed has a finite score."""
    finite = np.isfinite(scores)
    return np.where(finite, scores, 0).sum(axis=0) / np.where(finite.any(axis=0), finite.sum(axis=0), math.nan)


def worst(scores: np.ndarray, who: Mapping[str, Any], headline: Headline, base: Any = None) -> list[dict[str, Any]]:
    """Return id, name and value of up to five clients with the worst scores (mean over seeds), the worst first.

    Args:
      scores: scores [S, m].
      who: arrays ``client_ids`` and ``client_names``, [m].
      headline: metric of the scores.
      base: other scores of the clients, [S, m]. If given, the values are the scores minus ``base``, and only clients
        whose scores are worse than in ``base`` are returned.
    """
    most = math.inf if base is None else 0.0
    values = client_means(scores) - (0.0 if base is None else client_means(base))
    order = [i for i in np.argsort(headline.better(values), kind="stable")[:5] if headline.better(values[i]) < most]
    found = [(int(who["client_ids"][i]), str(who["client_names"][i]), float(values[i])) for i in order]
    return [dict(zip(("client_id", "client_name", "value"), one, strict=True)) for one in found]


def words_of_clients(found: Iterable[Mapping[str, Any]], headline: Headline) -> str:
    """Return the names of the clients that `worst` returns, with their values."""
    return ", ".join(f"{label(one['client_name'])} {headline.number(one['value'])}" for one in found)


def constant_scores(federation: Federation, kind: str, headline: str | None = None) -> tuple[Any, np.ndarray] | None:
    """Score the best constant prediction: the most frequent training label, or the mean of the training labels.

    Args:
      federation: clients with labels.
      kind: task of the labels.
      headline: main metric of the task; by default, the main metric of ``kind``.

    Returns:
      The prediction, and its accuracy (root mean squared error for a regression) on each client's test examples, [m].
      None if the headline is another metric, or if the labels are neither classes nor real numbers.
    """
    real = kind == "regression"
    other = headline not in (None, "rmse" if real else ACCURACY.name)
    if other or (not real and kind not in (CLASSIFICATION, "binary", NEXT_TOKEN)):
        return None
    train, test = (
        split.with_examples(x=()).flat().y for split in (federation.train, federation.test)
    )  # without inputs
    prediction = (
        train.mean(axis=0, dtype=np.float64) if real else int(np.bincount(train[train >= 0], minlength=1).argmax())
    )
    total, counted = (np.square(test - prediction), np.ones(test.shape)) if real else (test == prediction, test >= 0)
    owner, axes = np.repeat(np.arange(federation.num_clients), federation.test.size), tuple(range(1, test.ndim))
    sums, counts = (np.bincount(owner, of.sum(axis=axes), federation.num_clients) for of in (total, counted))
    mean = sums / np.where(counts > 0, counts, math.nan)
    return prediction, np.sqrt(mean) if real else mean


def best_on_validation(
    rounds: list[int],
    validation: np.ndarray,
    test: np.ndarray,
    headline: Headline = ACCURACY,
    patience: int | None = None,
) -> dict[str, Any] | None:
    """Return the test score at the evaluation with the best validation score, chosen separately for each seed.

    The first of equal validation scores is chosen. The result is None if some seed has no validation score, for example
    if the metric is the AUC and every client has only one class.

    Args:
      rounds: rounds of the E evaluations.
      validation, test: scores of the personalized models, averaged over clients, [E, S].
      headline: metric of the scores.
      patience: patience of the run; evaluations after a seed's patience has run out are ignored.
    """
    if np.isnan(validation).all(axis=0).any():
        return None
    best = chosen(validation, patience, lower=headline.lower).best
    found = test[best, np.arange(test.shape[1])]
    return {
        "rounds": [rounds[i] for i in best],
        headline.personalized: {
            "mean": float(found.mean()),
            "std": float(found.std(ddof=1)) if len(found) > 1 else None,
        },
    }
