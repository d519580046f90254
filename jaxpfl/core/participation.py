"""Client participation: cohort sampling, stragglers and dropout. These change results, not only speed.

A `Participation` draws the cohort as sorted rows of the stack, [capacity] int32; an empty slot carries the row m. An
`Availability` decides which of its clients take fewer local steps, and whose upload is lost.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxpfl.core import client_times, cohort_draws
from jaxpfl.core.cohort_draws import CohortNumbers, Drawn
from jaxpfl.core.protocol import ALL_STEPS
from jaxpfl.core.randomness import Purpose, stream
from jaxpfl.core.settings import PROBABILITY, RATE, SHARE, check, setting
from jaxpfl.core.types import Array, Key, Scalar
from jaxpfl.support.errors import JaxpflError, unknown_name


class Participation(NamedTuple):
    """A sampling scheme of the cohort.

    Attributes:
      name: as in config files and reports.
      num_clients: m.
      capacity: slots of the cohort, static.
      expected_cohort: the expected number of clients in a round (public).
      everyone: static; true if the cohort is always all m clients in order (the engine then needs no gather).
      sample: ``(key, client_ids [m]) -> rows [capacity] int32``, sorted, m where empty.
      left_out: ``(key, client_ids [m]) -> [] int32``, how many clients of the same draw found no slot; None where that
        cannot happen.
      rate: the probability with which each client takes part, where clients do so independently; else None.
      fixed_size: whether the cohort is always ``capacity`` clients, uniformly without replacement. Where neither this
        nor ``rate`` nor ``everyone`` says how clients are drawn, nothing can be claimed of their privacy.
      cycle: rounds after which a client's turn comes again, where clients take turns; else None. ``rate`` is then that
        of the clients whose turn it is.
      turns: of such a scheme, in place of ``sample``: ``(key of the run, key of the round, round, client_ids [m]) ->
        rows [capacity] int32``.
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
        """The cohort of a round, sorted rows [capacity] int32.

        Args:
          released: key of the run's cohorts and noise.
          round: [] int32, the number of finished rounds.
          client_ids: [m].
        """
        key = stream(released, Purpose.PARTICIPATION, round)
        if self.turns is None:
            return self.sample(key, client_ids)
        return self.turns(stream(released, Purpose.CYCLE), key, round, client_ids)

    @property
    def numbers(self) -> CohortNumbers:
        """The numbers of the scheme, as arguments of a program that is made `without_numbers`."""
        rate = None if self.rate is None else np.float32(self.rate)  # exact, as it is a multiple of 2^-23
        return CohortNumbers(np.int32(self.num_clients), np.int32(self.capacity), self.expected_cohort, rate)

    def without_numbers(self, rows: int, capacity: int) -> Participation | None:
        """The scheme for a stack of ``rows`` clients, the last of which may be nobody's, and ``capacity`` slots.

        It draws once it has been given numbers (`at`). None for a scheme whose draws are not a registered one's.
        """
        if not isinstance(self.sample, Drawn) or not isinstance(self.left_out, Drawn | None):
            return None
        sample, left_out = (draw and Drawn(draw.draw, capacity, None) for draw in (self.sample, self.left_out))
        assert sample is not None
        return Participation(self.name, rows, capacity, float(capacity), self.everyone, sample, left_out)

    def at(self, numbers: CohortNumbers | None) -> Participation:
        """The scheme with these numbers, traced or not; itself if None."""
        if numbers is None:
            return self
        sample, left_out = (
            dataclasses.replace(draw, numbers=numbers) if isinstance(draw, Drawn) else draw
            for draw in (self.sample, self.left_out)
        )
        assert sample is not None
        return self._replace(
            num_clients=numbers.clients,
            expected_cohort=numbers.expected,
            sample=sample,
            left_out=left_out,
            rate=numbers.rate,
        )


def full(num_clients: int) -> Participation:
    """Every client in every round."""
    _check(num_clients, num_clients)
    sample = Drawn(cohort_draws.everyone, num_clients, CohortNumbers(num_clients, num_clients, float(num_clients)))
    return Participation("full", num_clients, num_clients, float(num_clients), True, sample)


def uniform(num_clients: int, cohort: int) -> Participation:
    """Uniform sampling of K of m clients without replacement: the K largest of m independent uniform scores."""
    _check(num_clients, cohort)
    sample = Drawn(cohort_draws.uniform, cohort, CohortNumbers(num_clients, cohort, float(cohort)))
    return Participation("uniform", num_clients, cohort, float(cohort), False, sample, fixed_size=True)


