r"""Client participation: cohort sampling, stragglers and dropout, which all change the results.

A `Participation` draws the cohort as sorted row numbers in the stack of clients, [capacity] int32, one slot for each
client. A slot without a client has the row number m. An `Availability` draws the clients of the cohort that take fewer
local steps, and the uploads that are lost.

A client's random numbers in these draws depend on the client's id, not on its row in the stack.

**Simulated time.** A client evaluates :math:`g` gradients in a round, receives :math:`B_d` bytes and uploads
:math:`B_u` bytes. The time that it takes, in seconds, is

.. math:: t_i = g\, s\, c_i + \frac{B_d}{d\, l_i} + \frac{B_u}{u\, k_i}

where a gradient takes s seconds, and the downlink and the uplink transfer d and u bytes per second. The client's
factors :math:`c_i, l_i, k_i` are the same in all rounds. They are either all 1, or log-normal with median 1, where
sigma is the standard deviation of their logarithms. A synchronous round lasts until the slowest client of the cohort
has finished, even if that client's upload is lost. An asynchronous round (FedBuff) lasts until as many uploads have
arrived as a cohort has clients.

``--time-model`` and ``jaxpfl.fit(time_model=)`` accept ``equal:step=0.1,up=1e6,down=1e7``, or ``lognormal`` with the
additional arguments ``sigma=0.5,seed=0``. In synchronous rounds, only the reported time depends on the time model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxpfl.core import checks, settings
from jaxpfl.core.protocol import ALL_STEPS
from jaxpfl.core.randomness import Purpose, client_scores, stream
from jaxpfl.core.settings import PROBABILITY, RATE, SHARE, Range, check, read_help, setting
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.support.errors import JaxpflError, unknown_name


class TimeModel(NamedTuple):
    """Speeds of the clients.

    Attributes:
      step: time s that a client of median speed needs for a gradient, in seconds.
      up, down: median speeds u and d of the uplink and the downlink, in bytes per second; infinite if transfers take no
        time.
      sigma: standard deviation of the logarithms of the clients' factors.
      seed: seed of the factors.
    """

    step: float
    up: float
    down: float
    sigma: float = 0.0
    seed: int = 0

    def factors(self, client_id: Array) -> Array:
        """A client's factors (c, l, k), [3] float32."""
        if self.sigma == 0:
            return jnp.ones(3, jnp.float32)
        key = stream(jax.random.key(self.seed), Purpose.SPEEDS, client_id)
        return jnp.exp(self.sigma * jax.random.normal(key, (3,), jnp.float32))

    def seconds(self, client_ids: Array, gradients: Array, up: Scalar, down: Scalar) -> Array:
        """Duration of each client's round in seconds, [m].

        Args:
          client_ids: ids of the clients, [m].
          gradients: number of gradients that each client evaluates in the round, [m].
          up, down: number of bytes that a client uploads, and number of bytes that it receives, [] or [m].
        """
        compute, received, sent = jax.vmap(self.factors)(client_ids).T
        return gradients * self.step * compute + down / (self.down * received) + up / (self.up * sent)


def resolve_time_model(time_model: str) -> TimeModel:
    """Parse a time model such as ``equal:step=0.1``.

    Examples:
      >>> resolve_time_model("equal:step=0.1,up=1e6")
      TimeModel(step=0.1, up=1000000.0, down=inf, sigma=0.0, seed=0)

    Raises:
      JaxpflError: if the name or an argument is unknown, a value is out of range, or every round would take zero
        seconds.
    """
    name, values = settings.parse_choice("time model", time_model, TIME_MODELS)
    model = TIME_MODELS[name](**values)
    finite, positive = Range(0, math.inf, open_high=True), Range(0, open_low=True)
    ranges = {"step": finite, "up": positive, "down": positive, "sigma": finite, "seed": Range(0, 2**32 - 1)}
    for what, range in ranges.items():
        if (value := getattr(model, what)) not in range:
            raise JaxpflError(f"{name}:{what} must be {range.words}, got {value:g}")
    if model.step == 0 and math.isinf(model.up) and math.isinf(model.down):
        raise JaxpflError(f"time_model = {time_model} simulates rounds of zero seconds: set step, up or down")
    return model


