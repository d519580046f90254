"""Attackers of a run: who they are, what they change, and scores without them, by `fit` and on the command line."""

import json
from typing import Any

import numpy as np
import pytest

import jaxpfl
from jaxpfl import JaxpflError, data
from jaxpfl.cli import main
from jaxpfl.engine.build import assemble
from jaxpfl.engine.spec import RunSpec
from jaxpfl.uploads.robust import drawn, poisoned

SMALL: dict[str, Any] = {"model": "linear", "rounds": 2, "local_steps": 2, "batch_size": 5}


@pytest.fixture(scope="module")
def federation() -> jaxpfl.Federation:
    return jaxpfl.federate(jaxpfl.load("digits"), clients=10, classes_per_client=3, validation_share=0.2)


def test_attackers_are_that_share_and_a_matter_of_ids_and_seed_alone():
    ids = np.array([4, 0, 9, 2, 11, 5, 3])
    for share, count in ((0.2, 1), (0.22, 2), (0.5, 4), (0.9, 6)):
        assert drawn(ids, share, 0).sum() == count
    order = np.array([3, 0, 6, 2, 5, 1, 4])
    np.testing.assert_array_equal(drawn(ids[order], 0.4, 7), drawn(ids, 0.4, 7)[order])
    assert set(ids[drawn(ids, 0.2, 3)]) <= set(ids[drawn(ids, 0.5, 3)])
    assert len({tuple(drawn(ids, 0.4, seed)) for seed in range(20)}) > 5


@pytest.mark.parametrize(("share", "count"), [(0.01, 0), (0.99, 7)])
def test_some_attack_and_some_do_not(share, count):
    with pytest.raises(JaxpflError, match=f"attackers = {share:g} selects {count} of 7 clients"):
        drawn(np.arange(7), share, 0)


def test_flipped_labels_are_the_attackers_own_and_not_those_of_tests(federation):
    attackers = np.arange(10) % 3 == 0
    changed = poisoned(federation, attackers, 10)
    for split in ("train", "validation", "test"):
        before, after = getattr(federation, split), getattr(changed, split)
        flips = attackers[:, None] & before.mask & (split != "test")
        np.testing.assert_array_equal(after.y, np.where(flips, 9 - before.y, before.y))
        np.testing.assert_array_equal(after.x, before.x)


def test_a_run_trains_on_flipped_labels(federation):
    spec = RunSpec(method=jaxpfl.METHODS["fedavg"], model="linear", attack="label-flip", attackers=0.3)
    assembled = assemble(spec, federation)
    assert assembled.attackers is not None
    flipped = (assembled.federation.train.y != federation.train.y).any(axis=1)
    np.testing.assert_array_equal(flipped, assembled.attackers)
    assert assembled.attackers.sum() == 3


@pytest.mark.slow
def test_scores_are_of_the_honest_and_the_attackers_stand_apart(federation, tmp_path):
    given: dict[str, Any] = {"attack": "sign-flip", "attackers": 0.3, "aggregate": "median", **SMALL}
    found = jaxpfl.fit("fedavg", federation, seeds=2, **given)
    assert found.attackers is not None
    assert found.attacked is not None
    assert found.validation is not None
    assert found.attackers.sum() == 3
    here = found.personalized_accuracy
    np.testing.assert_array_equal(np.isnan(here), np.broadcast_to(found.attackers, here.shape))
    np.testing.assert_array_equal(np.isnan(found.attacked["after"]["accuracy"]), ~np.isnan(here))
    assert np.isnan(found.validation["after"]["loss"][-1]).any(axis=0).sum() == 3
    np.testing.assert_allclose(found.mean(), here[:, ~found.attackers].mean(axis=1))
    other = jaxpfl.fit("fedavg", federation, seeds=2, attack_seed=1, output=tmp_path / "run", **given)
    assert other.attackers is not None
    assert other.attacked is not None
    assert other.scores.keys() == found.scores.keys() == other.attacked.keys()
    assert not np.array_equal(found.attackers, other.attackers)


