"""``jaxpfl recommend`` and ``jaxpfl winners``: their contract on standard output, and errors in one line."""

import shlex

import pytest
from command import jaxpfl

from jaxpfl.cli import training
from jaxpfl.cli.parsing import bind_arguments, check_arguments, flags_of

KNOWN = ["--clients", "20", "--classes-per-client", "3", "--cohort", "20", "--model", "linear", "--steps", "400"]
KEYS = ["federation", "recommended", "nearest", "far", "beyond", "caveats", "command", "search"]


def test_a_federation_of_the_map_finds_its_cell(capsys):
    found = jaxpfl(capsys, "recommend", *KNOWN, "--json").json
    assert list(found) == KEYS
    first = found["nearest"][0]
    assert first["name"] == "digits-linear-m20-n45-3classes-share1-steps400"
    assert first["distance"] < 0.1
    assert found["recommended"] == first["best"]
    assert not found["far"]
    assert not found["beyond"]
    assert found["caveats"][0].startswith("the evidence is from data with ten classes only: digits (linear)")
    assert all(set(lead) == {"over", "points", "half_width", "level"} for lead in first["leads"])
    told = jaxpfl(capsys, "recommend", *KNOWN).out
    assert found["command"] in told
    assert told.startswith(f"recommended: {found['recommended']}, the best method of the nearest cell")
    assert "FAR" not in told


def test_the_commands_are_those_of_jaxpfl(capsys):
    given = ["--data", "digits", "--partition", "dirichlet", "--alpha", "0.3", "--clients", "12", "--cohort", "6"]
    found = jaxpfl(capsys, "recommend", *given, "--json").json
    words = shlex.split(found["command"])
    assert words[:2] == ["jaxpfl", "compare"]
    assert {"local", "fedavg-ft", found["recommended"]} <= set(words)
    assert words[words.index("--alpha") + 1] == "0.3"
    compare = next(one for one in training.commands([]) if one.__name__ == "compare")
    bind_arguments(compare, "jaxpfl compare", check_arguments(flags_of(compare), words[2:], "jaxpfl compare"))
    assert shlex.split(found["search"])[:2] == ["jaxpfl", "sweep"]
    assert all(near["epsilon"] is None for near in found["nearest"])


def test_a_table_of_two_classes_has_a_cell_and_a_regression_an_alternative(capsys, tmp_path):
    rows = [f"{client},{row % 7},{row % 2},{row / 9}" for client in "abcd" for row in range(12)]
    (tmp_path / "own.csv").write_text("\n".join(["who,x,label,score", *rows]))
    flags = ["--data", "csv:own.csv", "--data-dir", tmp_path, "--client", "who"]
    binary = jaxpfl(capsys, "recommend", *flags, "--target", "label", "--ignore", "score", "--task", "binary", "--json")
    assert binary.json["federation"]["classes"] == 2
    assert "--task binary" in binary.json["command"]
    real = jaxpfl(capsys, "recommend", *flags, "--target", "score", "--ignore", "label", "--task", "regression")
    assert real.status == 2
    assert "has no cell for regression" in real.err
    assert "run jaxpfl compare local fedavg-ft ditto" in real.err
    assert real.err.count("\n") == 1


def test_the_map_is_shown(capsys, tmp_path):
    shown = jaxpfl(capsys, "winners", "show", "--json").json
    assert {"quick", "command", "minutes", "versions", "splits", "places"} == set(shown)
    assert "| method |" in jaxpfl(capsys, "winners", "show", "--markdown").out
    assert "which method wins where" in jaxpfl(capsys, "winners", "show").out
    missing = jaxpfl(capsys, "winners", "show", "--output", tmp_path)
    assert missing.status == 2
    assert "jaxpfl winners run" in missing.err
    assert jaxpfl(capsys, "winners", "show", "--json", "--markdown").status == 2


@pytest.mark.slow
def test_a_quick_run_makes_the_files_and_goes_on(capsys, tmp_path):
    folder = tmp_path / "w"
    found = jaxpfl(capsys, "winners", "run", "--quick", "--output", folder, "--json").json
    assert found["quick"]
    assert {"map.json", "tables.md", "who-wins.png", "who-wins-examples.png"} <= {one.name for one in folder.iterdir()}
    journal = folder / "journal" / "main.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) == 24  # two methods, six tries, two splits
    journal.write_bytes(b"".join(lines[:20]) + lines[20][:30])  # as a kill leaves it
    again = jaxpfl(capsys, "winners", "run", "--quick", "--output", folder, "--json").json
    assert again["places"] == found["places"]
    assert jaxpfl(capsys, "winners", "show", "--output", folder, "--json").json == again
