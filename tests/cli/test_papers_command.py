"""``jaxpfl papers``: its contract on standard output, and errors in one line."""

import dataclasses

import pytest
from command import jaxpfl

from jaxpfl.benchmarks.papers import results
from jaxpfl.support import files

ROW = ["method", "setting", "ours", "std", "printed", "printed_std", "difference", "note"]


def test_list(capsys):
    found = jaxpfl(capsys, "papers", "list", "--json").json
    assert len(found) >= 20
    assert all(list(one) == ["name", "paper", "what", "minutes", "measured"] for one in found)
    minutes = {one["name"]: one["minutes"] for one in found if one["measured"]}
    assert minutes == {one.name: one.minutes for one in results.committed()}
    printed = jaxpfl(capsys, "papers", "list").out
    assert "adaped-table2" in printed
    assert printed.count("~") == len(found) - len(minutes) + 1  # and the caption's


@pytest.mark.slow
def test_run_prints_the_rows_and_leaves_one_tidy_table(capsys, tmp_path):
    args = ("papers", "run", "network-demo", "--quick", "--output", tmp_path)
    rows = jaxpfl(capsys, *args, "--json").json["rows"]
    assert all(list(row) == ROW for row in rows)
    assert (tmp_path / "rows.json").is_file()
    assert (tmp_path / "rows.csv").is_file()
    again = jaxpfl(capsys, *args)
    assert "x_1[0], constant" in again.out
    shown = jaxpfl(capsys, "papers", "show", "network-demo", "--output", tmp_path, "--json").json["rows"]
    assert [{name: row[name] for name in ROW} for row in shown if row["name"] == "network-demo"] == rows
    assert not shown[0]["quick"]  # it takes no longer in full


def test_unknown_names_suggest_the_nearest(capsys, tmp_path):
    found = jaxpfl(capsys, "papers", "run", "adaped-tabel2", "--output", tmp_path)
    assert found.status == 2
    assert "did you mean 'adaped-table2'" in found.err
    assert found.err.count("\n") == 1


def test_missing_data_are_named_with_their_place(capsys, tmp_path):
    for name, said in (("adaped-table4", "femnist"), ("histograms-table1", "reddit"), ("persfl-ds1-mnist", "mnist")):
        found = jaxpfl(capsys, "papers", "run", name, "--output", tmp_path / "new", "--data-dir", tmp_path)
        assert found.status == 2
        assert said in found.err
        assert str(tmp_path) in found.err
        assert found.err.count("\n") == 1  # the progress bar is gone
    assert not list(tmp_path.iterdir())


def test_show_goes_on_after_a_damaged_result(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (("adaped-table4", "{"), ("adaped-table2", '{"rows": 3}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / results.RESULT).write_text(text)
    found = jaxpfl(capsys, "papers", "show", "--output", tmp_path, "--json")
    assert found.status == 2
    assert {row["name"] for row in found.json["rows"]} == {one.name for one in results.committed()}
    assert found.err.count("\n") == 1
    assert all(str(tmp_path / name / results.RESULT) in found.err for name in ("adaped-table4", "adaped-table2"))
    found = jaxpfl(capsys, "papers", "show", "adaped-table4", "--output", tmp_path)
    assert found.status == 2
    assert "adaped-table4" in found.err
    assert "adaped-table2" not in found.err
    assert jaxpfl(capsys, "papers", "show", "adaped-bernoulli", "--output", tmp_path).status == 0


def test_show_prints_what_comes_with_the_package(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {one.name for one in results.committed()}
    rows = jaxpfl(capsys, "papers", "show", "--json").json["rows"]
    assert {row["name"] for row in rows} == names
    text = jaxpfl(capsys, "papers", "show", "--markdown").out
    assert all(f"### {name}\n" in text for name in names)
    one = sorted(names)[0]
    assert one in jaxpfl(capsys, "papers", "show", one).out
    (tmp_path / "empty").mkdir()
    found = jaxpfl(capsys, "papers", "show", one, "--output", "empty")
    assert one in found.out
    assert "empty has no results: these come with the package" in found.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["show", "adaped-tabel2"], "did you mean"),
        (["show", "adaped-table1-cifar100"], "no results of adaped-table1-cifar100"),
        (["show", "--json", "--markdown"], "give one"),
        (["show", "--output", "nowhere"], "no folder nowhere"),
        (["show", "--output", "a.txt"], "--output must be a folder of results, a.txt is a file"),
    ],
)
def test_bad_requests_are_one_line(capsys, tmp_path, monkeypatch, args, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    found = jaxpfl(capsys, "papers", *args)
    assert found.status == 2
    assert said in found.err


def test_names_in_a_result_are_no_markup(capsys, tmp_path):
    one = results.committed()[0]
    folder = tmp_path / one.name
    folder.mkdir()
    row = dataclasses.replace(one.rows[0], method="[/nope] [red]x")
    files.write_checksummed(folder / results.RESULT, dataclasses.replace(one, rows=(row,)).to_json())
    assert "[/nope] [red]x" in jaxpfl(capsys, "papers", "show", one.name, "--output", tmp_path).out
