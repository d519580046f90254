"""Help, version, and the data commands."""

import dataclasses
import json

import pytest
from command import jaxpfl

import jaxpfl as package
from jaxpfl import METHODS
from jaxpfl.cli.help import describe


def said(capsys, *args) -> str:
    """The help on one line."""
    return " ".join(jaxpfl(capsys, *args, "--help-all").out.split())


def test_help_has_a_line_for_every_method(capsys):
    lines = jaxpfl(capsys, "run", "--help").out.splitlines()
    assert sum(line.startswith("  --") for line in lines) < 20
    assert "--help-all explains all" in lines[-1]
    for name in METHODS:
        (line,) = [line for line in lines if line.startswith(f"  {name} ")]
        assert len(line) > 40
    assert "METHOD --help explains one, and its settings: --set METHOD.name=value" in "\n".join(lines)


@pytest.mark.parametrize("name", METHODS)
def test_help_explains_every_setting_of_a_method_that_is_named(name):
    text = describe(["--rounds", name])
    for setting in [field.name for field in dataclasses.fields(METHODS[name].hyper)] + list(METHODS[name].options):
        words = text.split(f"\n  {setting}=")
        assert len(words) == 2
        assert len(words[1].split()) > 1


def test_flags_are_explained_in_paragraphs_that_say_what_happens_without_them(capsys, monkeypatch):
    text = said(capsys, "compare", "adaped")
    assert "adaped: AdaPeD: adaptive personalization by distillation" in text
    assert " psi_floor=0.5 smallest psi " in text
    assert "default: None" not in text
    assert "default: False" not in text
    assert "(default: True)" not in text  # --plan.no-donate
    assert "(default: local fedavg fedavg-ft adaped)" in said(capsys, "compare")
    monkeypatch.setenv("COLUMNS", "220")
    lines = jaxpfl(capsys, "compare", "--help-all").out.splitlines()
    assert any(
        "client sizes are log-normal" in line and len(line) > 90 for line in lines
    )  # as wide as the text, not its source


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
