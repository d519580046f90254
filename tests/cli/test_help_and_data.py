"""Help, version, and the data commands."""

import json

import pytest
from command import jaxpfl

import jaxpfl as package
from jaxpfl import METHODS


@pytest.mark.parametrize("command", [[], ["run"], ["compare"], ["data"]])
def test_help(capsys, command):
    result = jaxpfl(capsys, *command, "--help")
    assert result.status == 0
    assert "usage: jaxpfl" in result.out


def test_help_names_every_method_and_what_can_be_set(capsys):
    text = " ".join(jaxpfl(capsys, "run", "--help").out.replace("│", " ").split())
    for name, method in METHODS.items():
        assert f"- {name}: lr={method.hyper.lr:g}" in text
        for option in method.options:
            assert option in text
    assert "psi_floor=0.5" in text


def test_version(capsys):
    assert jaxpfl(capsys, "--version").out.strip() == package.__version__


def test_data_list(capsys, tmp_path):
    result = jaxpfl(capsys, "data", "list", "--data-dir", tmp_path, "--json")
    entries = {entry["name"]: entry for entry in json.loads(result.out)}
    assert entries["digits"]["present"]
    assert not entries["mnist"]["present"]
    assert "digits" in jaxpfl(capsys, "data", "list", "--data-dir", tmp_path).out


def test_data_describe(capsys):
    args = ("data", "describe", "--clients", "8", "--classes-per-client", "2")
    description = jaxpfl(capsys, *args, "--json").json
    assert description["clients"] == 8
    assert description["classes_per_client"] == {"min": 2, "median": 2, "max": 2}
    assert sum(description["examples"].values()) == 1797
    assert "8" in jaxpfl(capsys, *args).out
