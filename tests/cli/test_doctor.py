"""``jaxpfl doctor``, with and without something broken."""

import sys
from types import SimpleNamespace

import numpy as np
from command import jaxpfl


def test_an_installation_that_trains_and_one_that_does_not(capsys, monkeypatch):
    result = jaxpfl(capsys, "doctor", "--json")
    assert result.json["ok"]
    assert result.json["data"]["digits"] == "ready"
    monkeypatch.setattr(
        sys.modules["jaxpfl.engine.fit"], "fit", lambda *_, **__: SimpleNamespace(personalized_accuracy=np.array([0.3]))
    )
    result = jaxpfl(capsys, "doctor")
    assert (result.status, result.err.count("\n")) == (2, 1)
    assert "accuracy, 0.300, is not above .6" in result.err
    assert "data: " in result.out