def poisson(num_clients: int, rate: float, cap: int | None = None) -> Participation:
    """Poisson sampling: each client takes part with probability q, independently of the others.

    The cohort has ``cap`` slots. If more clients are drawn, a uniformly random subset of them takes part and the others
    are counted as left out. That is another mechanism, which must be accounted as such (truncated).

    Args:
      num_clients: m.
      rate: q. Scores are multiples of 2^-23; q is rounded up to one, so that `Participation.rate` is what happens.
      cap: slots; m, which leaves nobody out, unless given.

    Raises:
      JaxpflError: for a rate outside (0, 1], or a cap outside 1 ... m.
    """
    if not 0 < rate <= 1:
        raise JaxpflError(f"the rate of Poisson participation must be > 0 and <= 1, got {rate}")
    expected = rate * num_clients
    rate = math.ceil(rate * 2**23) / 2**23
    cap = num_clients if cap is None else cap
    if not 1 <= cap <= num_clients:
        raise JaxpflError(f"the cap of a Poisson cohort must be between 1 and {num_clients} clients, got {cap}")

    numbers = CohortNumbers(num_clients, cap, expected, rate)
    sample, left_out = (Drawn(draw, cap, numbers) for draw in (cohort_draws.poisson, cohort_draws.left_out))
    return Participation("poisson", num_clients, cap, expected, False, sample, left_out, rate)


def cyclic(num_clients: int, cycle: int, rate: float = 1.0) -> Participation:
    """Blocks of clients that take turns: a client takes part at most once in any ``cycle`` consecutive rounds.

    Clients are divided into ``cycle`` blocks, at random by their ids and equally large up to one client; round t is
    that of block t mod ``cycle``, of which each client takes part with probability ``rate``, independently.

    Reference: Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization", Algorithm 2.

    Args:
      num_clients: m.
      cycle: rounds between two turns of a client, at most m.
      rate: probability of taking part when it is one's turn, rounded up to a multiple of 2^-23.

    Raises:
      JaxpflError: for a cycle outside 1 ... m, or a rate outside (0, 1].
    """
    if not 1 <= cycle <= num_clients:
        raise JaxpflError(f"the cycle of cohorts must be between 1 and {num_clients} clients, got {cycle}")
    if not 0 < rate <= 1:
        raise JaxpflError(f"the rate of cyclic participation must be > 0 and <= 1, got {rate}")
    expected, capacity = rate * num_clients / cycle, math.ceil(num_clients / cycle)
    rate = math.ceil(rate * 2**23) / 2**23
    numbers = CohortNumbers(num_clients, capacity, expected, rate)

    def turns(of_blocks: Key, key: Key, round: Array, client_ids: Array) -> Array:
        return cohort_draws.cyclic(of_blocks, key, round, client_ids, numbers, cycle, capacity)

    def sample(key: Key, client_ids: Array) -> Array:
        raise JaxpflError("cohorts by turns depend on the round: use Participation.rows")

    return Participation("cyclic", num_clients, capacity, expected, False, sample, rate=rate, cycle=cycle, turns=turns)


def of(
    num_clients: int,
    cohort: int | None,
    kind: str | None = None,
    cap: int | None = None,
    cycle: int | None = None,
) -> Participation:
    """The participation scheme for a cohort of the given expected size.

    Args:
      num_clients: m.
      cohort: K; None for all.
      kind: ``full``, ``uniform`` (exactly K without replacement), ``poisson`` (each client at the rate K / m) or
        ``cyclic`` (blocks of clients take turns); by default full where K = m, else uniform.
      cap: slots of a Poisson cohort; m unless given.
      cycle: rounds between two turns of a client (cyclic), each of whose block takes part at the rate K cycle / m;
        ceil(m / K) unless given, where the whole block does.

    Raises:
      JaxpflError: if the kind is unknown, the cohort is outside 1 ... m, full participation is asked of fewer than m,
        a cap is given for another than a Poisson cohort, or a cycle that is none of cyclic cohorts or too long for K.
    """
    cohort = num_clients if cohort is None else cohort
    _check(num_clients, cohort)
    if kind is None:
        kind = "full" if cohort == num_clients else "uniform"
    if kind not in ("full", "uniform", "poisson", "cyclic"):
        raise unknown_name("participation", kind, ("full", "uniform", "poisson", "cyclic"))
    if cycle is not None and kind != "cyclic":
        raise JaxpflError(f"cycle = {cycle} is for participation = cyclic, got {kind}")
    if kind == "poisson":
        return poisson(num_clients, cohort / num_clients, cap)
    if cap is not None:
        raise JaxpflError(f"a cap is for Poisson cohorts; {kind} ones have a fixed size")
    if kind == "cyclic":
        if cycle is None:
            return cyclic(num_clients, math.ceil(num_clients / cohort))
        if cohort * cycle > num_clients:
            raise JaxpflError(
                f"cycle must be at most clients / cohort = {num_clients / cohort:g}, got {cycle}: a turn has "
                f"{num_clients} / cycle clients"
            )
        return cyclic(num_clients, cycle, cohort * cycle / num_clients)
    if kind == "full" and cohort != num_clients:
        raise JaxpflError(f"full participation means a cohort of all {num_clients} clients, got {cohort}")
    return full(num_clients) if kind == "full" else uniform(num_clients, cohort)


