"""Early stopping: by validation alone, exact for each run of a program, and the rounds before are unchanged."""

from typing import Any

import numpy as np
import pytest

import jaxpfl
from jaxpfl import JaxpflError
from jaxpfl.engine.evaluate import chosen
from jaxpfl.privacy import PrivacyConfig


def by_hand(scores, patience):
    """(best, whether it ended, evaluations looked at) of one run of which more is better."""
    best = max(range(len(scores)), key=lambda i: (-np.inf if np.isnan(scores[i]) else scores[i], -i))
    for end in range(len(scores)):
        so_far = [-np.inf if np.isnan(s) else s for s in scores[: end + 1]]
        first = so_far.index(max(so_far)) if max(so_far) > -np.inf else -1
        if end - first >= patience:
            return max(first, 0), True, end + 1
    return best, False, len(scores)


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("patience", [1, 2, 4])
def test_each_run_ends_by_itself(patience, lower):
    rng = np.random.default_rng(patience)
    scores = rng.integers(0, 6, (9, 60)).astype(float)
    scores[rng.random(scores.shape) < 0.2] = np.nan
    found = chosen(-scores if lower else scores, patience, lower=lower)
    want = [by_hand(list(own), patience) for own in scores.T]
    assert found.best.tolist() == [best for best, _, _ in want]
    assert found.over.tolist() == [over for _, over, _ in want]


def federation(labels=0):
    rng = np.random.default_rng(3)

    def client(n):
        return rng.normal(size=(n, 4)).astype(np.float32), rng.integers(0, 3, n).astype(np.int32)

    parts = [[client(n) for _ in range(4)] for n in (12, 7, 6)]
    train, validation, test = parts
    test = [(x, (y + labels) % 3) for x, y in test]
    return jaxpfl.stack_clients(train, validation=validation, test=test)


def fitted(patience, labels=0, **more):
    given: dict[str, Any] = {"model": "linear", "rounds": 12, "eval_every": 2, "local_steps": 3, "batch_size": 4}
    given |= {"lr": 0.5, "seeds": 2, "num_classes": 3}
    return jaxpfl.fit("fedavg", federation(labels), patience=patience, **given | more)


def test_a_run_ends_without_a_better_validation_score():
    whole, early, other = fitted(None), fitted(2), fitted(2, labels=1)
    means = np.nanmean(whole.validation["after"]["accuracy"], axis=-1)
    looked = max(by_hand(list(own), 2)[2] for own in means.T)
    assert 2 < looked < len(whole.rounds)
    np.testing.assert_array_equal(early.rounds, whole.rounds[:looked])
    np.testing.assert_array_equal(early.history["train_loss"], whole.history["train_loss"][:, : early.rounds[-1]])
    np.testing.assert_array_equal(early.scores["after"]["loss"], whole.scores["after"]["loss"][:looked])
    best = [by_hand(list(own), 2)[0] for own in means.T]
    assert early.best_rounds.tolist() == whole.rounds[best].tolist()
    np.testing.assert_array_equal(early.best_score, whole.scores["after"]["accuracy"][best, [0, 1]])
    assert other.best_rounds is not None  # other labels of the test examples change nothing
    np.testing.assert_array_equal(other.best_rounds, early.best_rounds)
    np.testing.assert_array_equal(other.rounds, early.rounds)


@pytest.mark.slow
def test_a_private_run_that_stops_claims_all_rounds_and_says_what_chose_its_last():
    privacy = PrivacyConfig(noise_multiplier=1.0, delta=1e-3)
    early, whole = (fitted(patience, privacy=privacy) for patience in (1, None))
    assert early.rounds[-1] < 12
    claim = early.statement()
    assert (claim.rounds, claim.epsilon) == (12, whole.statement().epsilon)
    assert "chosen on the users' validation examples" in str(claim)
    assert "validation" not in str(whole.statement())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"eval_every": None}, "patience = 2 counts evaluations, but there is only one: set eval_every"),
        ({"patience": 0}, "patience must be at least 1, got 0"),
    ],
)
def test_what_cannot_stop_is_refused(more, message):
    with pytest.raises(JaxpflError, match=message):
        fitted(**{"patience": 2} | more)


def test_without_validation_examples_it_is_refused():
    given = federation()
    with pytest.raises(JaxpflError, match="patience = 2 requires validation examples, but no client has any"):
        jaxpfl.fit("fedavg", given._replace(validation=given.validation.emptied()), eval_every=1, patience=2)


def test_without_a_validation_score_it_is_refused():
    rng = np.random.default_rng(0)

    def split(labels):
        return [(rng.normal(size=(4, 2)).astype(np.float32), np.array(y, np.int32)) for y in labels]

    both = split([[0, 1, 0, 1]] * 2)
    ranked = jaxpfl.stack_clients(both, validation=split([[0] * 4, [1] * 4]), test=both)
    given: dict[str, Any] = {
        "task": "ranking",
        "model": "linear",
        "rounds": 2,
        "eval_every": 1,
        "local_steps": 1,
        "seeds": 1,
    }
    with pytest.raises(JaxpflError, match="patience = 2 requires a validation AUC, but no client has validation"):
        jaxpfl.fit("local", ranked, patience=2, **given)
    result = jaxpfl.fit("local", ranked, **given)
    assert result.validation is not None
    assert (result.best_rounds, result.best_score) == (None, None)
    tokens = [(np.ones((3, 4), np.int32), np.ones((3, 4), np.int32))]
    silent = jaxpfl.stack_clients(tokens, validation=[(tokens[0][0], -tokens[0][1])], test=tokens)
    with pytest.raises(JaxpflError, match="patience = 2 requires validation labels, but all of them are -1"):
        jaxpfl.fit("fedavg", silent, patience=2, **given | {"task": "next-token", "model": "gru:4"})
