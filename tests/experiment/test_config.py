"""Configs: presets, files, and what a resumed run may change."""

import dataclasses
from pathlib import Path

import pytest

from jaxpfl import JaxpflError
from jaxpfl.runs.config import (
    RunConfig,
    differences,
    from_mapping,
    method_settings,
    preset_words,
    read,
    read_file,
    resolve,
    to_json,
)


def test_presets_fill_what_is_not_given():
    config = resolve(RunConfig(data="mnist", rounds=7))
    assert (config.rounds, config.model, config.cohort) == (7, "cnn", 5)
    filled = ("model", "partition", "clients", "cohort", "local_steps", "batch_size", "rounds", "seeds", "test_share")
    assert None not in {getattr(config, name) for name in filled}


@pytest.mark.parametrize(
    ("given", "swept", "words"),
    [
        ({"model": "mlp", "cohort": 3}, ["batch_size"], ""),
        (
            {"data": "cifar100", "model": "mlp", "cohort": 5},
            (),
            "preset of cifar100: local_steps=80, batch_size=25 "
            "(defaults of fit in Python: local_steps=10, batch_size=20)",
        ),
    ],
)
def test_what_a_preset_changes_from_the_defaults_of_fit_is_said(given, swept, words):
    config = RunConfig(**given)
    assert preset_words(config, resolve(config), swept) == words


def test_fewer_clients_than_the_preset_cohort_all_take_part():
    assert resolve(RunConfig(clients=4)).cohort == 4
    assert resolve(RunConfig(clients=4, cohort=2)).cohort == 2


def test_json_round_trip_is_complete():
    config = resolve(RunConfig(set=("adaped.c=1",), lr=0.05))
    assert from_mapping(to_json(config), "config.json") == config


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", 'data = "mnist"\nlocal-steps = 3\n[plan]\nclients = 4\n[set.adaped]\nc = 1.0\n'),
        ("a.yaml", "data: mnist\nlocal_steps: 3\nplan: {clients: 4}\nset: [adaped.c=1.0]\n"),
    ],
)
def test_files(tmp_path: Path, name: str, text: str):
    (tmp_path / name).write_text(text)
    config = from_mapping(read_file(tmp_path / name), name)
    assert (config.data, config.local_steps, config.plan.clients) == ("mnist", 3, 4)
    assert config.set == ("adaped.c=1.0",)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rate": 0.1}, r"unknown field in here 'learning_rate': did you mean 'lr'\?$"),
        ({"roundz": 3}, r"did you mean 'rounds'\? \(known: rounds, .* of \d+\)$"),
        ({"zzz": 3}, r"unknown field in here 'zzz' \(known: adapt_rounds, .* of \d+\)$"),
        ({"rounds": "many"}, "rounds in here must be int"),
        ({"plan": {"clientz": 1}}, "did you mean 'clients'"),
        ({"plan": {"clients": "seven"}}, "plan.clients must be"),
        ({"set": 3}, "set in here must be"),
    ],
)
def test_bad_values(values: dict, message: str):
    with pytest.raises(JaxpflError, match=message) as error:
        from_mapping(values, "here")
    assert len(str(error.value)) < 200


def test_what_a_resumed_run_may_change():
    old = to_json(resolve(RunConfig()))
    more = to_json(resolve(dataclasses.replace(RunConfig(rounds=200), checkpoint_every=7)))
    assert differences(old, more)[0] == []
    assert "rounds: 100 -> 200" in differences(old, more)[1]
    for change in ({"rounds": 50}, {"seed": 1}, {"batch_size": 5}, {"set": ("adaped.c=1",)}):
        assert len(differences(old, to_json(resolve(RunConfig(**change))))[0]) == 1


def test_settings_of_one_method():
    config = RunConfig(set=("adaped.c=1", "fedavg.lr=0.2"))
    assert method_settings(config, "adaped", ("adaped", "fedavg")) == {"c": "1"}
    assert method_settings(RunConfig(set=("c=1",)), "adaped", ("adaped",)) == {"c": "1"}
    with pytest.raises(JaxpflError, match=r"METHOD\.name=value"):
        method_settings(RunConfig(set=("adaped.c",)), "adaped", ("adaped",))
    with pytest.raises(JaxpflError, match="did you mean 'adaped'"):
        method_settings(RunConfig(set=("adapd.c=1",)), "adaped", ("adaped",))


@pytest.mark.parametrize("given", [{"adaped.c": 1}, {"adaped": {"c": 1}}, ["adaped.c=1"]])
def test_settings_in_a_file(given):
    assert from_mapping({"set": given}, "here").set == ("adaped.c=1",)


@pytest.mark.parametrize(
    ("name", "text", "methods"),
    [
        ("a.toml", 'methods = ["local", "adaped"]\nrounds = 3\n', ("local", "adaped")),
        ("config.json", '{"methods": ["adaped"], "config": {"rounds": 3}, "hyper": {}, "orders": 2}', ("adaped",)),
        ("a.yaml", "rounds: 3\n", ()),
    ],
)
def test_methods_of_a_file(tmp_path: Path, name: str, text: str, methods: tuple[str, ...]):
    (tmp_path / name).write_text(text)
    assert read(tmp_path / name)[:2] == (RunConfig(rounds=3), methods)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "rounds = [", "cannot parse config"),
        ("a.yaml", "- 1", "must be a table"),
        ("a.ini", "", "must end in"),
        ("a.json", '{"rounds": 3, "lr": 0.1, "rounds": 4}', "'rounds' occurs twice in one object"),
        ("a.yaml", "set: {adaped: {lam: 1, lam: 2}}\n", "'lam' appears twice in one mapping"),
        ("a.toml", "local-steps = 3\nlocal_steps = 4\n", "local_steps in .* appears twice, with a dash"),
        (
            "a.json",
            '{"plan": {"rounds_per_call": 3, "rounds-per-call": 4}}',
            "plan.rounds-per-call in .* appears twice",
        ),
        ("config.json", '{"methods": [], "config": {}, "rounds": 3}', "unknown entry of .*config.json 'rounds'"),
        ("config.json", '{"methods": [], "config": {}, "hyper": {"local": 3}}', "hyper in .* must be a table"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, name: str, text: str, message: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(JaxpflError, match=message) as error:
        read(tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_yaml_merge_may_be_overridden(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("set:\n  adaped: &a {lr: 0.1, lam: 2}\n  ditto: {<<: *a, lr: 0.2}\n")
    assert read(tmp_path / "a.yaml").config.set == ("adaped.lr=0.1", "adaped.lam=2", "ditto.lr=0.2", "ditto.lam=2")


def test_a_number_that_yaml_reads_as_text():
    assert from_mapping({"lr": "1e-3"}, "here").lr == 1e-3
