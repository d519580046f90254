"""Early stopping of stored runs (what is kept, and that a killed run ends where the whole one does), and the clock of
compiling.
"""

import json
import shutil
import threading
import time
from types import SimpleNamespace

import jax
import pytest
from finished_run import SETTINGS, run

from jaxpfl import ExecutionPlan, JaxpflError
from jaxpfl.engine import build, execution_plan, programs
from jaxpfl.engine.execution_plan import tuning_of
from jaxpfl.engine.programs import key_of
from jaxpfl.runs import control, setup
from jaxpfl.runs.config import RunConfig, resolve
from jaxpfl.runs.control import CompileClock, Reporter
from jaxpfl.runs.run import open_folder, run_methods
from jaxpfl.runs.setup import prepare
from jaxpfl.runs.stored_run import last_state, open_run

STOPPING = SETTINGS | {
    "rounds": 40,
    "eval_every": 2,
    "checkpoint_every": 3,
    "validation_share": 0.3,
    "patience": 3,
    "lr": 1.0,
}


class Killed(Exception):
    pass


class Kills(Reporter):
    """A reporter that ends the process, so to say, after an evaluation."""

    def __init__(self, after: int):
        self.after = after

    def progress(self, rounds: int, loss: float, score: float | None = None) -> None:
        if rounds == self.after and score is not None:
            raise Killed


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole") / "run", ("fedavg",), **STOPPING)


def records(folder):
    return [json.loads(line) | {"seconds": 0} for line in (folder / "metrics.jsonl").read_text().splitlines()]


def resumed(folder, **changes):
    experiment = prepare(resolve(RunConfig(**STOPPING | changes)), ("fedavg",))
    open_folder(folder, experiment, resume=True)
    return run_methods(experiment, folder, Reporter())


@pytest.mark.slow
def test_a_stopped_run_is_whole(whole):
    summary = json.loads((whole / "summary.json").read_text())
    row = summary["methods"]["fedavg"]
    last = row["stopped_after"]
    assert (summary["rounds"], last % 2) == (40, 0)
    assert 6 < last < 40
    assert {r["round"] for r in records(whole) if r["kind"] == "round"} == set(range(1, last + 1))
    assert max(row["best_on_validation"]["rounds"]) == last - 6  # three evaluations before, of the last seed to stop
    stored = open_run(whole)
    assert last_state(stored, stored.experiment(), "fedavg", 0)[1].round.tolist() == [last]


@pytest.mark.slow
def test_a_killed_run_ends_where_the_whole_one_does_unless_its_evaluations_are_lost(whole, tmp_path):
    folder, experiment = tmp_path / "run", prepare(resolve(RunConfig(**STOPPING)), ("fedavg",))
    open_folder(folder, experiment, resume=False)
    with pytest.raises(Killed):
        run_methods(experiment, folder, Kills(after=4))  # the last checkpoint is of round 3
    lost = shutil.copytree(folder, tmp_path / "lost")
    (lost / "metrics.jsonl").unlink()
    with pytest.raises(JaxpflError, match=r"metrics.jsonl lacks the evaluation of fedavg after round 2, which"):
        resumed(lost)
    summary = resumed(folder)
    assert records(folder) == records(whole)
    want = json.loads((whole / "summary.json").read_text())["methods"]["fedavg"]
    assert summary["methods"]["fedavg"]["stopped_after"] == want["stopped_after"]
    longer = resumed(folder, rounds=50)  # there is no patience left
    assert longer["methods"]["fedavg"]["stopped_after"] == want["stopped_after"]
    assert records(folder) == records(whole)


def test_a_clock_counts_the_compiling_of_its_own_thread_once(monkeypatch):
    monkeypatch.setattr(control, "time", SimpleNamespace(perf_counter=lambda: 100.0))
    duration = jax.monitoring.record_event_duration_secs
    with CompileClock() as clock:
        duration("/jax/core/compile/jaxpr_trace_duration", 0.01)  # inside the next
        duration("/jax/core/compile/backend_compile_duration", 0.03)
        other = threading.Thread(target=duration, args=("/jax/core/compile/backend_compile_duration", 9.0))
        other.start()
        other.join()
    duration("/jax/core/compile/backend_compile_duration", 9.0)
    assert clock.seconds == pytest.approx(0.03)


def test_a_clock_counts_the_wait_for_another_thread_that_compiles():
    key, began = key_of("waited for"), threading.Event()

    def make() -> int:
        began.set()
        time.sleep(0.05)
        return 1

    other = threading.Thread(target=programs.cached, args=(key, make))
    with CompileClock() as clock:
        other.start()
        began.wait()
        assert programs.cached(key, make) == 1
        assert programs.cached(key, make) == 1
    other.join()
    assert 0.03 < clock.seconds < 1


@pytest.mark.slow
def test_a_resumed_run_keeps_its_tuning(tmp_path, monkeypatch):
    """As on a GPU, where the products of a short run are compiled quickly and those of a long run fully."""
    tuned, made = [], build.Assembled.simulation
    monkeypatch.setattr(setup, "tuning_of", lambda *given: tuning_of(given[0], "gpu", *given[2:]))
    monkeypatch.setattr(build.Assembled, "simulation", lambda self: tuned.append(self.spec.plan.tuning) or made(self))
    folder = run(tmp_path / "run", ("local",), **SETTINGS)
    path, made_long = folder / "config.json", SETTINGS | {"rounds": 4}
    monkeypatch.setattr(execution_plan, "_QUICK_WORK", 0)
    longer = prepare(resolve(RunConfig(**made_long)), ("local",))
    assert longer.tuning == "full"
    assert open_folder(folder, longer, resume=True) == ["rounds: 3 -> 4"]
    run_methods(longer, folder, Reporter())
    assert tuned == ["quick", "quick"]
    other = prepare(resolve(RunConfig(**made_long, plan=ExecutionPlan(tuning="full"))), ("local",))
    with pytest.raises(JaxpflError, match=r"would change the experiment in .*: plan\.tuning: quick -> full"):
        open_folder(folder, other, resume=True)
    # Earlier versions had no other choice on a GPU than XLA's own.
    record = json.loads(path.read_text())
    del record["config"]["plan"]["tuning"]
    record["versions"]["platform"] = "gpu"
    path.write_text(json.dumps(record))
    monkeypatch.undo()
    monkeypatch.setattr(setup, "tuning_of", lambda *given: tuning_of(given[0], "gpu", *given[2:]))
    assert longer.tuning == "quick"
    open_folder(folder, longer, resume=True)
    assert json.loads(path.read_text())["config"]["plan"]["tuning"] == "full"
