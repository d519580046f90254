"""Help, version, and the data commands."""

import dataclasses
import json

import pytest
from command import jaxpfl

import jaxpfl as package
from jaxpfl import METHODS
from jaxpfl.cli.method_help import describe


@pytest.mark.parametrize("command", [[], ["run"], ["compare"], ["data"]])
def test_help(capsys, command):
    result = jaxpfl(capsys, *command, "--help")
    assert result.status == 0
    assert "usage: jaxpfl" in result.out


def said(capsys, *args) -> str:
    """The help on one line, without its frames."""
    return " ".join(jaxpfl(capsys, *args, "--help").out.replace("│", " ").split())


def test_help_names_every_method_and_what_can_be_set(capsys):
    text = said(capsys, "run")
    assert "Each has lr=0.1, lr_decay=0.99, decay_every=60, weight_decay=0.0001" in text
    for name, method in METHODS.items():
        assert f"- {name}" in text
        for option, default in method.options.items():
            assert f"{option}={default}" in text
    assert "psi_floor=0.5" in text
    assert "- scaffold: lr=0.01 -" in text


@pytest.mark.parametrize("name", METHODS)
def test_help_explains_every_setting_of_a_method_that_is_named(name):
    text = describe(["--rounds", name])
    for setting in [field.name for field in dataclasses.fields(METHODS[name].hyper)] + list(METHODS[name].options):
        (line,) = [line for line in text.splitlines() if line.startswith(f"- {setting}=")]
        assert line.split(": ", 1)[1].strip()


def test_flags_are_explained_in_paragraphs_that_say_what_happens_without_them(capsys, monkeypatch):
    text = said(capsys, "compare", "adaped")
    assert "adaped: AdaPeD (Algorithm 2)" in text
    assert "- psi_floor=0.5: least psi -" in text
    assert "default: None" not in text
    assert "default: False" not in text
    assert "(default: True)" not in text  # --plan.no-donate
    assert "(default: local fedavg fedavg-ft adaped)" in said(capsys, "compare")
    monkeypatch.setenv("COLUMNS", "220")
    lines = jaxpfl(capsys, "compare", "--help").out.splitlines()
    assert any("shards, dirichlet, dirichlet-class" in line for line in lines)  # as wide as the frame, not its source


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["comparre"], "unknown command of jaxpfl 'comparre': did you mean 'compare'?"),
        (["sweep", "--help"], "unknown command of jaxpfl 'sweep' (known: bench, compare, data"),
        (["privacy", "audits"], "unknown command of jaxpfl privacy 'audits': did you mean 'audit'?"),
        (["estimate", "regression_mixtures"], "did you mean 'regression-mixture'?"),
    ],
)
def test_an_unknown_command_is_one_line(capsys, args, message):
    result = jaxpfl(capsys, *args)
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert message in result.err


@pytest.mark.parametrize("args", [[], ["privacy"]])
def test_help_names_every_privacy_command(capsys, args):
    assert "epsilon, noise, paper, curve; audit tries to refute a claim." in said(capsys, *args)


def test_version(capsys):
    assert jaxpfl(capsys, "--version").out.strip() == package.__version__


def test_data_list(capsys, tmp_path):
    result = jaxpfl(capsys, "data", "list", "--data-dir", tmp_path, "--json")
    entries = {entry["name"]: entry for entry in json.loads(result.out)}
    assert entries["digits"]["present"]
    assert not entries["mnist"]["present"]
    assert "digits" in jaxpfl(capsys, "data", "list", "--data-dir", tmp_path).out


@pytest.mark.parametrize(
    "split",
    [
        ["--data", "planted:clients=8,clusters=3,examples=20,dim=2"],
        ["--partition", "clusters", "--clients", "6", "--unseen-clients", "2", "--clusters", "3"],
    ],
)
def test_data_describe_shows_the_true_clusters(capsys, split):
    result = jaxpfl(capsys, "data", "describe", *split, "--json")
    assert result.status == 0, result.err
    clusters = result.json["clusters"]
    assert sorted(map(len, clusters)) == [2, 3, 3]
    assert sorted(client for own in clusters for client in own) == list(range(8))
    shown = jaxpfl(capsys, "data", "describe", *split).out
    assert f"0       {' '.join(map(str, clusters[0]))}\n" in shown


def test_data_describe(capsys):
    args = ("data", "describe", "--clients", "8", "--classes-per-client", "2")
    description = jaxpfl(capsys, *args, "--json").json
    assert description["clients"] == 8
    assert description["classes_per_client"] == {"min": 2, "median": 2, "max": 2}
    assert sum(description["examples"].values()) == 1797
    assert "8" in jaxpfl(capsys, *args).out
