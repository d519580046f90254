"""``fit``: train a method on stacked data from Python and score it, in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import numpy as np

from jaxpfl import algorithms, compression
from jaxpfl.algorithms import LocalWork, Method, Optimizer
from jaxpfl.algorithms.parts.hyper import rates, replace
from jaxpfl.algorithms.parts.server_optimizer import check_rate
from jaxpfl.compression import Compressor
from jaxpfl.data import check_labels, check_scales
from jaxpfl.engine import accounted
from jaxpfl.engine.arguments import check_rates, check_types, check_unseen
from jaxpfl.engine.assemble import check_positive, draw_cohorts, make_simulation, make_task, milestones, weighting_under
from jaxpfl.engine.client_graph import NEIGHBOURS, graph_for
from jaxpfl.engine.evaluate import Scores
from jaxpfl.engine.execution_plan import ExecutionPlan
from jaxpfl.engine.round import RunState
from jaxpfl.engine.simulation import Simulation
from jaxpfl.engine.state import GradientCounts
from jaxpfl.errors import JaxpflError, warn
from jaxpfl.models import Model
from jaxpfl.models.given import start_from
from jaxpfl.participation import availability
from jaxpfl.privacy import Accountant, Mechanism, PrivacyPlan, Refusal, Statement
from jaxpfl.privacy.statement import GIVEN_START
from jaxpfl.similarity.graphs import Graph
from jaxpfl.types import Federation, PyTree


class Fit(NamedTuple):
    """What `fit` returns. S runs (one for each seed), m clients, E evaluations.

    Attributes:
      simulation: the compiled programs, to go on from ``state``.
      state: the last state.
      history: metrics of every round, each [S, rounds].
      rounds: the rounds after which clients were scored, [E].
      scores: which model (``global`` where there is one, ``before``, ``after``) -> metric -> [E, S, m].
      validation: the same as ``scores`` on the validation examples, for choosing between settings; None where no client
        has any. A client without has NaN.
      unseen: ``scores`` of the unseen clients at the end, [S, u]; None where there are none.
      privacy: what each run released about its clients, S plans; None where nothing was private, or without noise.
      caveats: what weakens that claim in these runs.
    """

    simulation: Simulation
    state: RunState
    history: dict[str, np.ndarray]
    rounds: np.ndarray
    scores: dict[str, dict[str, np.ndarray]]
    validation: dict[str, dict[str, np.ndarray]] | None = None
    unseen: Scores | None = None
    privacy: tuple[PrivacyPlan | None, ...] | None = None
    caveats: tuple[str, ...] = ()

    def statement(self, delta: float, run: int = 0, accountant: Accountant | None = None) -> Statement:
        """What a run's privacy is worth: epsilon at this delta, and all that has to be said with it.

        Rounds that ``simulation.advance`` has added since are counted too; another simulation adds none to these runs
        unless it was made to (`Simulation.adopt`).

        Args:
          delta: of the claim.
          run: which of the S runs.
          accountant: "pld", or "rdp", which cohorts of a fixed size need; unless given the one that takes the run.

        Raises:
          JaxpflError: for a run without privacy or without noise, and as `PrivacyPlan.epsilon`.
        """
        if self.privacy is None:
            raise JaxpflError("nothing was private: give fit privacy=Mechanism(...), and a method that uploads")
        plan = self.privacy[run]
        if plan is None:
            raise Refusal.NO_NOISE.error()
        plan = dataclasses.replace(plan, rounds=max(plan.rounds, self.simulation.rounds_run))
        statement = plan.statement(delta, accountant or plan.default_accountant)
        noise = self.simulation.algorithm.noise
        seed = "secret" if noise is not None and noise.secret else "run"
        cut = statement.cut and self.simulation.remembers()
        return statement._replace(noise_seed=seed, cut=cut, caveats=self.caveats)

    @property
    def clusters(self) -> np.ndarray | None:
        """The cluster of each client after the last round, [S, m], numbered from 0 in each run; None for a method that
        finds none."""
        return self.simulation.clusters(self.state)

    @property
    def unseen_accuracy(self) -> np.ndarray | None:
        """Test accuracy of each unseen client after its adaptation, [S, u]; None where there are none."""
        return None if self.unseen is None else np.asarray(self.unseen["after"]["accuracy"])

    @property
    def personalized_accuracy(self) -> np.ndarray:
        """Test accuracy of each client's personalised model after the last round, [S, m]."""
        return self.scores["after"]["accuracy"][-1]

    @property
    def validation_accuracy(self) -> np.ndarray | None:
        """Accuracy of each client's personalised model on its validation examples after the last round, [S, m]; None
        where no client has any. Choose hyper-parameters by this one: test examples are for what is reported."""
        return None if self.validation is None else self.validation["after"]["accuracy"][-1]

    @property
    def gradients(self) -> GradientCounts | None:
        """How many gradients each client evaluated; None where the method does not say (`Client.gradients`)."""
        return self.simulation.gradients(self.state)

    @property
    def global_accuracy(self) -> np.ndarray | None:
        """Test accuracy of the global model on each client after the last round, [S, m]; None where there is none."""
        return self.scores["global"]["accuracy"][-1] if "global" in self.scores else None


