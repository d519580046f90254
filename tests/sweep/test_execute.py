"""Runs of a sweep: rows of one program that are what separate runs are, settings that fail alone, and budgets.

Data sets that sweeps share are read once, and wrong test labels change nothing that a sweep chooses, stops or runs."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import CONFIG, Fails, sweep_of

import jaxpfl
from jaxpfl import algorithms
from jaxpfl.runs import data_sets
from jaxpfl.runs.config import RunConfig, resolve
from jaxpfl.runs.control import Reporter
from jaxpfl.runs.records import Journal, Record, load_sweep
from jaxpfl.runs.setup import load_federation, prepare
from jaxpfl.runs.sweep import definition, execute
from jaxpfl.runs.sweep.definition import rounds_of
from jaxpfl.runs.sweep.execute import Data, run_group
from jaxpfl.runs.sweep.plan import groups_of, runs_of
from jaxpfl.runs.sweep.results import Choice, select
from jaxpfl.runs.sweep.runner import run_missing
from jaxpfl.runs.sweep.sweep import Sweep, caveats
from jaxpfl.support.errors import JaxpflError, OutOfMemoryError


def records_of(definition: Any) -> list[Record]:
    found: list[Record] = []
    loaded = Data()
    for group in groups_of(definition, runs_of(definition)):
        run_group(group, loaded, found.extend, Reporter())
    return found


def rows_at_once(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """Let there be memory for so many rows; returns the numbers of rows that are tried."""
    real, sizes = execute._run, []

    def short_of_memory(ready: Any, chunk: slice, *more: Any) -> Any:
        rows = len(ready.group.runs[chunk])
        sizes.append(rows)
        if rows > most:
            raise OutOfMemoryError("the states need too much")
        return real(ready, chunk, *more)

    monkeypatch.setattr(execute, "_run", short_of_memory)
    return sizes


@pytest.mark.slow
def test_rows_are_what_separate_fits_are():
    found = records_of(sweep_of("lr=.05,.5", "adaped.psi_init=1,3", methods=("adaped",)))
    assert len(found) == 4 * 2
    _, federation = load_federation(resolve(RunConfig(**CONFIG, validation_share=0.2)))
    for record in found:
        given = {name: value for name, value in CONFIG.items() if name not in ("clients", "seeds")}
        hyper = {name.removeprefix("adaped."): v for name, v in record.settings.items() if name != "lr"}
        lr = float(record.settings["lr"])
        fit = jaxpfl.fit(record.method, federation, seeds=[record.seed], lr=lr, hyper=hyper, **given)
        expected = fit.personalized_accuracy.mean(), fit.validation_accuracy.mean(), fit.history["train_loss"][0, -1]
        names = ("personalized_accuracy", "validation_accuracy", "train_loss")
        np.testing.assert_allclose([record.metrics[name] for name in names], expected, rtol=1e-4)


@pytest.mark.slow
def test_shares_of_the_clients_and_their_sizes():
    found = records_of(sweep_of("clients=4,8", "cohort=.5m", seeds=1, unseen_clients=2))
    sizes = {(r.settings["clients"], r.settings["cohort"]): r.metrics["cohort_size"] for r in found}
    assert sizes == {(4, "0.5m"): 2, (8, "0.5m"): 4}
    assert [r.metrics["client_steps"] for r in found] == [12, 24]


@pytest.mark.slow
def test_errors_of_a_regression_are_averaged_over_examples_by_their_kind(tmp_path: Path):
    """Mean squares of the headline; absolute errors and R2 as they are."""
    sizes = zip("abcdef", range(8, 32, 4), strict=True)
    rows = [f"{client},{x},{0.1 * x * x}" for client, size in sizes for x in range(size)]
    (tmp_path / "a.csv").write_text("\n".join(["client,x,y", *rows]))
    columns = {"target": "y", "client": "client", "task": "regression", "partition": "natural", "clients": None}
    given = CONFIG | {"seeds": 1, "data": f"csv:{tmp_path / 'a.csv'}"} | columns
    (found,) = records_of(sweep_of("lr=.05", **given))
    experiment = prepare(resolve(RunConfig(**given, lr=0.05, validation_share=0.2)), ("fedavg",))
    same = {name: given[name] for name in ("model", "cohort", "local_steps", "batch_size", "rounds", "task", "seeds")}
    scores = jaxpfl.fit("fedavg", experiment.federation, **same, lr=0.05).scores["after"]
    mean = functools.partial(np.average, weights=np.asarray(experiment.federation.test.size))
    want = mean(scores["rmse"][0, -1] ** 2) ** 0.5, mean(scores["mae"][0, -1]), mean(scores["r2"][0, -1])
    got = [found.metrics[f"personalized_{name}_examples"] for name in ("rmse", "mae", "r2")]
    np.testing.assert_allclose(got, want, rtol=1e-4)


@pytest.mark.slow
def test_rates_of_failures_are_rows():
    definition = sweep_of("dropout=0,.9", "stragglers=0,1", seeds=1)
    assert len(groups_of(definition, runs_of(definition))) == 1
    found = {tuple(r.settings.values()): r.metrics for r in records_of(definition)}
    assert found[0.0, 0.0]["client_steps"] == found[0.9, 0.0]["client_steps"] == 18
    assert found[0.0, 1.0]["client_steps"] < 18
    assert found[0.9, 0.0]["bytes_up"] < found[0.0, 0.0]["bytes_up"]


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 2], ids=["one after the other", "side by side"])
def test_noise_is_a_number_and_each_run_has_its_claim(monkeypatch: pytest.MonkeyPatch, most: int):
    rows_at_once(monkeypatch, most)
    definition = sweep_of(
        "privacy.noise_multiplier=1,4",
        methods=("fedavg", "local"),
        privacy=jaxpfl.privacy.PrivacyConfig(delta=1e-3, noise_multiplier=1.0),
        seeds=1,
    )
    found = records_of(definition)
    assert len(groups_of(definition, runs_of(definition))) == 2
    private = [r.metrics["epsilon"] for r in found if r.method == "fedavg"]
    assert len(private) == 2
    assert private[0] > 3 * private[1]  # type: ignore[operator]
    assert [r.settings for r in found if r.method == "local"] == [{}]
    (caveat,) = caveats(found, select(found, [0]))
    assert "each epsilon covers one run alone" in caveat
    assert "(private ones: fedavg 2) and the choice of a setting" in caveat


@pytest.mark.slow
def test_a_setting_that_cannot_run_fails_alone():
    found = records_of(sweep_of("cohort=3,9", seeds=1))
    assert [r.status for r in found] == ["done", "failed"]
    assert found[1].reason == "cohort must be between 1 and the number of clients (6), got 9"


@pytest.mark.slow
def test_a_setting_that_diverges_is_told():
    found = records_of(sweep_of("lr=.1,1e30", seeds=1))
    assert [r.status for r in found] == ["done", "diverged"]
    assert "clients diverged" in found[1].reason
    alone = records_of(sweep_of("lr=.1", seeds=1))[0]
    np.testing.assert_allclose(found[0].metrics["train_loss"], alone.metrics["train_loss"], rtol=1e-5)  # type: ignore[arg-type]


@pytest.mark.slow
def test_rows_that_do_not_fit_run_in_smaller_chunks(monkeypatch: pytest.MonkeyPatch):
    sizes = rows_at_once(monkeypatch, 2)
    found = records_of(sweep_of("lr=.1,.2,.3,.4,.5", seeds=1))
    assert sizes == [5, 3, 2, 2, 1]
    assert [r.settings["lr"] for r in found] == [0.1, 0.2, 0.3, 0.4, 0.5]


def test_a_run_for_which_there_is_no_memory_fails_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(execute, "_run", Fails(OutOfMemoryError("the states need too much")))
    assert {(r.status, r.reason) for r in records_of(sweep_of("lr=.1,.2"))} == {("failed", "the states need too much")}


def test_a_defect_is_not_a_failed_setting(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(execute, "_run", Fails(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        records_of(sweep_of("lr=.1"))


@pytest.mark.slow
def test_only_what_is_missing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ran: list[int] = []
    monkeypatch.setattr(Reporter, "start", lambda self, group, runs, rounds: ran.append(runs))
    run_missing(Sweep.open(tmp_path / "s", sweep_of("lr=.1,.2"), resume=False), Reporter())
    first = load_sweep(tmp_path / "s")
    more = Sweep.open(tmp_path / "s", sweep_of("lr=.1,.2,.3", methods=("fedavg", "local"), seeds=3), resume=True)
    run_missing(more, Reporter())
    assert ran == [4, 5, 9]
    found = load_sweep(tmp_path / "s")
    assert len(found) == 18
    assert found[:4].equals(first)


@pytest.mark.slow
def test_the_winner_runs_on_the_seeds_that_the_search_left_out(tmp_path: Path):
    definition = sweep_of("lr=1e-6,.1", seeds=4, search={"search_seeds": 2})
    run_missing(Sweep.open(tmp_path / "s", definition, resume=False), Reporter())
    found = load_sweep(tmp_path / "s")
    assert found.groupby("lr").seed.apply(list).to_dict() == {1e-6: [0, 1], 0.1: [0, 1, 2, 3]}


@pytest.mark.slow
def test_runs_that_failed_run_again_in_the_next_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(execute, "_run", Fails(OutOfMemoryError("the states need too much")))
        run_missing(Sweep.open(tmp_path / "s", sweep_of("lr=.1"), resume=False), Reporter())
    again = Sweep.open(tmp_path / "s", sweep_of("lr=.1"), resume=True)
    assert set(load_sweep(tmp_path / "s").status) == {"failed"}
    run_missing(again, Reporter())
    assert set(load_sweep(tmp_path / "s").status) == {"done"}


DIGITS = resolve(RunConfig(data="digits"))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the data sets that have been read."""
    names: list[str] = []
    load = data_sets.source_of

    def counted(given: RunConfig) -> object:
        names.append(given.data)
        return load(given)

    monkeypatch.setattr(data_sets, "source_of", counted)
    return names