def _equal(step: float = 0.0, up: float = math.inf, down: float = math.inf) -> TimeModel:
    return TimeModel(step, up, down)


def _lognormal(
    step: float = 0.0, up: float = math.inf, down: float = math.inf, sigma: float = 0.5, seed: int = 0
) -> TimeModel:
    return TimeModel(step, up, down, sigma, seed)


TIME_MODELS: Mapping[str, Callable[..., TimeModel]] = {"equal": _equal, "lognormal": _lognormal}
"""Factory functions of the time models by name; a time model's arguments are the function's keyword arguments."""


class Participation(NamedTuple):
    """Sampling scheme for the cohort.

    Attributes:
      name: name in config files and reports.
      num_clients: number m of clients.
      capacity: number of slots of the cohort, static.
      expected_cohort: expected number of clients that are drawn in a round (public).
      everyone: whether the cohort always consists of all m clients in order, static; the engine then need not gather
        the clients' rows.
      sample: function that draws the cohort, ``(key, client_ids [m]) -> rows [capacity] int32``: sorted row
        numbers, with m in empty slots.
      left_out: function that returns the number of clients drawn by ``sample`` (with the same key) in excess of the
        capacity, ``(key, client_ids [m]) -> [] int32``; None unless the number of drawn clients is random.
      rate: probability that a client is drawn, if clients are drawn independently; otherwise None. Of the drawn
        clients, at most ``capacity`` take part.
      fixed_size: whether the cohort always has ``capacity`` clients, drawn uniformly without replacement. No privacy
        guarantee can be claimed if ``rate`` is None and both ``fixed_size`` and ``everyone`` are false.
      cycle: period of the turns: a client's turn comes every ``cycle`` rounds; None if clients do not take turns. With
        turns, ``rate`` is the probability for the clients whose turn it is.
      turns: function that is used instead of ``sample`` if clients take turns: ``(key of the run, key of the round,
        round, client_ids [m]) -> rows [capacity] int32``.
    """

    name: str
    num_clients: int
    capacity: int
    expected_cohort: float
    everyone: bool
    sample: Callable[[Key, Array], Array]
    left_out: Callable[[Key, Array], Array] | None = None
    rate: float | None = None
    fixed_size: bool = False
    cycle: int | None = None
    turns: Callable[[Key, Key, Array, Array], Array] | None = None

    def rows(self, released: Key, round: Array, client_ids: Array) -> Array:
        """Draw the cohort of a round; return its sorted row numbers, [capacity] int32.

        Args:
          released: the run's key for cohorts and noise.
          round: number of finished rounds, [] int32.
          client_ids: ids of all clients in the order of their rows, [m].
        """
        key = stream(released, Purpose.PARTICIPATION, round)
        if self.turns is None:
            return self.sample(key, client_ids)
        return self.turns(stream(released, Purpose.CYCLE), key, round, client_ids)


def full(num_clients: int) -> Participation:
    """Full participation: every client takes part in every round."""
    _check(num_clients, num_clients)

    def sample(key: Key, client_ids: Array) -> Array:
        del key, client_ids
        return jnp.arange(num_clients, dtype=jnp.int32)

    return Participation("full", num_clients, num_clients, float(num_clients), True, sample)


def uniform(num_clients: int, cohort: int) -> Participation:
    """Uniform sampling without replacement: the K clients with the largest of m independent uniform scores."""
    _check(num_clients, cohort)

    def sample(key: Key, client_ids: Array) -> Array:
        _, rows = jax.lax.top_k(client_scores(key, client_ids), cohort)
        return jnp.sort(rows.astype(jnp.int32))

    return Participation("uniform", num_clients, cohort, float(cohort), False, sample, fixed_size=True)