class FailureRates(NamedTuple):
    """Probabilities of an `Availability` as arguments of a program, [] or [S]; None for what never happens."""

    dropout: Scalar | None = None
    stragglers: Scalar | None = None


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Settings of an `Availability`."""

    dropout: Scalar = setting(
        0.0,
        "Probability that a client of the cohort does its work and keeps its new state, but uploads nothing.",
        python="Also a list, one for each run of a sweep.",
        range=SHARE,
        kind=RATE,
        text=float,
    )
    stragglers: Scalar = setting(
        0.0,
        "Probability that a client takes fewer local steps in a round, a number uniform on 1 ... LOCAL_STEPS.",
        python="Also a list, one for each run of a sweep.",
        range=PROBABILITY,
        kind=RATE,
        text=float,
    )
    same_stragglers: bool = setting(
        False,
        "The same clients are slow in every round, each with its own number of steps; else drawn anew in each round.",
    )
    time_model: str | None = setting(
        None,
        "Simulated seconds of a client's round, equal:step=0.1,up=1e6,down=1e7 (of a gradient; bytes a second) or "
        "lognormal:step=0.1,up=1e6,down=1e7,sigma=0.5 for clients of unequal speeds. A round lasts as long as its "
        "slowest client, or until the next clients arrive (fedbuff); results have the time.",
        unless_given="none unless given",
        since="0.2",
    )

    def check(self) -> None:
        """Refuse values outside their ranges.

        Raises:
          JaxpflError.
        """
        check(self)
        if self.time_model is not None:
            client_times.resolve(self.time_model)
        if self.same_stragglers and _never(self.stragglers):
            raise JaxpflError("same_stragglers needs stragglers > 0")
        values = [np.size(rate) for rate in (self.dropout, self.stragglers) if np.ndim(rate)]
        if len(set(values)) > 1:
            raise JaxpflError(
                f"dropout has {values[0]} values and stragglers {values[1]}: give each one value, or one for each run"
            )


@dataclass(frozen=True, kw_only=True)
class Availability(Failures):
    """Failures of clients of the cohort. Draws are independent, and a client's do not depend on the others.

    A probability is one for all runs, [], or one for each run, [S]: a run at 0 among others fails as little as alone.

    Slow clients are those of Li et al. 2020, "Federated Optimization in Heterogeneous Networks" (systems
    heterogeneity).
    """

    @property
    def rates(self) -> FailureRates:
        """The probabilities, to be handed to a program that is made `without_rates`."""
        given = (None if _never(rate) else np.asarray(rate, np.float32) for rate in (self.dropout, self.stragglers))
        return FailureRates(*given)

    @property
    def by_run(self) -> tuple[Availability, ...]:
        """The availability of each run, [S]; of all runs, [1], where no probability is one for each."""
        if not (np.ndim(self.dropout) or np.ndim(self.stragglers)):
            return (self,)
        dropout, stragglers = np.broadcast_arrays(*np.atleast_1d(self.dropout, self.stragglers))
        pairs = zip(dropout.tolist(), stragglers.tolist(), strict=True)
        return tuple(dataclasses.replace(self, dropout=lost, stragglers=slow) for lost, slow in pairs)

    @property
    def without_rates(self) -> Availability:
        """The availability without its probabilities, on which a program still depends."""
        return dataclasses.replace(self, dropout=0.0, stragglers=0.0)

    def at(self, rates: FailureRates) -> Availability:
        """The same with these probabilities, traced or not."""
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
        some = 1 + jnp.minimum((share * steps).astype(jnp.int32), steps - 1)
        return jnp.where(slow < self.stragglers, some, ALL_STEPS)

    def drops_out(self, run_key: Key, round: Array, client_id: Array) -> Array:
        """True if a client's upload of a round is lost, [] bool."""
        if _never(self.dropout):
            return jnp.array(False)
        key = stream(run_key, Purpose.DROPOUT, round, client_id)
        return jax.random.uniform(key, (), jnp.float32) < self.dropout


def _never(rate: Scalar | Sequence[float]) -> bool:
    """True if a probability is known to be zero, in every run, when a program is made."""
    return not isinstance(rate, Tracer) and not np.any(rate)


RELIABLE = Availability()
"""Nobody fails."""


def availability(
    dropout: float | Sequence[float] = 0.0,
    stragglers: float | Sequence[float] = 0.0,
    *,
    same_stragglers: bool = False,
    time_model: str | None = None,
) -> Availability:
    """A checked `Availability`; a probability may be a list, one for each run.

    Raises:
      JaxpflError: for a value outside its range, and ``same_stragglers`` without stragglers.
    """
    slow = {"stragglers": stragglers, "same_stragglers": same_stragglers}
    made = Availability(dropout=dropout, **slow, time_model=time_model)
    made.check()
    rates = (np.asarray(rate, float).tolist() for rate in (dropout, stragglers))
    dropout, stragglers = (tuple(rate) if isinstance(rate, list) else rate for rate in rates)
    return dataclasses.replace(made, dropout=dropout, stragglers=stragglers)


def _check(num_clients: int, cohort: int) -> None:
    if num_clients < 1:
        raise JaxpflError(f"clients must be at least 1, got {num_clients}")
    if not 1 <= cohort <= num_clients:
        raise JaxpflError(f"cohort must be between 1 and the number of clients ({num_clients}), got {cohort}")
