"""``jaxpfl report``, ``runs``, ``compare-runs`` and ``check``, of whole, unfinished and damaged folders."""

import html
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from command import SMALL, jaxpfl
from scipy import stats

from jaxpfl.cli import main
from jaxpfl.runs import run_folder

pytestmark = pytest.mark.slow  # a dozen seconds of training for all


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison, the same with another rate, a run on another split, a sweep and a study."""
    folder = tmp_path_factory.mktemp("runs")
    both = ["compare", "local", "fedavg", *SMALL]
    main([*both, "--output", str(folder / "a")])
    main([*both, "--lr", "0.3", "--output", str(folder / "b")])
    main(["run", "fedavg", *SMALL, "--split-seed", "1", "--output", str(folder / "inner" / "c")])
    main(["sweep", "fedavg", *SMALL[:12], "--grid", "lr=.1,.2", "--output", str(folder / "s")])
    main(["estimate", "bernoulli", "--clients", "50", "--repetitions", "2", "--output", str(folder / "e")])
    return folder


@pytest.fixture
def copied(runs: Path, tmp_path: Path):
    """A copy of one of the folders, to be damaged."""

    def copy(name: str) -> Path:
        return shutil.copytree(runs / name, tmp_path / name)

    return copy


def unfinished(folder: Path) -> Path:
    """The folder as a kill after round 3 of its second method leaves it."""
    (folder / "summary.json").unlink()
    for path in (folder / "methods").glob("fedavg.*"):
        path.unlink()
    kept = [
        line
        for line in (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        if json.loads(line)["method"] == "local" or json.loads(line)["round"] <= 3
    ]
    (folder / "metrics.jsonl").write_text("".join(kept))
    return folder


def test_a_report_stands_alone_and_has_the_numbers(runs: Path, capsys, tmp_path: Path):
    page = tmp_path / "page.html"
    result = jaxpfl(capsys, "report", runs / "a", runs / "s", runs / "e", "--output", page)
    assert (result.status, result.out) == (0, f"report: {page}\n")
    text = page.read_text()
    assert not re.search(r'(src|href)="(?!#|data:)', text.replace("xlink:", ""))
    assert "@import" not in text
    assert "url(http" not in text
    told = json.loads((runs / "a" / "summary.json").read_text())["methods"]
    for row in told.values():
        assert f"{100 * row['personalized_accuracy']['mean']:.2f} ±" in text
    assert "jaxpfl compare --config" in text
    assert "jaxpfl estimate bernoulli --clients 50" in text
    assert "nothing is guaranteed about what the server learns" in text
    assert text.count("<svg role=") == 5  # scores, clients, gains, split; the sweep's one
    names = re.findall(r'\bid="([^"]+)"', text)
    assert len(names) == len(set(names))
    assert set(re.findall(r'(?:url\(#|href="#)([^")]+)', text)) <= set(names)


def test_a_report_of_an_unfinished_run_has_what_there_is(runs: Path, copied, capsys):
    folder = unfinished(copied("a"))
    result = jaxpfl(capsys, "report", folder)
    assert result.status == 0, result.err
    text = (folder / "report.html").read_text()
    assert "of 4 rounds: local 4, fedavg 3" in text
    assert "unfinished" in text
    assert jaxpfl(capsys, "report", folder).status == 0  # its own page is replaced


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["{a}/methods"], "a/methods contains no run, sweep or study: no config.json, sweep.json or summary.json"),
        (["{a}/nothing"], "contains no run, sweep or study: it does not exist"),
        (["{a}", "--output", "{a}/config.json"], "was not written by jaxpfl report"),
    ],
)
def test_reports_that_cannot_be(runs: Path, capsys, args: list[str], message: str):
    result = jaxpfl(capsys, "report", *(one.format(a=runs / "a") for one in args))
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert message in result.err


def test_a_name_is_no_markup(copied, capsys):
    folder = copied("e")
    told = json.loads((folder / "summary.json").read_text())
    evil = "<script>alert(1)</script>"
    (folder / "summary.json").write_text(json.dumps(told | {"settings": {"prior": evil}, evil: {evil: 1.0}}))
    assert jaxpfl(capsys, "report", folder).status == 0
    text = (folder / "report.html").read_text()
    assert evil not in text
    assert html.escape(evil) in text
    (folder / "summary.json").write_text(json.dumps(told | {"plots": ["../../secret.png"]}))
    refused = jaxpfl(capsys, "report", folder)
    assert refused.status == 2
    assert "refers to a file outside the folder" in refused.err


def test_runs_lists_every_folder_with_its_status(runs: Path, copied, capsys):
    result = jaxpfl(capsys, "runs", runs, "--json")
    found = {Path(one["path"]).name: one for one in result.json["folders"]}
    assert {name: (one["kind"], one["status"]) for name, one in found.items()} == {
        "a": ("run", "complete"),
        "b": ("run", "complete"),
        "c": ("run", "complete"),
        "s": ("sweep", "complete"),
        "e": ("study", "complete"),
    }
    assert found["a"]["what"] == ["local", "fedavg"]
    folder = unfinished(copied("a"))
    (one,) = jaxpfl(capsys, "runs", folder, "--json").json["folders"]
    assert (one["status"], one["done"]) == ("unfinished", "of 4 rounds: local 4, fedavg 3")
    with run_folder.lock(folder):
        assert jaxpfl(capsys, "runs", folder, "--json").json["folders"][0]["status"] == "running"
    (folder / "config.json").write_text("{")
    shown = jaxpfl(capsys, "runs", folder.parent)
    assert shown.status == 0
    assert "damaged" in shown.out
    assert (
        jaxpfl(capsys, "runs", folder.parent / "nowhere").err == f"error: {folder.parent / 'nowhere'} is not a folder\n"
    )


def test_paired_runs_have_intervals(runs: Path, capsys):
    found = jaxpfl(capsys, "compare-runs", runs / "a", runs / "b", "--json").json
    assert found["unpaired"] == []
    assert {"name": "lr", "first": None, "second": 0.3} in found["settings"]
    assert "fedavg.lr" in {one["name"] for one in found["settings"]}
    for row in found["methods"]:
        scores = []
        for name in ("a", "b"):
            with np.load(runs / name / "clients.npz") as arrays:
                scores.append(arrays[f"{row['first_method']}/after_accuracy"].astype(float).mean(axis=0))
        gaps = scores[1] - scores[0]
        interval = stats.ttest_1samp(gaps, 0).confidence_interval(0.95)
        np.testing.assert_allclose([row["low"], row["high"]], interval, rtol=1e-5)
        np.testing.assert_allclose(row["difference"], gaps.mean(), atol=1e-6)
        assert row["better"] == (gaps > 0).mean()
    shown = jaxpfl(capsys, "compare-runs", runs / "a", runs / "b").out
    assert "better off in the second" in " ".join(shown.split())


def test_other_splits_are_not_paired(runs: Path, capsys):
    found = jaxpfl(capsys, "compare-runs", runs / "a", runs / "inner" / "c", "--json").json
    assert found["unpaired"] == ["the examples of the clients differ"]
    (row,) = found["methods"]
    assert (row["low"], row["better"]) == (None, None)
    assert found["only"] == [["local"], []]
    assert "not paired" in jaxpfl(capsys, "compare-runs", runs / "a", runs / "inner" / "c").out


def test_runs_that_cannot_be_compared(runs: Path, copied, capsys):
    folder = unfinished(copied("a"))
    for second, message in ((folder, "is not finished: --resume it first"), (runs / "s", "is not a run folder")):
        result = jaxpfl(capsys, "compare-runs", runs / "a", second)
        assert (result.status, result.err.count("\n")) == (2, 1)
        assert message in result.err


def test_whole_folders_pass_the_check(runs: Path, capsys):
    result = jaxpfl(capsys, "check", *(runs / name for name in ("a", "inner/c", "s", "e")), "--json")
    assert result.status == 0, result.err
    assert [one["troubles"] for one in result.json["folders"]] == [[], [], [], []]
    assert result.json["folders"][0]["looked_at"] == {"methods": 2, "records": 12, "checkpoints": 4}


def cut(path: Path) -> None:
    """Halve a file, or the largest one of a folder."""
    if path.is_dir():
        path = max((one for one in path.rglob("*") if one.is_file()), key=lambda one: one.stat().st_size)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def drop_round(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"round": 2' not in line or "evaluation" in line))


def cut_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def change_number(path: Path) -> None:
    path.write_text(re.sub(r'("mean": 0\.)\d', r"\g<1>1", path.read_text(), count=1))


def change_seed(path: Path) -> None:
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 5', 1))


@pytest.mark.parametrize(
    ("name", "file", "damage", "message"),
    [
        ("a", "methods/local.npz", cut, "is damaged or missing"),
        ("a", "methods/local.json", change_number, "was changed"),
        ("a", "metrics.jsonl", drop_round, "has lost 1 rounds of local"),
        ("a", "metrics.jsonl", cut_end, "has lost 1 evaluations of fedavg"),
        ("a", "clients.npz", cut, "clients.npz is damaged"),
        ("a", "summary.json", change_number, "but its clients give"),
        ("a", "summary.json", cut, "not JSON"),
        ("a", "config.json", cut, "not JSON"),
        ("a", "checkpoints", cut, "does not match SHA256SUMS"),
        ("s", "journal/main.jsonl", change_seed, "is damaged"),
        ("e", "plots/gain-epsilon.png", Path.unlink, "is missing"),
    ],
)
def test_damage_is_found(copied, capsys, name: str, file: str, damage, message: str):
    folder = copied(name)
    damage(folder / file)
    result = jaxpfl(capsys, "check", folder)
    assert (result.status, result.err) == (2, f"error: damaged: {folder}\n")
    assert message in result.out


def test_exported_models_are_checked_by_their_checksums(runs: Path, copied, capsys):
    folder = copied("inner/c")
    assert jaxpfl(capsys, "export", folder, "--output", folder / "models").status == 0
    assert jaxpfl(capsys, "check", folder / "models").status == 0
    cut(next((folder / "models").rglob("*.npz")))
    assert jaxpfl(capsys, "check", folder / "models").status == 2


def test_runs_whose_attackers_differ_are_not_paired(runs: Path, copied, capsys):
    path = copied("b") / "config.json"
    record = json.loads(path.read_text())
    record["config"] |= {"attack": "sign-flip", "attackers": 0.34}
    path.write_text(json.dumps(record))
    found = jaxpfl(capsys, "compare-runs", runs / "a", path.parent, "--json").json
    assert found["unpaired"] == ["the attackers, which have no scores, differ"]
    assert found["methods"][0]["low"] is None


def test_other_data_in_the_place_of_a_runs_are_said(capsys, tmp_path: Path):
    rows = [f"{'abcd'[i % 4]},{i % 7},{i % 5},{i % 2}" for i in range(80)]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["city,x,z,y", *rows]) + "\n")
    given = ["--data", f"csv:{table}", "--target", "y", "--client", "city", "--model", "linear", "--rounds", "2"]
    run = tmp_path / "run"
    assert jaxpfl(capsys, "run", "local", *given, "--cohort", "2", "--output", run).status == 0
    assert jaxpfl(capsys, "report", run).status == 0
    assert "Not drawn" not in (run / "report.html").read_text()
    table.write_text("\n".join(["city,x,z,y", *rows[:60]]) + "\n")
    again = jaxpfl(capsys, "run", "local", "--config", run / "config.json", "--output", tmp_path / "strict", "--strict")
    assert again.status == 2
    assert f"the data differ from those of the run in {run / 'config.json'}" in again.err
    assert jaxpfl(capsys, "report", run).status == 0
    assert "Not drawn: the data have changed" in (run / "report.html").read_text()