def poisson(num_clients: int, rate: float, cap: int | None = None) -> Participation:
    """Poisson sampling: each client takes part with probability q, independently of the others.

    The cohort has ``cap`` slots. If more clients are drawn, a uniformly random subset of them takes part, and the
    others are counted as left out. Privacy accounting must include this truncation.

    Args:
      num_clients: number m of clients.
      rate: probability q, rounded up to a multiple of 2^-23. A client is drawn if its random score, a multiple of 2^-23
        too, is below q. `Participation.rate` is therefore exactly the probability that a client is drawn.
      cap: number of slots; by default m, which leaves no client out.

    Raises:
      JaxpflError: if the rate is outside (0, 1], or the cap is outside 1 ... m.
    """
    checks.rate("the rate of Poisson participation", rate)
    expected = rate * num_clients
    rate = math.ceil(rate * 2**23) / 2**23
    cap = num_clients if cap is None else cap
    if not 1 <= cap <= num_clients:
        raise JaxpflError(f"the cap of a Poisson cohort must be between 1 and {num_clients} clients, got {cap}")

    def sample(key: Key, client_ids: Array) -> Array:
        # The scores of the drawn clients are independent and uniform below q, so the clients with the lowest scores are
        # a uniformly random subset.
        lowest, rows = jax.lax.top_k(-client_scores(key, client_ids), cap)
        return jnp.sort(jnp.where(-lowest < rate, rows.astype(jnp.int32), num_clients))

    def count_left_out(key: Key, client_ids: Array) -> Array:
        return jnp.maximum((client_scores(key, client_ids) < rate).sum(dtype=jnp.int32) - cap, 0)

    return Participation("poisson", num_clients, cap, expected, False, sample, count_left_out, rate)


def cyclic(num_clients: int, cycle: int, rate: float = 1.0) -> Participation:
    """Cyclic participation: blocks of clients take turns, each block once in ``cycle`` consecutive rounds.

    Clients are divided at random into ``cycle`` blocks, whose sizes differ by at most one client. Round t is the turn
    of block t mod ``cycle``. Each client of this block takes part with probability ``rate``, independently.

    Reference: Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization", Algorithm 2.

    Args:
      num_clients: number m of clients.
      cycle: period of the turns, in rounds, at most m; a client's turn comes every ``cycle`` rounds.
      rate: probability that a client takes part when its turn comes, rounded up to a multiple of 2^-23.

    Raises:
      JaxpflError: if the cycle is outside 1 ... m, or the rate is outside (0, 1].
    """
    if not 1 <= cycle <= num_clients:
        raise JaxpflError(f"cycle must be between 1 and {num_clients} (the number of clients), got {cycle}")
    checks.rate("the rate of cyclic participation", rate)
    expected, capacity = rate * num_clients / cycle, math.ceil(num_clients / cycle)
    rate = math.ceil(rate * 2**23) / 2**23

    def turns(of_blocks: Key, key: Key, round: Array, client_ids: Array) -> Array:
        # Scores are multiples of 2^-23 and can tie. Ties are broken by id, so that the stack's order does not matter.
        order = jnp.lexsort((client_ids, client_scores(of_blocks, client_ids)))
        places = jnp.arange(capacity) * cycle + round % cycle
        rows = jnp.where(places < num_clients, order.at[places].get(mode="clip"), num_clients)
        if rate != 1:
            here = client_scores(key, client_ids).at[rows].get(mode="fill", fill_value=1.0) < rate
            rows = jnp.where(here, rows, num_clients)
        return jnp.sort(rows.astype(jnp.int32))

    def sample(key: Key, client_ids: Array) -> Array:
        raise JaxpflError("cyclic cohorts depend on the round: use Participation.rows")

    return Participation("cyclic", num_clients, capacity, expected, False, sample, rate=rate, cycle=cycle, turns=turns)


