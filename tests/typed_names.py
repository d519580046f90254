"""Names of the public face as a type checker sees them: nothing here runs, pyright reads it.

An error that is expected is named; one that does not come is an error itself.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import assert_type

import numpy as np

import jaxpfl
from jaxpfl import Federation, Fit, fit
from jaxpfl.data import Source


def names(federation: Federation) -> None:
    result = fit("local", federation)
    assert_type(result, Fit)
    fit("local", federation, rounds=3, lr=[0.1, 0.3], seeds=2)
    fit("local", federation, round=3)  # pyright: ignore[reportCallIssue]
    fit("local", federation, rounds="3")  # pyright: ignore[reportArgumentType]
    assert_type(jaxpfl.fit("local", federation).personalized_accuracy, np.ndarray)
    assert_type(jaxpfl.load("digits"), Source)
    assert_type(jaxpfl.data.load("digits"), Source)
    assert_type(jaxpfl.privacy.Mechanism(1.0), jaxpfl.privacy.Mechanism)
    jaxpfl.hyper(0.1, "a rate")
    from jaxpfl import fitt  # pyright: ignore[reportAttributeAccessIssue] # noqa: F401

    print(jaxpfl.nothing)  # pyright: ignore[reportAttributeAccessIssue]
    print(jaxpfl.data.nothing)  # pyright: ignore[reportAttributeAccessIssue]