def test_sweeps_of_the_same_data_read_them_once(read: list[str], tmp_path: Path):
    loaded = Data()
    for name in ("a", "b"):
        Sweep.open(tmp_path / name, sweep_of("lr=.05,.5"), resume=False, data=loaded)
    Sweep.open(tmp_path / "a", sweep_of("lr=.05,.5"), resume=True, data=loaded)
    assert read == ["digits"]


def test_other_data_take_the_place_of_the_first(read: list[str]):
    loaded = Data()
    other = replace(DIGITS, data="planted:clients=3,clusters=3")
    sums = [loaded.checksum(given) for given in (DIGITS, DIGITS, other, DIGITS)]
    assert read == ["digits", other.data, "digits"]
    assert sums[0] == sums[1] == sums[3] != sums[2]


def test_a_sweep_of_its_own_sees_that_a_file_has_changed(tmp_path: Path):
    table, folder = tmp_path / "a.csv", tmp_path / "sweep"
    rows = [f"{client},{x},{x % 2}" for client in "abcd" for x in range(12)]
    table.write_text("\n".join(["client,x,y", *rows]))
    definition = sweep_of(
        "lr=.05,.5", data=f"csv:{table}", target="y", client="client", task="classification", clients=4
    )
    Sweep.open(folder, definition, resume=False)
    table.write_text("\n".join(["client,x,y", *rows[:-1], "d,11.5,1"]))
    with pytest.raises(JaxpflError, match="has changed since the sweep"):
        Sweep.open(folder, definition, resume=True)