def of(
    num_clients: int,
    cohort: int | None,
    kind: str | None = None,
    cap: int | None = None,
    cycle: int | None = None,
) -> Participation:
    """Make the participation scheme for a cohort of the given expected size.

    Args:
      num_clients: number m of clients.
      cohort: expected number K of clients in a round; None for all clients.
      kind: ``full``, ``uniform`` (exactly K without replacement), ``poisson`` (each client with probability K / m) or
        ``cyclic`` (blocks of clients take turns); by default ``full`` if K = m and otherwise ``uniform``.
      cap: number of slots of a Poisson cohort; by default m.
      cycle: period of the turns, in rounds, for cyclic cohorts. Each client of the round's block then takes part with
        probability K * cycle / m. The default is ceil(m / K), with which the whole block takes part.

    Raises:
      JaxpflError: if the kind is unknown, the cohort or the cap is outside 1 ... m, full participation has a cohort
        below m, a cap is given without Poisson cohorts, a cycle is given without cyclic cohorts, or K times the cycle
        exceeds m.
    """
    cohort = num_clients if cohort is None else cohort
    _check(num_clients, cohort)
    if kind is None:
        kind = "full" if cohort == num_clients else "uniform"
    if kind not in ("full", "uniform", "poisson", "cyclic"):
        raise unknown_name("participation", kind, ("full", "uniform", "poisson", "cyclic"))
    if cycle is not None and kind != "cyclic":
        raise JaxpflError(f"cycle = {cycle} requires participation = cyclic, got {kind}")
    if kind == "poisson":
        return poisson(num_clients, cohort / num_clients, cap)
    if cap is not None:
        raise JaxpflError(f"cap = {cap} requires participation = poisson, got {kind}")
    if kind == "cyclic":
        if cycle is None:
            return cyclic(num_clients, math.ceil(num_clients / cohort))
        if cohort * cycle > num_clients:
            raise JaxpflError(
                f"cycle must be at most clients / cohort = {num_clients / cohort:g}, got {cycle}: "
                "with a longer cycle, a round's block would have fewer clients than the cohort"
            )
        return cyclic(num_clients, cycle, cohort * cycle / num_clients)
    if kind == "full" and cohort != num_clients:
        raise JaxpflError(f"full participation requires a cohort of all {num_clients} clients, got {cohort}")
    return full(num_clients) if kind == "full" else uniform(num_clients, cohort)


class FailureRates(NamedTuple):
    """Probabilities of an `Availability`, one for all runs, [], or one for each run, [S]; None for a failure that never
    occurs. They are arguments of a compiled program.
    """

    dropout: Scalar | None = None
    stragglers: Scalar | None = None


