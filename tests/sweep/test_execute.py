"""Runs of a sweep: rows of one program that are what separate runs are, and settings that fail alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import CONFIG, Fails, sweep_of

import jaxpfl
from jaxpfl.runs.config import RunConfig, resolve
from jaxpfl.runs.control import Reporter
from jaxpfl.runs.records import Record, load_sweep
from jaxpfl.runs.setup import load_federation
from jaxpfl.runs.sweep import execute
from jaxpfl.runs.sweep.execute import Data, run_group
from jaxpfl.runs.sweep.plan import groups_of, runs_of
from jaxpfl.runs.sweep.results import select
from jaxpfl.runs.sweep.runner import run_missing
from jaxpfl.runs.sweep.sweep import Sweep, caveats
from jaxpfl.support.errors import OutOfMemoryError


def records_of(definition: Any) -> list[Record]:
    found: list[Record] = []
    loaded = Data()
    for group in groups_of(definition, runs_of(definition)):
        run_group(group, loaded, found.extend, Reporter())
    return found


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
        assert fit.validation_accuracy is not None
        expected = fit.personalized_accuracy.mean(), fit.validation_accuracy.mean(), fit.history["train_loss"][0, -1]
        names = ("personalized_accuracy", "validation_accuracy", "train_loss")
        np.testing.assert_allclose([record.metrics[name] for name in names], expected, rtol=1e-4)


@pytest.mark.slow
def test_shares_of_the_clients_and_their_sizes():
    found = records_of(sweep_of("clients=4,8", "cohort=.5m", seeds=1))
    sizes = {(r.settings["clients"], r.settings["cohort"]): r.metrics["cohort_size"] for r in found}
    assert sizes == {(4, "0.5m"): 2, (8, "0.5m"): 4}
    assert [r.metrics["client_steps"] for r in found] == [12, 24]


@pytest.mark.slow
def test_rates_of_failures_are_rows():
    definition = sweep_of("dropout=0,.9", "stragglers=0,1", seeds=1)
    assert len(groups_of(definition, runs_of(definition))) == 1
    found = {tuple(r.settings.values()): r.metrics for r in records_of(definition)}
    assert found[0.0, 0.0]["client_steps"] == found[0.9, 0.0]["client_steps"] == 18
    assert found[0.0, 1.0]["client_steps"] < 18
    assert found[0.9, 0.0]["bytes_up"] < found[0.0, 0.0]["bytes_up"]


@pytest.mark.slow
def test_noise_is_a_number_and_each_run_has_its_claim():
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
    real, sizes = execute._run, []

    def short_of_memory(ready: Any, chunk: slice, *more: Any) -> Any:
        rows = len(ready.group.runs[chunk])
        sizes.append(rows)
        if rows > 2:
            raise OutOfMemoryError("the states need too much")
        return real(ready, chunk, *more)

    monkeypatch.setattr(execute, "_run", short_of_memory)
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
