"""Privacy of a stored run: the claim of each method, and the caveats of the parameters that it starts from."""

from __future__ import annotations

from typing import NamedTuple

from jaxpfl.engine.assembly import Assembled
from jaxpfl.privacy import Mechanism, PrivacyConfig, Statement
from jaxpfl.privacy.statement import GIVEN_START, SAME_USERS, SPENT_BEFORE


class Origin(NamedTuple):
    """Whence given parameters are: the checksum of the data that they were trained on, and whether they are private."""

    data: int
    private: bool


def caveat(origin: Origin | None, data: int) -> str:
    """What the claim of a run on data of this checksum has to say of the parameters that it starts from."""
    if origin is None or origin.data != data:
        return GIVEN_START
    return SPENT_BEFORE if origin.private else SAME_USERS


class Protection(NamedTuple):
    """A mechanism, and what it is worth; None where nothing can be claimed, as without noise."""

    mechanism: Mechanism
    statement: Statement | None


def protection_of(run: Assembled, caveats: tuple[str, ...] = ()) -> Protection | None:
    """The mechanism between a method's clients and its server, and its claim; None where nothing is private.

    Args:
      run: of one noise multiplier.
      caveats: what weakens the claim.

    Raises:
      JaxpflError: for what cannot be accounted.
    """
    if run.mechanism is None or run.released is None:
        return None
    plan, asked = run.released[0], run.spec.privacy
    if plan is None:
        return Protection(run.mechanism, None)
    assert isinstance(asked, PrivacyConfig)
    assert asked.delta is not None
    statement = plan.statement(asked.delta, asked.accountant)
    return Protection(run.mechanism, statement._replace(noise_seed=asked.noise_seed, caveats=caveats))