@read_help
@dataclass(frozen=True, kw_only=True)
class Availability:
    """Random failures of clients in the cohort, drawn independently for each client.

    A probability is one number for all runs, [], or one number for each of S runs, [S]. In a run with probability 0, no
    client fails, even if other runs have positive probabilities.

    Slow clients take fewer local steps, as in Li et al. 2020, "Federated Optimization in Heterogeneous Networks".
    """

    dropout: Scalar = setting(0.0, range=SHARE, kind=RATE, text=float)
    """Probability that a client of the cohort trains and keeps its new state, but its upload is lost.

    Also a list with one probability for each run of a sweep.
    """
    stragglers: Scalar = setting(0.0, range=PROBABILITY, kind=RATE, text=float)
    """Probability that a client is slow in a round: it takes a uniformly random number of steps from 1 to LOCAL_STEPS.

    Also a list with one probability for each run of a sweep.
    """
    same_stragglers: bool = setting(False)
    """The same clients are slow in every round, with fixed numbers of steps; otherwise slow clients are drawn anew."""
    time_model: str | None = setting(None, unless_given="none")
    """Simulated time of a client's round: equal:step=0.1,up=1e6,down=1e7 (seconds per gradient, bytes per second) or
    lognormal:step=0.1,up=1e6,down=1e7,sigma=0.5 for clients of unequal speeds. A round lasts until its slowest client
    has finished or, for fedbuff, until enough uploads have arrived. Results include the time."""

    def checked(self) -> Availability:
        """Check the settings and convert lists of probabilities to tuples.

        Raises:
          JaxpflError: if a value is outside its range, ``same_stragglers`` is set without stragglers, or the two lists
            have different lengths.
        """
        check(self)
        if self.time_model is not None:
            resolve_time_model(self.time_model)
        if self.same_stragglers and _never(self.stragglers):
            raise JaxpflError("same_stragglers requires stragglers > 0")
        values = [np.size(rate) for rate in (self.dropout, self.stragglers) if np.ndim(rate)]
        if len(set(values)) > 1:
            raise JaxpflError(
                f"dropout has {values[0]} values but stragglers has {values[1]}: give one value, or one for each run"
            )
        rates = (np.asarray(rate, float).tolist() for rate in (self.dropout, self.stragglers))
        dropout, stragglers = (tuple(rate) if isinstance(rate, list) else rate for rate in rates)
        return dataclasses.replace(self, dropout=dropout, stragglers=stragglers)

    @property
    def rates(self) -> FailureRates:
        """Probabilities, as arguments of a compiled program (`replace_rates`)."""
        given = (None if _never(rate) else np.asarray(rate, np.float32) for rate in (self.dropout, self.stragglers))
        return FailureRates(*given)

    @property
    def per_run(self) -> tuple[Availability, ...]:
        """Availability of each of the S runs; a single one if no probability is a list."""
        if not (np.ndim(self.dropout) or np.ndim(self.stragglers)):
            return (self,)
        dropout, stragglers = np.broadcast_arrays(*np.atleast_1d(self.dropout, self.stragglers))
        pairs = zip(dropout.tolist(), stragglers.tolist(), strict=True)
        return tuple(dataclasses.replace(self, dropout=lost, stragglers=slow) for lost, slow in pairs)

    def replace_rates(self, rates: FailureRates) -> Availability:
        """Return the same availability with other probabilities, traced or not."""
        dropout, stragglers = (0.0 if rate is None else rate for rate in rates)
        return dataclasses.replace(self, dropout=dropout, stragglers=stragglers)

    def step_limit(self, run_key: Key, round: Array, client_id: Array, steps: Scalar) -> Scalar:
        """Upper limit on a client's local steps in a round; `ALL_STEPS` (static) if there are no stragglers."""
        if _never(self.stragglers):
            return ALL_STEPS
        key = stream(run_key, Purpose.STRAGGLERS, client_id)
        if not self.same_stragglers:
            key = jax.random.fold_in(key, round)
        slow, share = jax.random.uniform(key, (2,), jnp.float32)
        # The minimum is needed because share * steps can be rounded up to steps.
        some = 1 + jnp.minimum((share * steps).astype(jnp.int32), steps - 1)
        return jnp.where(slow < self.stragglers, some, ALL_STEPS)

    def drops_out(self, run_key: Key, round: Array, client_id: Array) -> Array:
        """True if a client's upload is lost in a round, [] bool."""
        if _never(self.dropout):
            return jnp.array(False)
        key = stream(run_key, Purpose.DROPOUT, round, client_id)
        return jax.random.uniform(key, (), jnp.float32) < self.dropout


def _never(rate: Scalar | Sequence[float]) -> bool:
    """True if a probability is known at trace time to be zero in every run."""
    return not isinstance(rate, Tracer) and not np.any(rate)


RELIABLE = Availability()
"""Availability without failures."""


def _check(num_clients: int, cohort: int) -> None:
    if num_clients < 1:
        raise JaxpflError(f"clients must be at least 1, got {num_clients}")
    if not 1 <= cohort <= num_clients:
        raise JaxpflError(f"cohort must be between 1 and the number of clients ({num_clients}), got {cohort}")
