"""The implementation of ``jaxpfl.fit``, which trains a method and scores every client."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jaxpfl.core import exclusions
from jaxpfl.core.settings import part_of
from jaxpfl.core.types import Federation, Names
from jaxpfl.engine.build import Assembled, assemble
from jaxpfl.engine.evaluate import (
    HEADLINES,
    Headline,
    Scores,
    chosen,
    constant_scores,
    example_weights,
    first_time,
    is_root,
    mean_over_clients,
    mean_over_examples,
    milestones,
    over_clients,
    words_of_clients,
    worst,
)
from jaxpfl.engine.round import RunState
from jaxpfl.engine.simulation import Simulation
from jaxpfl.engine.spec import RunSpec, Settings
from jaxpfl.engine.state import GradientCounts
from jaxpfl.models import Task
from jaxpfl.models.base import Given
from jaxpfl.privacy import (
    Accountant,
    PrivacyConfig,
    PrivacyPlan,
    SiloMechanism,
    Statement,
    noise,
)
from jaxpfl.privacy.statement import GIVEN_START, STOPPED
from jaxpfl.support import processes
from jaxpfl.support.errors import JaxpflError, unknown_name

Released: TypeAlias = tuple[PrivacyPlan | SiloMechanism | None, ...] | None


class Fit(NamedTuple):
    """Result of ``jaxpfl.fit``: S runs (one for each seed), m clients, E evaluations.

    Attributes:
      simulation: compiled programs, with which training can continue from ``state``.
      state: state after the last round.
      history: metrics of every round, each [S, rounds].
      rounds: rounds after which the clients were scored, [E].
      scores: ``scores[model][metric]``, [E, S, m]. The models are ``before``, ``after`` and, if there is a global
        model, ``global``.
      validation: like ``scores``, but on the validation examples; used to choose settings. A client without validation
        examples has NaN. None if no client has validation examples.
      unseen: scores of the u unseen clients after the last round, ``unseen[model][metric]``, [S, u]; None if there are
        none.
      privacy: tuple with one entry per run: its `PrivacyPlan`, its `SiloMechanism` if examples are protected, or None
        if the run has no noise. The attribute itself is None if the runs are not private.
      caveats: weaknesses of the privacy claim in these runs.
      delta: delta of the privacy claim, from ``privacy=PrivacyConfig(delta=...)``; None if not given.
      task: model, loss and metrics. ``task.headline`` names the metric that ``personalized_score``, ``global_score``,
        ``validation_score`` and ``best_score`` return.
      test_sizes: each client's number of test examples (of labeled test tokens for next-token prediction), [m].
      patience: number of evaluations without a better validation score after which a run stops; None without early
        stopping.
      attacked: scores of the attackers at the last evaluation, ``attacked[model][metric]``, [S, m]; NaN for honest
        clients. In ``scores`` and ``validation``, the attackers have NaN. None without an attack.
      client_names: names of the clients, as in `Federation.client_names`.
      method: name of the method.
      client_ids: ids of the clients, [m].
      constant: best constant prediction and its `headline` score on each client, [m]; None if the task has none.
    """

    simulation: Simulation
    state: RunState
    history: dict[str, np.ndarray]
    rounds: np.ndarray
    scores: dict[str, dict[str, np.ndarray]]
    validation: dict[str, dict[str, np.ndarray]] | None = None
    unseen: Scores | None = None
    privacy: Released = None
    caveats: tuple[str, ...] = ()
    delta: float | None = None
    task: Task | None = None
    test_sizes: np.ndarray | None = None
    patience: int | None = None
    attacked: Scores | None = None
    client_names: Names | None = None
    method: str = ""
    client_ids: np.ndarray | None = None
    constant: tuple[Any, np.ndarray] | None = None

    def __repr__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Table of the scores after the last round, as text.

        The table has a row for each model, and names the clients with the worst scores. There are rows for unseen
        clients and for the best constant prediction if they were scored.

        For the headline metric, the table has the mean over clients (± standard deviation over seeds), the 10 %
        quantile (90 % if lower is better) and the mean of the worst tenth of the clients. For other metrics, it has the
        mean only.
        """
        lower = self.task is not None and self.task.lower
        head = HEADLINES.get(self.headline, Headline(self.headline, lower, percent=False))
        others = [name for name in self.scores["before"] if name not in (head.name, "diverged", "gradients")]
        models = {"personalized": "after", "before adaptation": "before", "global": "global"}
        last = {of: {metric: values[-1] for metric, values in scores.items()} for of, scores in self.scores.items()}
        rows = {name: last[of] for name, of in models.items() if of in last}
        if self.unseen is not None:
            rows["unseen clients"] = self.unseen["after"]
        if self.constant is not None:
            rows[f"constant {np.round(self.constant[0], 4)}"] = {head.name: self.constant[1]}
        found = [("", head.words + head.unit, "p90" if lower else "p10", "worst", *others)]
        for name, scores in rows.items():
            over = over_clients(np.asarray(scores[head.name]), lower=lower)
            mean, low, least = (head.number(over[what]) for what in ("mean", "p10", "worst_decile"))
            spread = "" if over["std"] is None else f" ±{head.number(over['std'])}"
            means = [over_clients(np.asarray(scores[m]))["mean"] if m in scores else None for m in others]
            found.append((name, mean + spread, low, least, *("-" if m is None else f"{m:.4g}" for m in means)))
        widths = [max(map(len, column)) for column in zip(*found, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in found]
        runs, clients = self.scores["after"][head.name].shape[1:]
        title = f"{self.method}: {clients} clients, {self.rounds[-1]} rounds, {runs} seed{'s' * (runs > 1)}"
        ids = np.arange(clients) if self.client_ids is None else self.client_ids
        who = {"client_ids": ids, "client_names": ids if self.client_names is None else self.client_names}
        lines.append(f"worst clients: {words_of_clients(worst(self.personalized_score, who, head), head)}")
        return "\n".join([title, *lines])

    def statement(self, delta: float | None = None, run: int = 0, accountant: Accountant | None = None) -> Statement:
        """Privacy guarantee of a run: epsilon at this delta, and the assumptions of the guarantee.

        If `simulation.advance` has trained further rounds, the guarantee includes them. Another simulation cannot
        continue these runs unless it adopts them (`Simulation.adopt`).

        Args:
          delta: delta of the privacy claim; by default, the delta of the `PrivacyConfig`.
          run: index of the run among the S runs.
          accountant: "pld" or "rdp". The default is "rdp" for cohorts of a fixed size, which "pld" does not support,
            and otherwise "pld".

        Raises:
          JaxpflError: if the run is not private or has no noise, if no delta is given, or as in `PrivacyPlan.epsilon`.
        """
        if self.privacy is None:
            raise JaxpflError("the run was not private: use fit(privacy=Mechanism(...)) with a method that uploads")
        plan = self.privacy[run]
        if plan is None:
            raise JaxpflError(exclusions.NO_NOISE)
        if delta is None:
            delta = self.delta
        if delta is None:
            raise JaxpflError("a privacy claim requires delta: use statement(delta=...), or PrivacyConfig(delta=...)")
        plan = dataclasses.replace(plan, rounds=max(plan.rounds, self.simulation.rounds_run))
        statement = plan.statement(delta, accountant or plan.default_accountant)
        noise = self.simulation.algorithm.noise
        seed = "secret" if noise is not None and noise.secret else "run"
        cut = statement.cut and self.simulation.remembers()
        return statement._replace(noise_seed=seed, cut=cut, caveats=self.caveats)

    @property
    def clipping_remark(self) -> str | None:
        """Remark for a private run whose clipping norm is far from the norms of the uploads; otherwise None."""
        if self.privacy is None or None in self.privacy or not {"upload_norm", "clipping_norm"} <= self.history.keys():
            return None
        clients = self.simulation.participation.num_clients
        return noise.remark(self.history["upload_norm"], self.history["clipping_norm"], clients)

    @property
    def clusters(self) -> np.ndarray | None:
        """Cluster of each client after the last round, [S, m], numbered from 0 in each run; None if the method does not
        find clusters."""
        return self.simulation.clusters(self.state)

    @property
    def attackers(self) -> np.ndarray | None:
        """True for each client that attacks, [m] bool; None without an attack."""
        return self.simulation.attackers

    @property
    def seconds(self) -> np.ndarray | None:
        """Simulated seconds from the start to the end of each round, [S, rounds]; None without a ``time_model``."""
        rounds = self.history.get("round_seconds")
        return None if rounds is None else np.cumsum(np.asarray(rounds, np.float64), axis=1)

    def time_to(self, score: float, model: str = "after") -> np.ndarray:
        """Simulated seconds until the first evaluation with a mean score that reaches ``score``, [S].

        The mean score is the mean of the `headline` metric over clients, on test examples. It must be at least
        ``score``, or at most ``score`` if lower scores are better. A run that never reaches ``score`` has NaN.

        Args:
          score: mean score to reach.
          model: model that is scored: ``global``, ``before`` or ``after``.

        Raises:
          JaxpflError: if there is no ``time_model``, or if the model is unknown.
        """
        if (seconds := self.seconds) is None:
            raise JaxpflError("the run has no simulated time: pass time_model to fit")
        if model not in self.scores:
            raise unknown_name("model", model, list(self.scores))
        means = mean_over_clients(np.asarray(self.scores[model][self.headline], np.float64))
        lower = self.task is not None and self.task.lower
        return first_time(means, seconds[:, np.asarray(self.rounds) - 1].T, score, lower=lower)

    @property
    def unseen_accuracy(self) -> np.ndarray | None:
        """Test accuracy of each unseen client after its adaptation, [S, u]; None if there are no unseen clients."""
        return None if self.unseen is None else np.asarray(_metric_scores(self.unseen["after"], "accuracy"))

    @property
    def personalized_accuracy(self) -> np.ndarray:
        """Test accuracy of each client's personalized model after the last round, [S, m]; NaN for attackers."""
        return _metric_scores(self.scores["after"], "accuracy")[-1]

    @property
    def validation_accuracy(self) -> np.ndarray | None:
        """Accuracy of each client's personalized model on its validation examples after the last round, [S, m].

        None if no client has validation examples. Choose hyper-parameters by this accuracy: test examples are for
        reporting.
        """
        return None if self.validation is None else _metric_scores(self.validation["after"], "accuracy")[-1]

    @property
    def gradients(self) -> GradientCounts | None:
        """Gradient evaluations of each client; None if the method does not count them (`Client.gradients`)."""
        return self.simulation.gradients(self.state)

    @property
    def global_accuracy(self) -> np.ndarray | None:
        """Test accuracy of the global model on each client after the last round, [S, m]; None if there is no such
        model."""
        return _metric_scores(self.scores["global"], "accuracy")[-1] if "global" in self.scores else None

    @property
    def headline(self) -> str:
        """Name of the task's main metric, such as accuracy or rmse. Lower values are better if `Task.lower` is true."""
        return "accuracy" if self.task is None else self.task.headline

    @property
    def personalized_score(self) -> np.ndarray:
        """`headline` score of each client's personalized model on its test examples after the last round, [S, m]."""
        return self.scores["after"][self.headline][-1]

    @property
    def validation_score(self) -> np.ndarray | None:
        """`headline` score of each client's personalized model on its validation examples after the last round, [S, m].

        None if no client has validation examples.
        """
        return None if self.validation is None else self.validation["after"][self.headline][-1]

    @property
    def best_rounds(self) -> np.ndarray | None:
        """Round with the best mean validation score of each run, [S]; the first one if several are equal.

        None if no client has validation examples, or if all validation scores of a run are NaN. A privacy claim does
        not cover the choice of a round by validation scores.
        """
        best = self._best
        return None if best is None else self.rounds[best]

    @property
    def best_score(self) -> np.ndarray | None:
        """`headline` score of each client's personalized model on its test examples after the best round, [S, m].

        The best round of each run is in `best_rounds`; the score is None if `best_rounds` is None.
        """
        best = self._best
        return None if best is None else self.scores["after"][self.headline][best, np.arange(len(best))]

    @property
    def _best(self) -> np.ndarray | None:
        if self.validation is None:
            return None
        means = mean_over_clients(self.validation["after"][self.headline])
        if np.isnan(means).all(axis=0).any():
            return None
        return chosen(means, self.patience, lower=self.task is not None and self.task.lower).best

    @property
    def global_score(self) -> np.ndarray | None:
        """`headline` score of the global model on each client after the last round, [S, m]; None if there is no such
        model."""
        return self.scores["global"][self.headline][-1] if "global" in self.scores else None

    def mean(self, metric: str | None = None, model: str = "after", weights: str = "clients") -> np.ndarray:
        """Mean of a metric over clients after the last round, [S]. Attackers and clients without a score are left out.

        Args:
          metric: name of the metric; by default, `headline`.
          model: model that is scored: ``global``, ``before`` or ``after``.
          weights: ``clients`` for equal weights, or ``examples`` for the weights ``test_sizes``. With ``examples``, the
            mean of an accuracy, loss, MAE or RMSE is the score of all test examples together; see `mean_over_examples`.

        Raises:
          JaxpflError: if a name is unknown.
        """
        for what, name, known in (
            ("model", model, list(self.scores)),
            ("metric", metric or self.headline, list(self.scores["before"])),
            ("weights", weights, ["clients", "examples"]),
        ):
            if name not in known:
                raise unknown_name(what, name, known)
        name = metric or self.headline
        scores = np.asarray(self.scores[model][name][-1], np.float64)
        if weights == "clients":
            return mean_over_clients(scores)
        return mean_over_examples(scores, np.asarray(self.test_sizes), root=is_root(self.task, name))


class Evaluated(NamedTuple):
    """Argument of callbacks after an evaluation: S runs, m clients, T rounds since the previous evaluation.

    Attributes:
      round: number of finished rounds.
      history: metrics of the rounds since the previous evaluation, each [S, T].
      scores: scores on test examples, ``scores[model][metric]``, [S, m].
      validation: scores on validation examples, in the same form; None if no client has validation examples.
      attacked: scores of the attackers, as in `Fit`; None without an attack.
    """

    round: int
    history: dict[str, np.ndarray]
    scores: Scores
    validation: Scores | None
    attacked: Scores | None = None


def _metric_scores(scores: Mapping[str, Any], metric: str) -> Any:
    """Scores of one metric.

    Raises:
      JaxpflError: if the task does not have the metric.
    """
    if metric not in scores:
        known = ", ".join(name for name in scores if name not in ("diverged", "gradients"))
        raise JaxpflError(f"the task has no metric {metric!r}, only {known}: see personalized_score and Fit.mean")
    return scores[metric]


def train(
    spec: RunSpec,
    federation: Federation,
    unseen: Federation | None = None,
    callbacks: Sequence[Callable[[Evaluated], None]] = (),
) -> Fit:
    """Train a method and score every client on its test examples; no files are written.

    Args:
      spec: method and settings of the run.
      federation: clients that are trained.
      unseen: clients that are never trained, if any.
      callbacks: functions that are called in order after every evaluation.

    Raises:
      JaxpflError: if a setting is incompatible with the data.
    """
    assembled = assemble(spec, federation, unseen)
    simulation, released = assembled.simulation(), assembled.released(len(spec.seeds))
    patience, task = spec.patience, assembled.task
    if processes.several():
        processes.agree("fit's", _comparable(spec))
    state = simulation.init(spec.seeds)
    evaluated: list[Evaluated] = []
    for stop in milestones(0, spec.rounds, spec.eval_every or spec.rounds):
        state, history = simulation.advance(state, stop - (evaluated[-1].round if evaluated else 0))
        scores = simulation.evaluate_splits(state)
        evaluated.append(Evaluated(stop, history, scores["test"], scores.get("validation"), scores.get("attackers")))
        for callback in callbacks:
            callback(evaluated[-1])
        if patience is not None:
            scored = [one.validation["after"] for one in evaluated if one.validation is not None]
            means = [mean_over_clients(np.asarray(scores[task.headline])) for scores in scored]
            if chosen(np.stack(means), patience, lower=task.lower).over.all():
                break
    return result(assembled, released, simulation, state, evaluated)


def result(
    assembled: Assembled, released: Released, simulation: Simulation, state: RunState, evaluated: Sequence[Evaluated]
) -> Fit:
    """Collect the result of a run, and score its unseen clients.

    Args:
      assembled: inputs of the run.
      released: privacy plan of each run, as `Assembled.released` returns it.
      simulation: simulation of the run.
      state: state after the last round.
      evaluated: all evaluations; the last one is after the last round.
    """
    spec, task, federation = assembled.spec, assembled.task, assembled.federation
    starts_given = spec.warm_start is not None or isinstance(task.model.init, Given)
    private = assembled.mechanism is not None
    histories = [one.history for one in evaluated]
    validations = [one.validation for one in evaluated if one.validation is not None]
    return Fit(
        simulation,
        state,
        {name: np.concatenate([h[name] for h in histories], axis=1) for name in histories[0]},
        np.array([one.round for one in evaluated]),
        _stacked([one.scores for one in evaluated]),
        _stacked(validations) if validations else None,
        None if assembled.unseen is None else simulation.evaluate_unseen(state),
        released,
        (GIVEN_START,) * (private and starts_given) + (STOPPED,) * (private and spec.patience is not None),
        spec.privacy.delta if isinstance(spec.privacy, PrivacyConfig) else None,
        task,
        example_weights(federation.test, task.kind),
        spec.patience,
        evaluated[-1].attacked,
        federation.client_names,
        spec.method.name,
        np.asarray(federation.client_ids),
        constant_scores(federation, task.kind, task.headline),
    )


def _comparable(spec: RunSpec) -> dict[str, Any]:
    """Settings of a run that are strings, numbers or None, by name; these can be compared between processes."""
    told = {"method": spec.method.name} | vars(part_of(Settings, spec)) | vars(spec.plan)
    return {name: value for name, value in told.items() if value is None or isinstance(value, str | int | float)}


def _stacked(evaluations: list[Scores]) -> dict[str, dict[str, np.ndarray]]:
    """Scores of E evaluations, as ``scores[model][metric]``, arrays [E, S, m]."""
    return {
        which: {name: np.stack([e[which][name] for e in evaluations]) for name in metrics}
        for which, metrics in evaluations[0].items()
    }
