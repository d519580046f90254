"""Privacy of a stored run: the claim of each method, and the caveats of the parameters that it starts from."""

from __future__ import annotations

from typing import NamedTuple

from jaxpfl.engine.assembly import Assembled
from jaxpfl.runs.data_checksum import is_of
from jaxpfl.privacy import Mechanism, PrivacyConfig, SiloMechanism, Statement
from jaxpfl.privacy.statement import GIVEN_START, SAME_USERS, SPENT_BEFORE
from jaxpfl.core.types import Federation


class Origin(NamedTuple):
    """Origin of given parameters: the checksum of their training data, and whether they are private."""

    data: int
    private: bool


def caveat(origin: Origin | None, *federations: Federation | None) -> str:
    """Caveat of a run's claim due to its initial parameters, for these data."""
    if origin is None or not is_of(origin.data, *federations):
        return GIVEN_START
    return SPENT_BEFORE if origin.private else SAME_USERS


class Protection(NamedTuple):
    """A mechanism and its guarantee; None if nothing can be claimed, as without noise."""

    mechanism: Mechanism | SiloMechanism
    statement: Statement | None


def protection_of(run: Assembled, caveats: tuple[str, ...] = ()) -> Protection | None:
    """Mechanism and claim of a method's uploads or of its silos' examples; None without privacy.

    Args:
      run: of one noise multiplier.
      caveats: weaknesses of the claim.

    Raises:
      JaxpflError: for a run that cannot be accounted.
    """
    released = run.released(1)  # one for all seeds
    if run.mechanism is None or released is None:
        return None
    plan, asked = released[0], run.spec.privacy
    if plan is None:
        return Protection(run.mechanism, None)
    assert isinstance(asked, PrivacyConfig)
    assert asked.delta is not None
    statement = plan.statement(asked.delta, asked.accountant)
    return Protection(run.mechanism, statement._replace(noise_seed=asked.noise_seed, caveats=caveats))
