"""``jaxpfl recommend`` and ``jaxpfl winners``: their contract on standard output, and errors in one line."""

import json
import shlex

import pytest
from command import jaxpfl

from jaxpfl.cli import training
from jaxpfl.cli.parsing import bound, checked, flags_of

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
    assert found["caveats"][0].startswith("evidence from ten classes of digits (linear)")
    assert all(set(lead) == {"over", "points", "half_width", "level"} for lead in first["leads"])
    told = jaxpfl(capsys, "recommend", *KNOWN).out
    assert found["command"] in told
    assert f"recommended: {found['recommended']}" in told
    assert "FAR" not in told


def test_the_commands_are_those_of_jaxpfl(capsys):
    given = ["--data", "digits", "--partition", "dirichlet", "--alpha", "0.3", "--clients", "12", "--cohort", "6"]
    found = jaxpfl(capsys, "recommend", *given, "--json").json
    words = shlex.split(found["command"])
    assert words[:2] == ["jaxpfl", "compare"]
    assert {"local", "fedavg-ft", found["recommended"]} <= set(words)
    assert words[words.index("--alpha") + 1] == "0.3"
    compare = next(one for one in training.commands([]) if one.__name__ == "compare")
    bound(compare, "jaxpfl compare", checked(flags_of(compare), words[2:], "jaxpfl compare"))
    assert shlex.split(found["search"])[:2] == ["jaxpfl", "sweep"]
    assert all(near["epsilon"] is None for near in found["nearest"])


def test_a_federation_far_from_the_map_is_called_so(capsys):
    args = (
        "recommend",
        "--data",
        "planted:examples=8",
        "--clients",
        "3000",
        "--cohort",
        "3",
        "--model",
        "linear",
    )
    found = jaxpfl(capsys, *args, "--json").json
    assert found["far"]
    assert any("clients 3000, " in one for one in found["beyond"])
    assert any("2 classes" in one for one in found["caveats"])
    assert "FAR: " in jaxpfl(capsys, *args).out


def test_known_clusters_find_clusters(capsys):
    """Planted clients label the same input differently, which no measure of their labels shows."""
    found = jaxpfl(capsys, "recommend", "--data", "planted:clients=12,clusters=4", "--json").json
    assert found["federation"]["partition"] == "clusters"
    assert found["nearest"][0]["partition"] == "clusters"
    assert found["recommended"] == "ifca"
    assert "ifca.clusters=4" in shlex.split(found["command"])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--data", "digist"], "did you mean 'digits'"),
        (["--model", "liner"], "did you mean 'linear'"),
        (["--model", "cnn"], "CNN needs images"),
        (["--clients", "0"], "clients"),
        (["--clients", "10", "--cohort", "11"], "number of clients (10), got 11"),
        (["--steps", "0"], "steps"),
        (["--epsilon", "-1"], "epsilon"),
        (["--epsilon", "201"], "epsilon must be > 0 and <= 200, got 201.0"),
        (["--delta", "1e-4"], "--delta is of a privacy claim: give --epsilon"),
        (["--epsilno", "3"], "did you mean --epsilon"),
        (["digits"], "flags alone"),
    ],
)
def test_errors_are_one_line(capsys, args, said):
    found = jaxpfl(capsys, "recommend", *args)
    assert found.status == 2
    assert said in found.err
    assert found.err.count("\n") == 1
    assert not found.out


def test_a_field_of_a_config_file_is_named_as_such(capsys, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[privacy]\ndelta = 1e-4\n")
    found = jaxpfl(capsys, "recommend", "--config", path)
    assert found.status == 2
    assert f"privacy.delta = 0.0001 in {path} is of a privacy claim: give privacy.epsilon there" in found.err


def test_another_task_is_refused(capsys, tmp_path):
    path = tmp_path / "heights.libsvm"
    path.write_text("".join(f"{1.5 + i / 7} 1:{i} 2:{i % 3}\n" for i in range(60)))
    found = jaxpfl(capsys, "recommend", "--data", f"libsvm:{path}", "--partition", "iid", "--clients", "3")
    assert found.status == 2
    assert "the map of winners is of classifications" in found.err
    assert "regression" in found.err


def test_the_map_is_shown(capsys, tmp_path):
    shown = jaxpfl(capsys, "winners", "show", "--json").json
    assert {"quick", "command", "minutes", "versions", "splits", "places"} == set(shown)
    assert "| method |" in jaxpfl(capsys, "winners", "show", "--markdown").out
    assert "which method wins where" in jaxpfl(capsys, "winners", "show").out
    missing = jaxpfl(capsys, "winners", "show", "--output", tmp_path)
    assert missing.status == 2
    assert "jaxpfl winners run" in missing.err
    assert jaxpfl(capsys, "winners", "show", "--json", "--markdown").status == 2


def test_a_folder_of_something_else_is_refused(capsys, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    found = jaxpfl(capsys, "winners", "run", "--quick", "--output", tmp_path)
    assert found.status == 2
    assert "is not empty" in found.err
    assert [one.name for one in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "notes.txt").unlink()
    (tmp_path / "winners.json").write_text(json.dumps({"quick": True}))
    assert "holds the quick map" in jaxpfl(capsys, "winners", "run", "--output", tmp_path).err


def test_missing_data_are_named_before_anything_runs(capsys, tmp_path):
    found = jaxpfl(capsys, "winners", "run", "--output", tmp_path / "new", "--data-dir", tmp_path)
    assert found.status == 2
    assert "data set 'mnist'" in found.err
    assert str(tmp_path) in found.err
    assert not (tmp_path / "new").exists()


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
