"""MLflow, in a folder, and Weights & Biases, as a module that keeps its calls, told of a run folder's records."""

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from jaxpfl.runs.tracking import MLflow, WandB, end_trackers
from jaxpfl.support.errors import JaxpflError, JaxpflWarning
from jaxpfl.support.files import Records

STORED = Path(__file__).with_name("stored_run") / "config.json"
ROUNDS: list[dict[str, Any]] = [
    {"kind": "round", "method": "fedavg", "round": r, "train_loss": [1.0 / r, 3.0 / r]} for r in (1, 2, 3)
]
EVALUATION = {
    "kind": "evaluation",
    "method": "fedavg",
    "round": 2,
    "personalized_accuracy": [0.5, None],
    "seconds": 3.0,
}
RECORDS = [*ROUNDS[:2], EVALUATION, ROUNDS[2]]
TOLD = {
    "round/train_loss": [(1, 2.0), (2, 1.0), (3, (1 / 3 + 1) / 2)],
    "evaluation/personalized_accuracy": [(2, 0.5)],
    "evaluation/seconds": [(2, 3.0)],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "a-run"
    place.mkdir()
    shutil.copy(STORED, place)
    return place


def tell(tracker: Any, done: int = 0) -> None:
    """A method whose later records are told now, and whose first ``done`` rounds stand in the folder."""
    with end_trackers([tracker]):
        tracker.begin("fedavg", done)
        for record in RECORDS:
            if record["round"] > done:
                tracker.add(record | {k: [x or float("nan") for x in v] for k, v in record.items() if type(v) is list})


class TestMLflow:
    @pytest.fixture(autouse=True)
    def package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "digits")
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        pytest.importorskip("mlflow", reason="the extra jaxpfl[mlflow] is not installed")

    def stored(self, store: Path) -> list[Any]:
        from mlflow import MlflowClient

        client = MlflowClient(store.as_uri())
        experiment = client.get_experiment_by_name("digits")
        assert experiment is not None
        found = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
        self.client = client
        return list(found)

    def history(self, run: Any) -> dict[str, list[tuple[int, float]]]:
        names = run.data.metrics
        return {n: [(m.step, m.value) for m in self.client.get_metric_history(run.info.run_id, n)] for n in names}

    @pytest.mark.slow
    def test_a_run_of_it_holds_means_settings_and_how_it_ended(self, folder: Path, tmp_path: Path):
        tell(MLflow(folder, (tmp_path / "store").as_uri()))
        (run,) = self.stored(tmp_path / "store")
        assert self.history(run) == TOLD
        assert (run.info.run_name, run.info.status) == ("fedavg", "FINISHED")
        assert run.data.tags["run_folder"] == "a-run"
        stored = json.loads(STORED.read_text())
        assert run.data.params["rounds"] == str(stored["config"]["rounds"])
        assert run.data.params["fedavg.lr"] == str(stored["hyper"]["fedavg"]["lr"])
        assert run.data.params["privacy.noise"] == stored["config"]["privacy"]["noise"]

    def test_what_goes_on_from_a_checkpoint_is_whole_and_without_what_fell(self, folder: Path, tmp_path: Path):
        store, records = tmp_path / "store", Records(folder / "metrics.jsonl")
        records.append([*RECORDS[:3], {**ROUNDS[0], "method": "local"}])
        first = MLflow(folder, store.as_uri())
        first.begin("fedavg", 0)
        first.add({**ROUNDS[2], "train_loss": [77.0]})  # of a round that was not saved
        first.end(complete=False)
        tell(MLflow(folder, store.as_uri()), done=2)
        runs = {run.info.status: run for run in self.stored(store)}
        assert runs.keys() == {"KILLED", "FINISHED"}
        assert self.history(runs["FINISHED"]) == TOLD

    def go_on(self, tracker: MLflow) -> None:
        for _ in range(1200):  # metrics are sent some hundred at once
            tracker.add(ROUNDS[0])
        tracker.end(True)

    def test_a_trouble_of_the_service_is_warned_of_once_and_the_run_goes_on(self, folder: Path, tmp_path: Path):
        tracker = MLflow(folder, (tmp_path / "store").as_uri())
        tracker.begin("fedavg", 0)
        shutil.rmtree(tmp_path / "store")
        with pytest.warns(JaxpflWarning, match=r"^--mlflow: .*all are written to .*metrics\.jsonl$") as said:
            self.go_on(tracker)
        assert len(said) == 1


class Kept(ModuleType):
    """Stands for the package wandb, as far as the tracker uses it."""

    def __init__(self, mode: str = "offline"):
        super().__init__("wandb")
        self.runs: list[dict[str, Any]] = []
        self.mode, self.logins = mode, 0

    def setup(self) -> Any:
        return SimpleNamespace(settings=SimpleNamespace(mode=self.mode))

    def login(self) -> None:
        self.logins += 1
        raise RuntimeError("No API key configured.\nUse `wandb login` to log in.")

    def Settings(self, **given: Any) -> dict[str, Any]:
        return given

    def init(self, **given: Any) -> Any:
        run = {"given": given, "rows": []}
        self.runs.append(run)
        return SimpleNamespace(
            log=lambda metrics, step: run["rows"].append((step, metrics)),
            finish=lambda exit_code: run.update(exit_code=exit_code),
        )


def test_wandb_is_told_of_every_round_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch):
    module = Kept()
    monkeypatch.setitem(sys.modules, "wandb", module)
    tell(WandB(folder, "digits"))
    (run,) = module.runs
    told = {n: [(step, row[n]) for step, row in run["rows"] if n in row] for n in TOLD}
    assert told == TOLD
    assert run["exit_code"] == 0
    given = run["given"]
    assert (given["project"], given["group"], given["name"], given["dir"]) == ("digits", "a-run", "fedavg", str(folder))
    assert given["config"]["fedavg.lr"] == 0.1
    assert module.logins == 0


def test_wandb_without_a_login_is_refused_before_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", Kept("online"))
    with pytest.raises(JaxpflError, match=r"^--wandb digits: No API key configured. Use .* WANDB_MODE=offline"):
        WandB(folder, "digits")
