"""``jaxpfl privacy``: one JSON object on standard output; bad input is one line and exit status 2."""

import pytest
from command import jaxpfl

RUN = ("--rounds", "100", "--delta", "1e-4")
SAMPLED = ("--sampling-rate", "0.1", *RUN)
PAPER = ("--c1", "1", "--sigma1", "5", "--clients-per-round", "50", "--tau", "10", "--steps", "3000", "--delta", "1e-4")


def test_epsilon(capsys):
    result = jaxpfl(capsys, "privacy", "epsilon", "--noise-multiplier", "2", *SAMPLED)
    assert result.status == 0
    assert result.err == ""
    assert result.json == {
        "epsilon": pytest.approx(1.966, rel=5e-4),
        "delta": 1e-4,
        "accountant": "pld",
        "relation": "add-or-remove-one",
    }


@pytest.mark.slow
def test_accountants_and_ways_to_sample(capsys):
    def epsilon(*args: str) -> dict:
        return jaxpfl(capsys, "privacy", "epsilon", "--noise-multiplier", "2", *RUN, *args).json

    pld = epsilon("--sampling-rate", "0.1")["epsilon"]
    rdp = epsilon("--sampling-rate", "0.1", "--accountant", "rdp")
    assert rdp["accountant"] == "rdp"
    assert 1.05 * pld < rdp["epsilon"] < 1.2 * pld
    paper = epsilon("--sampling-rate", "0.1", "--accountant", "paper")
    assert "not a valid bound" in paper["note"]
    capped = epsilon("--sampling-rate", "0.1", "--clients", "50", "--cap", "12")
    assert capped["epsilon"] == pytest.approx(2.023, rel=5e-4)
    fixed = epsilon("--clients", "50", "--cohort", "5", "--accountant", "rdp")
    assert fixed["relation"] == "replace-one"
    assert fixed["epsilon"] > rdp["epsilon"]
    everyone = epsilon()["epsilon"]
    assert everyone > 4 * pld
    replaced = epsilon("--relation", "replace-one")
    assert replaced["relation"] == "replace-one"
    assert replaced["epsilon"] > 2 * everyone


@pytest.mark.parametrize(
    "args",
    [
        ("epsilon", "--noise-multiplier", "2", "--rounds", "5"),
        ("epsilon", "--noise-multiplier", "2", "--rounds", "5", "--sampling-rate", "0.1"),
        ("noise", "--epsilon", "2", "--rounds", "5", "--cycle", "2"),
        ("paper", *PAPER[:-2]),
    ],
)
def test_a_delta_that_one_published_client_has_is_warned_of(capsys, args):
    found = jaxpfl(capsys, "privacy", *args, "--clients", "50", "--delta", "0.02")
    assert found.status == 0
    assert "delta must be below 1 / clients = 0.02, got 0.02: publishing the data" in found.err
    assert jaxpfl(capsys, "privacy", *args, "--clients", "50", "--delta", "0.019").err == ""


def test_noise(capsys):
    result = jaxpfl(capsys, "privacy", "noise", "--epsilon", "13.16", "--rounds", "300", "--delta", "1e-4")
    assert result.json["noise_multiplier"] == pytest.approx(6.38, abs=0.0051)
    assert 13.15 < result.json["epsilon"] <= 13.16
    assert set(result.json) == {"noise_multiplier", "epsilon", "delta", "accountant", "relation"}


def test_paper(capsys):
    table = jaxpfl(capsys, "privacy", "paper", "--clients", "50", *PAPER).json
    epsilons = [table["paper"]["epsilon"]]
    epsilons += [table[v][r]["epsilon"] for v in ("end_of_round", "per_step") for r in ("zero_out", "replace_one")]
    assert epsilons == pytest.approx([7.87, 6.46, 15.67, 29.5, 83.6], rel=1e-3)
    both = jaxpfl(capsys, "privacy", "paper", "--clients", "50", *PAPER, "--c2", "1", "--sigma2", "5").json
    assert both["paper"]["epsilon"] == pytest.approx(12.15, rel=1e-3)
    sampled = jaxpfl(capsys, "privacy", "paper", "--clients", "500", *PAPER).json
    assert sampled["paper"]["epsilon"] < sampled["end_of_round"]["zero_out"]["epsilon"] * 1.5
    assert sampled["end_of_round"]["zero_out"]["participation"] == "poisson"
    assert sampled["end_of_round"]["replace_one"]["accountant"] == "rdp"
    assert sampled["per_step"]["zero_out"]["epsilon"] <= sampled["per_step"]["replace_one"]["epsilon"]