def test_nothing_of_the_earlier_sweep_counts_in_the_new_one(tmp_path: Path):
    place = tmp_path / "s"
    earlier = Sweep.open(place, sweep_of("lr=.1,.2"), resume=False)
    Journal(place).append([Record("local", {"lr": 0.1}, 0)])
    (place / "best").mkdir()
    with pytest.raises(JaxpflError, match="--force replaces it"):
        Sweep.open(place, sweep_of("lr=.3"), resume=False)
    (place / "notes.txt").touch()
    with pytest.raises(JaxpflError, match=r"^--force would delete .*notes\.txt"):
        Sweep.open(place, sweep_of("lr=.3"), resume=False, force=True)
    assert definition.read(place) == earlier.definition
    (place / "notes.txt").unlink()
    replaced = Sweep.open(place, sweep_of("lr=.3"), resume=False, force=True)
    assert definition.read(place) == replaced.definition != earlier.definition
    assert Journal(place).read() == []
    assert [path.name for path in place.iterdir()] == ["sweep.json"]


STEPS = {"budget": "steps"}


def config(**changes: Any) -> RunConfig:
    given: dict[str, Any] = CONFIG | {"rounds": 60, "local_steps": 4} | changes
    return RunConfig(**given)


@pytest.mark.parametrize("method", [name for name in algorithms.METHODS if name != "l2gd"][::8])
def test_every_method_that_counts_has_its_rounds(method: str):
    assert 1 <= rounds_of(config(), method, (method,)) <= 60


