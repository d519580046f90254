"""``fit``: train a method on stacked data from Python and score it, in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jaxpfl import algorithms
from jaxpfl.algorithms import Method
from jaxpfl.engine.assemble import milestones
from jaxpfl.engine.assembly import assemble
from jaxpfl.engine.evaluate import Scores
from jaxpfl.engine.execution_plan import ExecutionPlan
from jaxpfl.engine.round import RunState
from jaxpfl.engine.simulation import Simulation
from jaxpfl.engine.spec import Settings, spec_of
from jaxpfl.engine.state import GradientCounts
from jaxpfl.errors import JaxpflError
from jaxpfl.privacy import Accountant, Mechanism, PrivacyConfig, PrivacyPlan, Refusal, Statement
from jaxpfl.privacy.statement import GIVEN_START
from jaxpfl.settings import BY_NAME, SEEDS, Kind, about, keywords_of, setting
from jaxpfl.types import Federation, PyTree


class Fit(NamedTuple):
    """Result of `fit`: S runs (one for each seed), m clients, E evaluations.

    Attributes:
      simulation: the compiled programs, to go on from ``state``.
      state: the last state.
      history: metrics of every round, each [S, rounds].
      rounds: the rounds after which clients were scored, [E].
      scores: model (``global`` if there is one, ``before``, ``after``) -> metric -> [E, S, m].
      validation: the same as ``scores`` on the validation examples, for choosing between settings; None if no client
        has any. NaN for a client without.
      unseen: ``scores`` of the unseen clients at the end, [S, u]; None if there are none.
      privacy: the releases of each run, [S] plans; None without privacy or without noise.
      caveats: weaknesses of that claim in these runs.
      delta: of that claim, as ``privacy=PrivacyConfig(delta=...)`` named it; None if nothing did.
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
    delta: float | None = None

    def statement(self, delta: float | None = None, run: int = 0, accountant: Accountant | None = None) -> Statement:
        """Privacy guarantee of a run: epsilon at this delta, with its assumptions.

        Rounds that ``simulation.advance`` has added since are counted too; another simulation cannot continue these
        runs unless told to (`Simulation.adopt`).

        Args:
          delta: of the claim; that of the PrivacyConfig unless given.
          run: the index among the S runs.
          accountant: "pld", or "rdp" as required for cohorts of fixed size; unless given the one that applies.

        Raises:
          JaxpflError: for a run without privacy or without noise, for no delta, and as `PrivacyPlan.epsilon`.
        """
        if self.privacy is None:
            raise JaxpflError("nothing was private: give fit privacy=Mechanism(...), and a method that uploads")
        plan = self.privacy[run]
        if plan is None:
            raise Refusal.NO_NOISE.error()
        if delta is None:
            delta = self.delta
        if delta is None:
            raise JaxpflError("delta must be given: the run's privacy names none, as PrivacyConfig(delta=...) would")
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
        where no client has any. Choose hyper-parameters by this one: test examples are for reporting."""
        return None if self.validation is None else self.validation["after"]["accuracy"][-1]

    @property
    def gradients(self) -> GradientCounts | None:
        """Gradient evaluations of each client; None if the method does not count them (`Client.gradients`)."""
        return self.simulation.gradients(self.state)

    @property
    def global_accuracy(self) -> np.ndarray | None:
        """Test accuracy of the global model on each client after the last round, [S, m]; None where there is none."""
        return self.scores["global"]["accuracy"][-1] if "global" in self.scores else None


def _is(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types)


_METHOD = "a registered name or a Method"
_FEDERATION = Kind("a Federation (jaxpfl.federate and jaxpfl.stack_clients make one)", _is(Federation))


@dataclass(frozen=True)
class _Arguments(Settings):
    method: str | Method = field(
        metadata=about("A registered name, or a `Method` of your own.", kind=Kind(_METHOD, _is(str, Method)))
    )
    federation: Federation = field(metadata=about("The stacked data.", kind=_FEDERATION))
    _: KW_ONLY
    seeds: int | Sequence[int] = setting(
        1,
        "Number of runs (seeds 0, 1, ...), or the seeds themselves; they run in one program. A seed may stand there "
        "several times where the runs' hyper-parameters or their noise differ.",
        kind=SEEDS,
    )
    hyper: Mapping[str, Any] | None = setting(
        None,
        "Hyper-parameters by name; a value is a number or, for a sweep, one number for each run.",
        kind=BY_NAME,
    )
    options: Mapping[str, Any] | None = setting(None, "The method's static options by name.", kind=BY_NAME)
    num_classes: int | None = setting(None, "Number of classes; the largest label plus one unless given.")
    warm_start: PyTree | None = setting(
        None,
        "Parameters that every model starts from in place of random ones, as the model's own init gives them, or by "
        'path ("head/kernel").',
    )
    unseen: Federation | None = setting(
        None,
        "Clients that are never trained (`jaxpfl.set_apart` makes some), for ``Fit.unseen_accuracy``.",
        kind=_FEDERATION,
    )
    privacy: Mechanism | PrivacyConfig | None = setting(
        None,
        "Clipping of what clients upload, and noise: a Mechanism, or a PrivacyConfig with a budget, to which the noise "
        "is calibrated. `Fit.statement` says what that is worth. Clients then weigh the same. What cannot be accounted "
        "is refused.",
        kind=Kind("a jaxpfl.privacy.Mechanism or PrivacyConfig", _is(Mechanism, PrivacyConfig)),
    )
    plan: ExecutionPlan | None = setting(None, "The way to execute.", kind=Kind("an ExecutionPlan", _is(ExecutionPlan)))


@keywords_of(_Arguments)
def fit(given: _Arguments) -> Fit:
    """Train a method and score every client on its test examples.

    Example::

        federation = jaxpfl.federate(jaxpfl.load("digits"), clients=20, classes_per_client=3)
        result = jaxpfl.fit("adaped", federation, rounds=50, cohort=10, seeds=3)
        result.personalized_accuracy.mean()

    Raises:
      JaxpflError: for unknown names, values of another type or outside their range, and settings that the data do not
        allow.
    """
    several = given.seeds
    seeds = range(int(several)) if isinstance(several, int | np.integer) else tuple(map(int, several))
    spec = spec_of(
        algorithms.get(given.method) if isinstance(given.method, str) else given.method,
        given,
        hyper=dict(given.hyper or {}),
        options=dict(given.options or {}),
        seeds=seeds,
        privacy=given.privacy,
        plan=given.plan or ExecutionPlan(),
        num_classes=given.num_classes,
        warm_start=given.warm_start,
    )
    federation, unseen = given.federation, given.unseen
    assembled = assemble(spec, federation, unseen)
    simulation, released = assembled.simulation(), assembled.released(len(spec.seeds))
    rounds, eval_every = spec.training.rounds, spec.training.eval_every or spec.training.rounds
    state = simulation.init(spec.seeds)
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
        () if assembled.mechanism is None or spec.warm_start is None else (GIVEN_START,),
        given.privacy.delta if isinstance(given.privacy, PrivacyConfig) else None,
    )


def _stacked(evaluations: list[Scores]) -> dict[str, dict[str, np.ndarray]]:
    """Scores of E evaluations: model -> metric -> [E, S, m]."""
    return {
        which: {name: np.stack([e[which][name] for e in evaluations]) for name in metrics}
        for which, metrics in evaluations[0].items()
    }
