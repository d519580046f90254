"""A chosen setting as a config file that gives the same run."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from jaxpfl.engine.execution_plan import ExecutionPlan
from jaxpfl.privacy import PrivacyConfig
from jaxpfl.runs.config import RunConfig, method_settings, read
from jaxpfl.runs.sweep.sweep import best_config, write_best


def back(tmp_path: Path, *args: Any, **more: Any) -> tuple[RunConfig, dict[str, str]]:
    """The config and the method's own settings, as ``jaxpfl run`` reads them."""
    found = read(write_best(tmp_path / "best", args[1], best_config(*args, **more)))
    assert found.methods == (args[1],)
    return found.config, method_settings(found.config, args[1], (args[1],))


def test_fields_and_hyper_parameters_of_a_setting_are_those_of_the_run(tmp_path: Path):
    base = RunConfig(rounds=20, lr=0.5, set=("adaped.psi_init=1", "adaped.lam=2", "fedprox.mu=3"), validation_share=0.2)
    settings = {"lr": 1e-05, "clients": 100, "cohort": 10, "adaped.psi_init": 3.5}
    config, own = back(tmp_path, base, "adaped", settings)
    assert config == dataclasses.replace(base, lr=1e-05, clients=100, cohort=10, set=config.set)
    assert own == {"psi_init": "3.5", "lam": "2"}


def test_what_is_at_its_default_is_left_out():
    values = best_config(RunConfig(), "local", {"lr": 0.1, "draw": "epoch"})
    assert values == {"methods": ["local"], "lr": 0.1}
    private = best_config(RunConfig(privacy=PrivacyConfig(epsilon=1.0)), "local", {"local.lr": 1})
    assert private == {"methods": ["local"], "set": ["local.lr=1"], "privacy": {"epsilon": 1.0}}


def test_tables_are_kept(tmp_path: Path):
    base = RunConfig(privacy=PrivacyConfig(epsilon=1.0, delta=1e-5), plan=ExecutionPlan(clients="map", donate=False))
    config, own = back(tmp_path, base, "fedavg", {"privacy.epsilon": 8, "plan.rounds_per_call": 10})
    assert config.privacy == PrivacyConfig(epsilon=8.0, delta=1e-5)
    assert config.plan == ExecutionPlan(clients="map", donate=False, rounds_per_call=10)
    assert own == {}


def test_rounds_of_the_sweep_win(tmp_path: Path):
    assert back(tmp_path, RunConfig(rounds=20), "local", {}, 7)[0].rounds == 7


def test_switches_and_names_are_as_set_takes_them(tmp_path: Path):
    config, own = back(tmp_path, RunConfig(set=("em_steps=2",)), "adamix", {"adamix.a": True, "standardize": True})
    assert own == {"em_steps": "2", "a": "true"}
    assert config.standardize is True


@pytest.mark.parametrize("text", ['a "quoted"\\path', "tab\tand\nline", "é 😀 \x7f\x01", "C:\\new"])
def test_any_text_is_read_back(tmp_path: Path, text: str):
    assert back(tmp_path, RunConfig(data_dir=text), "local", {"data": f"npz:{text}"})[0] == RunConfig(
        f"npz:{text}", text
    )


def test_every_field_that_may_differ_from_its_default_comes_back(tmp_path: Path):
    values = {"int": 3, "int | None": 3, "float": 0.25, "float | None": 0.25, "bool": True, "str": "x"}
    fields = [field for field in dataclasses.fields(RunConfig) if field.name not in ("set", "privacy", "plan")]
    changes = {}
    for field in fields:
        text = str(field.metadata["text"] or field.type)
        changes[field.name] = True if field.default is False else values.get(text.replace("typing.", ""), "text")
        if isinstance(field.default, int | float):
            changes[field.name] = type(field.default)(not field.default)
    numbers = {"clients": 3, "cohort": 2, "rounds": 4, "local_steps": 5, "batch_size": 6, "lr": 0.5, "test_share": 0.25}
    counts = {name for name in changes if name.endswith(("_per_client", "examples", "clusters", "neighbours", "_cap"))}
    changes |= numbers | dict.fromkeys(counts, 2) | {"alpha": 0.5, "sigma": 0.5, "seeds": 2, "server_lr": 0.5}
    base = RunConfig(**changes)
    assert all(getattr(base, field.name) != field.default for field in fields)
    assert back(tmp_path, base, "local", {})[0] == base
