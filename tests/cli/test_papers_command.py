"""``jaxpfl papers``: its contract on standard output, and errors in one line."""

import pytest
from command import jaxpfl

from jaxpfl.benchmarks.papers import results

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