@pytest.mark.slow
def test_new_clients_do_not_attack(federation):
    trained, unseen = data.set_apart(federation, 2)
    found = jaxpfl.fit("fedavg", trained, unseen=unseen, attack="noise", attackers=0.3, **SMALL)
    assert found.unseen_accuracy is not None
    assert np.isfinite(found.unseen_accuracy).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aggregate": "medain"}, "unknown aggregate 'medain': did you mean 'median'"),
        ({"aggregate": "krum"}, "aggregate krum requires attackers: write krum:attackers=..."),
        ({"aggregate": "krum:attackers=4"}, "requires a cohort of at least 11, got 10"),
        ({"aggregate": "median:share=1"}, "unknown argument of aggregate median 'share'"),
        ({"aggregate": "trimmed-mean:fraction=0.05"}, "trims no client in rounds of 10: use .* at least 0.1"),
        ({"aggregate": "trimmed-mean:fraction=0.5"}, "trimmed-mean:fraction must be > 0 and < 0.5, got 0.5"),
        ({"aggregate": "norm-bound:bound=-1"}, "norm-bound:bound must be >= 0 and finite, got -1"),
        ({"aggregate": "geometric-median:steps=0"}, "geometric-median:steps must be a whole number >= 1, got 0"),
        ({"attack": "sign-flop", "attackers": 0.2}, "unknown attack 'sign-flop': did you mean 'sign-flip'"),
        ({"attack": "scale"}, "attack = scale requires attackers > 0"),
        ({"attackers": 0.2}, "attackers = 0.2 requires an attack: sign-flip, scale, noise, label-flip"),
        ({"attack": "scale:factor=0", "attackers": 0.2}, "scale:factor must be > 0 and finite, got 0"),
    ],
)
def test_what_means_nothing_is_refused(federation, changes, message):
    with pytest.raises(JaxpflError, match=message) as caught:
        jaxpfl.fit("fedavg", federation, **SMALL | changes)
    assert "\n" not in str(caught.value)


def test_a_method_without_a_mean_refuses_a_robust_one(federation):
    with pytest.raises(JaxpflError, match=r"aggregate = median .*adamix"):
        jaxpfl.fit("adamix", federation, aggregate="median", **SMALL)


def test_a_method_that_uploads_nothing_is_not_attacked(federation):
    robust = {"aggregate": "median", "attack": "noise", "attackers": 0.3}
    with pytest.warns(jaxpfl.JaxpflWarning, match=r"aggregate = median has no effect: .*; attack = noise has"):
        assemble(RunSpec(method=jaxpfl.METHODS["local"], model="linear", cohort=4, **robust), federation)


@pytest.mark.slow
def test_the_command_line_reports_both(tmp_path, capsys):
    folder = tmp_path / "run"
    flags = "--model linear --clients 10 --cohort 5 --rounds 4 --eval-every 2 --seeds 2 --validation-share .2"
    given = ["compare", "local", "fedavg", *flags.split(), "--attack", "label-flip", "--attackers", ".2"]
    main([*given, "--aggregate", "trimmed-mean:fraction=.2", "--output", str(folder)])
    assert "fedavg: 2 of 10 clients attack by label-flip, against trimmed-mean:fraction=.2" in " ".join(
        capsys.readouterr().out.split()
    )
    summary = json.loads((folder / "summary.json").read_text())["methods"]["fedavg"]
    assert (summary["aggregate"], summary["attack"]) == ("trimmed-mean:fraction=.2", "label-flip")
    with np.load(folder / "clients.npz") as stored:
        attack = np.isin(stored["client_ids"], summary["attackers"])
        here, apart = stored["fedavg/after_accuracy"], stored["fedavg/attackers_after_accuracy"]
    assert attack.sum() == 2
    np.testing.assert_allclose(summary["personalized_accuracy"]["mean"], here[:, ~attack].mean(), rtol=1e-6)
    np.testing.assert_allclose(summary["attackers_accuracy"]["mean"], apart[:, attack].mean(), rtol=1e-6)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (last,) = [r for r in records if r["method"] == "fedavg" and r["kind"] == "evaluation" and r["round"] == 4]
    np.testing.assert_allclose(last["personalized_accuracy"], here[:, ~attack].mean(axis=1), rtol=1e-6)
    assert np.isfinite(last["validation_accuracy"]).all()
