"""Arguments of ``fit``: one meaning of a rate, and a one-line error for each wrong type or range."""

import inspect
from dataclasses import fields

import flax.linen as nn
import numpy as np
import optax
import pytest

import jaxpfl
from jaxpfl import ExecutionPlan, JaxpflError, JaxpflWarning, Model
from jaxpfl.core.participation import Availability
from jaxpfl.engine.spec import RunSpec
from jaxpfl.privacy import Mechanism, PrivacyConfig

NAN = float("nan")


@pytest.fixture(scope="module")
def federation() -> jaxpfl.Federation:
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(n, 4)), rng.integers(3, size=n)) for n in (5, 8, 6)]
    return jaxpfl.stack_clients(clients, test=clients, validation=[*clients[:2], (np.zeros((0, 4)), np.zeros(0, int))])


def other_shape() -> jaxpfl.Federation:
    return jaxpfl.stack_clients([(np.ones((3, 9)), np.arange(3))], client_ids=[77])


WRONG = [
    *[
        (name, value, f"{name} must be a whole number, got")
        for name in ("rounds", "local_steps", "batch_size", "eval_every", "cohort", "cohort_cap", "adapt_rounds")
        for value in (2.0, "2", True, NAN, [2])
    ],
    *[(name, None, f"{name} must be a whole number, got None") for name in ("rounds", "local_steps", "batch_size")],
    ("neighbours", 1.5, "neighbours must be a whole number, got 1.5"),
    ("num_classes", "3", "num_classes must be a whole number, got '3'"),
    *[(name, -1, f"{name} must be at least 1, got -1") for name in ("rounds", "local_steps", "batch_size")],
    ("cohort", -1, "cohort must be at least 1, got -1"),
    ("dropout", "0.1", "dropout must be a number, or one for each run, got '0.1'"),
    ("dropout", [0.1, 1.0], "dropout must be >= 0 and < 1, got 1.0"),
    ("dropout", [0.1, 0.2, 0.3], "dropout must be one value, or a value for each of 1 seeds, got 3 values"),
    ("stragglers", [0.1, None], "stragglers must be a number, or one for each run, got"),
    ("stragglers", True, "stragglers must be a number, or one for each run, got True"),
    ("stragglers", -0.5, "stragglers must be >= 0 and <= 1, got -0.5"),
    ("method", 3, "method must be a registered name or a Method, got 3"),
    ("method", "adapted", "did you mean 'adaped'"),
    ("federation", np.ones(3), "federation must be a Federation .*stack_clients make one"),
    ("model", 3, "model must be a registered name, a flax.linen, flax.nnx or equinox module .*got 3"),
    ("model", nn.Dense, "cannot make the model .*missing 1 required .*argument: 'features'.: give a function"),
    ("model", dict, "model must be a registered name, .* equinox module .an instance., a Model, or a function .*, got"),
    ("model", lambda outputs, shape: shape, "the result of the model's function must be a registered name, .*got .4,"),
    ("seeds", "3", "seeds must be a number of runs, or a list of whole numbers, got '3'"),
    ("seeds", [0, 1.5], "seeds must be a number of runs"),
    ("seeds", 0, "at least one seed is required"),
    ("seeds", [-1], "a seed must be between 0 and"),
    ("seeds", [2**32], "a seed must be between 0 and"),
    ("lr", "0.1", "lr must be a number, or one for each run, got '0.1'"),
    ("lr", NAN, "lr must be > 0 and finite, got nan"),
    ("server_lr", "1", "server_lr must be a number"),
    ("hyper", [("lr", 0.1)], "hyper must be a dictionary of values by name, got"),
    ("hyper", {"lr": [[0.1]] * 4}, r"adaped.lr must be a number, or one for each run, got \[\[0.1\]"),
    ("hyper", {"lr": "0.1"}, "adaped.lr must be a number, or one for each run, got '0.1'"),
    ("hyper", {"lr": [NAN]}, "adaped.lr must be > 0"),
    ("hyper", {"c": [1.0, 2.0]}, "c must be one value, or a value for each of 1 seeds, got 2"),
    ("hyper", {"psi": 1.0}, "unknown hyper-parameter of adaped 'psi'"),
    ("options", ["gate"], "options must be a dictionary of values by name"),
    ("options", {"idle_rounds": 1.5}, "adaped.idle_rounds must be a whole number, got 1.5"),
    ("options", {"steps": 3}, "unknown option of adaped 'steps'"),
    ("options", {"gate": 1}, "adaped.gate must be True or False, got 1"),
    ("options", {"architectures": 2}, "adaped.architectures must be a string, got 2"),
    ("client_optimizer", 3, "client_optimizer must be a name, or a function of the learning rate"),
    ("client_optimizer", optax.adam(0.1), r"client_optimizer must be .*optax.adam, not optax.adam\(0.1\)"),
    ("server_optimizer", None, "server_optimizer must be a name"),
    ("participation", 3, "participation must be a name, got 3"),
    ("weighting", True, "weighting must be a name, got True"),
    ("privacy", PrivacyConfig(), "privacy requires epsilon or noise_multiplier; use None for no privacy"),
    ("privacy", 8.0, "privacy must be a jaxpfl.privacy.Mechanism or PrivacyConfig, got 8.0"),
    ("compress", 4, "compress must be a name with arguments or a Compressor, got 4"),
    ("unseen", 3, "unseen must be a Federation"),
    ("unseen", other_shape(), r"unseen clients' inputs must have the federation's shape \(4,\), got \(9,\)"),
    ("adapt_rounds", -1, "adapt_rounds must be at least 0, got -1"),
    ("graph", 3, "graph must be a name or a Graph, got 3"),
    ("plan", "vmap", "plan must be an ExecutionPlan, got 'vmap'"),
    ("callbacks", [3], "callbacks must be a sequence of functions, got"),
    ("warm_start", "path", "the given parameters do not fit the model"),
]
OWN = jaxpfl.classification(Model(lambda key, x: {}, lambda params, x: x[:, :3]), (4,), 3)
WITHOUT_EFFECT = [
    ({"task": OWN, "model": nn.Dense(3)}, "model has no effect, because the given Task has its own model"),
    ({"task": OWN, "num_classes": 4}, "num_classes = 4 has no effect, because the given Task has its own"),
    ({"task": "regression", "num_classes": 4}, "num_classes = 4 has no effect, because task = regression has no"),
    ({"local_epochs": 1, "local_steps": 10}, "local_steps = 10 has no effect, because local_epochs = 1 takes its"),
    ({"task": OWN, "model": "mlp"}, "model = mlp has no effect, because the given Task has its own model"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG, ids=lambda value: None)
def test_wrong_arguments_are_one_line(federation, name, value, message):
    settings = {"method": "adaped", "federation": federation, "model": "linear", "rounds": 1, "local_steps": 1}
    if name == "adapt_rounds":
        settings["unseen"] = jaxpfl.stack_clients([(np.ones((3, 4)), np.arange(3))], client_ids=[77])
    with pytest.raises(JaxpflError, match=message) as error:
        jaxpfl.fit(**settings | {name: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("settings", "message"), WITHOUT_EFFECT, ids=lambda value: None)
def test_an_argument_without_effect_is_refused(federation, settings, message):
    with pytest.raises(JaxpflError, match=f"^{message}.*: leave it out$"):
        jaxpfl.fit("fedavg", federation, **settings)


def test_settings_of_a_run_are_checked_when_they_are_made():
    method = jaxpfl.METHODS["fedavg"]
    assert RunSpec(method=method).availability == Availability()
    assert list(RunSpec(method=method).seeds) == [0]
    assert {field.name: field.metadata["help"] for field in fields(RunSpec)}["weighting"].endswith(
        "(default: examples, or uniform with privacy)"
    )
    assert PrivacyConfig(noise_multiplier=1.0, delta=1e-3).clipping_norm == Mechanism(1.0).clipping_norm == 1.0
    with pytest.raises(JaxpflError, match="unknown lr_schedule 'x'"):
        RunSpec(method=method, lr_schedule="x")
    with pytest.raises(JaxpflError, match="linear must be auto, kernel or plain, got 'x'"):
        ExecutionPlan(linear="x")


def test_keywords_are_the_settings_of_a_run():
    own, settings = (dict(inspect.signature(one).parameters) for one in (jaxpfl.fit, RunSpec))
    del settings["method"]
    assert list(own)[5:] == list(settings)
    for name, setting in settings.items():
        assert own[name].default == setting.default
        assert setting.annotation.removesuffix(" | None") in own[name].annotation
        assert f"\n  {name}: " in str(jaxpfl.fit.__doc__)


def test_lr_moves_every_rate():
    hp = RunSpec(method=jaxpfl.METHODS["ditto"], lr=[0.1, 0.3], seeds=2).hp
    for name in ("lr", "lr_personal"):
        np.testing.assert_allclose(getattr(hp, name), [0.1, 0.3], rtol=1e-6)
    assert hp.lam == pytest.approx(0.1)


@pytest.mark.slow
def test_hyper_wins_over_lr_and_a_sweep_of_one_rate_of_several_warns(federation):
    given = {"model": "linear", "rounds": 1, "local_steps": 1}
    hp = jaxpfl.fit("ditto", federation, lr=0.2, hyper={"lr_personal": 0.5}, **given).simulation.hp
    assert (float(hp.lr), float(hp.lr_personal)) == pytest.approx((0.2, 0.5))
    with pytest.warns(JaxpflWarning, match=r"hyper sets lr, but other .* rates of ditto .*\(.*lr_personal = 0.1\)"):
        jaxpfl.fit("ditto", federation, hyper={"lr": [0.1, 0.3]}, seeds=2, **given)
    # Nothing to say where all are given, or there is one.
    jaxpfl.fit("ditto", federation, hyper={"lr": [0.1, 0.3], "lr_personal": 0.1}, seeds=2, **given)
    jaxpfl.fit("local", federation, hyper={"lr": [0.1, 0.3]}, seeds=2, **given)


def test_callbacks_see_every_evaluation_and_change_nothing(federation):
    seen, names = [], []
    given = {"model": "linear", "rounds": 3, "eval_every": 2, "local_steps": 1, "batch_size": 2, "seeds": 2}
    calls = [seen.append, lambda evaluated: names.append(sorted(evaluated.scores))]
    watched = jaxpfl.fit("local", federation, **given, callbacks=calls)
    plain = jaxpfl.fit("local", federation, **given)
    assert [one.round for one in seen] == [2, 3] == watched.rounds.tolist()
    assert names == [["after", "before"]] * 2
    for i, one in enumerate(seen):
        np.testing.assert_array_equal(one.scores["after"]["accuracy"], watched.scores["after"]["accuracy"][i])
        np.testing.assert_array_equal(one.validation["after"]["loss"], watched.validation["after"]["loss"][i])
    joined = np.concatenate([one.history["train_loss"] for one in seen], axis=1)
    np.testing.assert_array_equal(joined, watched.history["train_loss"])
    np.testing.assert_array_equal(plain.personalized_accuracy, watched.personalized_accuracy)
    assert plain.validation["after"]["accuracy"].shape == (2, 2, 3)
    again = plain.simulation.evaluate(plain.state, "validation")["after"]["accuracy"]
    with pytest.raises(JaxpflError, match="split must be one of test, validation, got 'attackers'"):
        plain.simulation.evaluate(plain.state, "attackers")
    np.testing.assert_array_equal(plain.validation_accuracy, again)
    assert np.isnan(again[:, 2]).all()
    assert np.isfinite(again[:, :2]).all()
    assert (plain.gradients.training == 3).all()
