"""``jaxpfl privacy audit METHOD``: the claim, two bounds and a verdict; bad input is one line."""

import json

import pytest
from command import jaxpfl

PRIVATE = ("--privacy.noise-multiplier", "1", "--privacy.delta", "1e-3")
SMALL = ("--clients", "8", "--cohort", "4", "--rounds", "2", "--local-steps", "1", "--batch-size", "2")
TRY = (*PRIVATE, *SMALL, "--model", "linear", "--plan.devices", "1")


@pytest.mark.slow
def test_an_audit(capsys, tmp_path):
    args = ("fedavg", *TRY, "--worlds", "40")
    result = jaxpfl(capsys, "privacy", "audit", *args, "--json", "--plot", tmp_path / "a.png")
    assert (result.status, result.out.count("\n")) == (0, 1)
    said = json.loads(result.out)
    assert said["refuted"] is False
    assert said["method"] == "fedavg"
    assert said["relation"] == "add-or-remove-one"
    for part, delta in (("worlds", 0.1), ("one_run", 1e-3)):
        assert said[part]["epsilon_lower_bound"] < said[part]["claimed_epsilon"]
        assert (said[part]["delta"], said[part]["confidence"]) == (delta, 0.95)
    assert said["worlds"]["worlds"] == 40
    assert said["one_run"]["canaries"] == 8
    assert said["noise"]["over_claimed"] == pytest.approx(1, abs=0.05)
    assert (tmp_path / "a.png").stat().st_size > 1000
    again = jaxpfl(capsys, "privacy", "audit", *args)
    assert again.out.splitlines()[-1] == "not refuted, which does not prove the claim"


@pytest.mark.slow
def test_the_first_line_says_what_is_not_seen(capsys):
    """Too few uploads come in any round."""
    noise = ("--privacy.noise", "distributed", "--privacy.min-uploads", "8", "--cohort", "8", "--dropout", "0.999")
    result = jaxpfl(capsys, "privacy", "audit", "fedavg", *TRY, *noise, "--worlds", "40")
    first, *rest = result.out.splitlines()
    assert first.endswith("; the noise cannot be tested: no round had enough uploads to release anything")
    assert "draws:    keys of draws p = 1, number and deviations of draws p = 1" in rest