def fit(
    method: str | Method,
    federation: Federation,
    *,
    model: str | Model | nn.Module = "mlp",
    num_classes: int | None = None,
    rounds: int = 100,
    cohort: int | None = None,
    local_steps: int = 10,
    batch_size: int = 20,
    client_optimizer: Optimizer = "sgd",
    server_optimizer: Optimizer = "sgd",
    lr: float | Sequence[float] | None = None,
    server_lr: float | Sequence[float] | None = None,
    seeds: int | Sequence[int] = 1,
    hyper: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    warm_start: PyTree | None = None,
    eval_every: int | None = None,
    participation: str | None = None,
    cohort_cap: int | None = None,
    weighting: str | None = None,
    privacy: Mechanism | None = None,
    compress: str | Compressor | None = None,
    dropout: float = 0.0,
    stragglers: float = 0.0,
    unseen: Federation | None = None,
    adapt_rounds: int = 10,
    graph: str | Graph | None = None,
    neighbours: int = NEIGHBOURS,
    plan: ExecutionPlan | None = None,
) -> Fit:
    """Trains a method and scores every client on its test examples.

    Example::

        federation = jaxpfl.federate(jaxpfl.load("digits"), clients=20, classes_per_client=3)
        result = jaxpfl.fit("adaped", federation, rounds=50, cohort=10, seeds=3)
        result.personalized_accuracy.mean()

    Args:
      method: a registered name, or a `Method` of your own.
      federation: the stacked data.
      model: a registered name, a flax.linen module, or any ``Model(init, apply)``.
      num_classes: the number of classes; by default the largest label plus one.
      rounds: federated rounds.
      cohort: clients in a round (the expected number, for Poisson participation); None for all.
      local_steps: steps of a client in a round.
      batch_size: examples in a step; a client with fewer uses all of them.
      client_optimizer: of the local steps: an optax name with arguments, ``"adam:b1=0.8"``, or a function of the
        learning rate, ``optax.adam``. It starts anew every round.
      server_optimizer: what makes a step of the mean increment, in the same form: ``"fedadam"``,
        ``"sgd:momentum=0.9"``.
      lr: the learning rate, for a sweep one for each run: of all the method's rates (``lr_personal`` and ``lr_global``
        among them), as ``--lr`` sets them. Each method's own unless given. ``hyper={"lr": ...}`` sets the one of that
        name, and wins.
      server_lr: the server's learning rate, the hyper-parameter ``server_lr``; 1 unless given.
      seeds: how many runs (seeds 0, 1, ...), or the seeds themselves; they run in one program. A seed may stand there
        several times where the runs' hyper-parameters or their noise differ.
      hyper: hyper-parameters by name; a value is a number or, for a sweep, one number for each run.
      options: the method's static options by name.
      warm_start: parameters that every model starts from in place of random ones, as the model's own ``init`` gives
        them, or by path (``"head/kernel"``).
      eval_every: score after every so many rounds and at the end; by default at the end only.
      participation: ``full``, ``uniform`` (exactly ``cohort`` clients) or ``poisson`` (each client independently).
        Unless given, full where the cohort is everybody, otherwise uniform, and with ``privacy`` Poisson.
      cohort_cap: slots of a Poisson cohort (`jaxpfl.participation.poisson`).
      weighting: of the clients in the mean, for methods that weigh them: ``examples`` (default) or ``uniform``.
      privacy: clips what clients upload and adds noise; `Fit.statement` says what that is worth. Clients then weigh
        the same. What cannot be accounted is refused.
      compress: how uploads are coded, ``"qsgd:levels=4"`` or ``"top-k:share=0.01"`` (`jaxpfl.compression.compressors`);
        ``Fit.history["upload_bits"]`` is what they take. With ``privacy``, its noise must be ``distributed``, and
        protects less than in a sum (`jaxpfl.privacy.plan_of`, ``compressed``).
      dropout: the probability that a client of a round does its work and uploads nothing.
      stragglers: the probability that a client takes fewer steps in a round, a number uniform on 1 ... local_steps.
      unseen: clients that are never trained (`jaxpfl.set_apart` makes some), for ``Fit.unseen_accuracy``.
      adapt_rounds: the rounds that each of them works with the last message before it is scored.
      graph: which clients are neighbours, for a method that asks for it: a graph whose nodes are the federation's
        clients (`jaxpfl.similarity.graphs`), or of the nearest in ``data`` (the default), ``features`` or ``models``
        (`jaxpfl.engine.client_graph`).
      neighbours: how many each client has at least, where the graph is of the nearest.
      plan: how to execute.

    Raises:
      JaxpflError: for unknown names, values of another type or outside their range, and settings that the data do not
        allow.
    """
    check_types(locals())
    eval_every = rounds if eval_every is None else eval_every
    check_positive(
        rounds=rounds, local_steps=local_steps, batch_size=batch_size, eval_every=eval_every, neighbours=neighbours
    )
    if isinstance(method, str):
        method = algorithms.get(method)
    if unseen is not None:
        check_unseen(federation, unseen)
    largest = max(
        int(np.asarray(split.y).max(initial=0))
        for part in (federation, unseen)
        if part is not None
        for split in (part.train, part.validation, part.test)
    )
    if num_classes is None:
        num_classes = largest + 1
    if num_classes <= largest:
        raise JaxpflError(f"num_classes is {num_classes} but labels go up to {largest}")
    if not np.asarray(federation.test.mask).any():
        warn("no client has test examples: every score will be NaN")
    check_labels(federation)
    check_scales(federation)
    task = make_task(model, federation, num_classes)
    if warm_start is not None:
        task = start_from(task, warm_start)
    sizes = [np.asarray(part.train.size) for part in (federation, unseen) if part is not None]
    work = LocalWork(
        np.concatenate(sizes),
        local_steps,
        batch_size,
        optimizer=client_optimizer,
        server_optimizer=server_optimizer,
        weighting=weighting_under(privacy is not None, weighting),
        privacy=privacy,
        unseen=0 if unseen is None else unseen.num_clients,
    )
    work = dataclasses.replace(work, graph=graph_for(method, graph, federation, task, work, neighbours=neighbours))
    given = {} if lr is None else dict.fromkeys(rates(method.hyper), lr)
    given |= {} if server_lr is None else {"server_lr": server_lr}
    hp = replace(method.name, method.hyper, given | dict(hyper or {}))
    check_rates(method, lr, hyper or {})
    check_rate(server_optimizer, getattr(hp, "server_lr", 0.0))
    if server_optimizer != "sgd" and method is algorithms.METHODS.get(method.name) and not hasattr(hp, "server_lr"):
        warn(f"server_optimizer = {server_optimizer} changes nothing: {method.name} has no server optimizer")
    cohorts = draw_cohorts(federation.num_clients, cohort, participation, cohort_cap, private=privacy is not None)
    seeds = range(int(seeds)) if isinstance(seeds, int | np.integer) else seeds
    simulation = make_simulation(
        method,
        task,
        work,
        federation,
        cohorts,
        hp,
        options=options or {},
        privacy=privacy,
        compressor=None if compress is None else compression.resolve(compress),
        availability=availability(dropout, stragglers),
        plan=plan,
        unseen=unseen,
        adapt_rounds=adapt_rounds,
    )
    released = None
    if privacy is not None and method.uploads:
        released = accounted.plans(
            method,
            hp,
            options or {},
            privacy,
            cohorts,
            work,
            rounds=rounds,
            runs=len(seeds),
            compressed=compress is not None,
        )
    state = simulation.init(seeds)
    histories, evaluations, validations = [], [], []
    validates = bool(np.asarray(federation.validation.mask).any())
    stops = list(milestones(0, rounds, eval_every))
    for start, stop in zip([0, *stops], stops, strict=False):
        state, history = simulation.advance(state, stop - start)
        histories.append(history)
        evaluations.append(simulation.evaluate(state))
        if validates:
            validations.append(simulation.evaluate(state, "validation"))
    return Fit(
        simulation,
        state,
        {name: np.concatenate([h[name] for h in histories], axis=1) for name in histories[0]},
        np.array(stops),
        _stacked(evaluations),
        _stacked(validations) if validates else None,
        None if unseen is None else simulation.evaluate_unseen(state),
        released,
        () if privacy is None or warm_start is None else (GIVEN_START,),
    )


def _stacked(evaluations: list[Scores]) -> dict[str, dict[str, np.ndarray]]:
    """The scores of E evaluations: which model -> metric -> [E, S, m]."""
    return {
        which: {name: np.stack([e[which][name] for e in evaluations]) for name in metrics}
        for which, metrics in evaluations[0].items()
    }