def test_rounds_by_the_gradients_of_a_round():
    rounds = {name: rounds_of(config(), name, (name,)) for name in ("local", "fedavg", "ditto", "pfedme", "pooled")}
    assert rounds == {"local": 60, "fedavg": 60, "ditto": 30, "pfedme": 20, "pooled": 60}
    assert rounds_of(config(set=("fedem.components=4",)), "fedem", ("fedem",)) == 15
    assert rounds_of(config(set=("ifca.clusters=5",)), "ifca", ("ifca",)) == 60
    assert rounds_of(config(rounds=1), "ditto", ("ditto",)) == 1


def test_rounds_outside_the_cohort_count():
    """Half of the clients rest in a round: (1/2 + 1/4) rounds of 4 gradients between two of 8."""
    given = config(set=("adaped.idle_rounds=2",))
    assert rounds_of(given, "adaped", ("adaped",)) == int(60 * 4 / (8 + 4 * 0.75))
    assert rounds_of(given, "adaped", ("adaped",), share=1.0) == 30


def test_a_method_that_draws_its_gradients_is_refused():
    with pytest.raises(JaxpflError, match="does not support l2gd, whose number of gradients is random"):
        sweep_of("lr=.1", methods=("fedavg", "l2gd"), search=STEPS)


def test_settings_that_change_the_gradients_have_rounds_of_their_own():
    definition = sweep_of("fedem.components=2,3", methods=("fedem",), search=STEPS, rounds=12)
    assert [group.rounds for group in groups_of(definition, runs_of(definition))] == [6, 4]


@pytest.mark.slow
def test_clients_evaluate_equally_many_gradients(tmp_path: Path):
    methods, rounds = ("local", "fedavg", "adaped", "ditto"), 40
    more: dict[str, Any] = {"set": ("adaped.idle_rounds=1",), "cohort": 3}
    definition = sweep_of("lr=.1", methods=methods, search=STEPS, rounds=rounds, seeds=1, **more)
    sweep = Sweep.open(tmp_path / "s", definition, resume=False)
    run_missing(sweep, Reporter())
    table = load_sweep(tmp_path / "s").set_index("method")
    reference = table.gradients["fedavg"]
    assert reference == rounds * 2 * definition.config.cohort / 6  # type: ignore[operator]
    assert table.rounds["fedavg"] == rounds
    assert table.rounds["ditto"] == rounds // 2
    for method in methods:
        in_a_round = table.gradients[method] / table.rounds[method]
        assert abs(table.gradients[method] - reference) <= in_a_round, method
    again = Sweep.open(tmp_path / "s", definition, resume=True)
    assert again.missing(again.journal.read()) == ()


CLASSES = 3


def swept(folder: Path, poisoned: bool, search: dict[str, Any]) -> tuple[list[Record], dict[str, Choice]]:
    """The records and the choices of a sweep over data with the right test labels, or with wrong ones."""
    draw = np.random.default_rng(0)
    centres = draw.normal(size=(CLASSES, 4))
    labels = draw.integers(CLASSES, size=360)
    x = (centres[labels] + draw.normal(size=(360, 4))).astype(np.float32)
    at_test = (labels[240:] + 1) % CLASSES if poisoned else labels[240:]
    folder.mkdir()
    np.savez(folder / "own.npz", x_train=x[:240], y_train=labels[:240], x_test=x[240:], y_test=at_test)
    given = {"data": "npz:own.npz", "data_dir": str(folder), "partition": "iid"}
    definition = sweep_of("lr=.001,.03,.3", methods=("fedavg",), search=search, **given)
    sweep = Sweep.open(folder / "sweep", definition, resume=False)
    run_missing(sweep, Reporter())
    records = sweep.grid_order(sweep.journal.read())
    return records, select(records, definition.searched)


@pytest.mark.slow
@pytest.mark.parametrize("search", [{"search_seeds": 1}, {"halving": 2, "halving_first": 1}], ids=["seeds", "halving"])
def test_wrong_test_labels_change_test_scores_alone(tmp_path: Path, search: dict[str, Any]):
    clean, chosen = swept(tmp_path / "clean", False, search)
    poisoned, still = swept(tmp_path / "poisoned", True, search)
    assert still == chosen
    assert all(choice.settings is not None for choice in chosen.values())
    same = ("method", "settings", "seed", "status", "rounds")
    assert [[getattr(r, name) for name in same] for r in poisoned] == [[getattr(r, n) for n in same] for r in clean]
    for name in ("validation_accuracy", "validation_loss", "train_loss"):
        assert [r.metrics.get(name) for r in poisoned] == [r.metrics.get(name) for r in clean]
    right, wrong = ([r.metrics["personalized_accuracy"] or 0.0 for r in those] for those in (clean, poisoned))
    assert max(wrong) < max(right) - 0.1
