"""Methods, models, tasks and losses in files of the user's own, ``FILE.py:NAME``, through every command."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from command import SMALL, jaxpfl

from jaxpfl import JaxpflError, algorithms, federate, fit, load
from jaxpfl.algorithms import registry
from jaxpfl.data.sources.tables import TableOptions
from jaxpfl.engine.spec import RunSpec
from jaxpfl.engine.tasks import task_of
from jaxpfl.models.base import leaves_by_path
from jaxpfl.runs.config import RunConfig, check_given
from jaxpfl.runs.run_folder import texts_of
from jaxpfl.runs.sweep import runner
from jaxpfl.runs.sweep.sweep import Sweep
from jaxpfl.support import own_code

METHOD = '''
"""A file that prints, and imports a module beside it."""
from __future__ import annotations
import jax, jax.numpy as jnp
from flax import struct
from jaxpfl import Algorithm, Client, Message, Method, Server, SgdHyper, Upload, hyper
from jaxpfl.algorithms import gradients, sgd
from beside import SHARE
print("the file runs")

@struct.dataclass
class Hyper(SgdHyper):
    share: float = hyper(SHARE, "share of the global model", high=1.0)

def build(task, work, *, whole=False):
    """Averaging; the personal model is a mixture of parameters."""
    def update(key, hp, ctx, message, own, splits):
        new, metrics = sgd(work, task, key, ctx, splits.train, message.shared, rate=hp.lr, weight_decay=0.0)
        return new, Upload(jax.tree.map(jnp.subtract, new, message.shared), jnp.ones(())), metrics
    mix = lambda hp, a, b: jax.tree.map(lambda x, y: hp.share * x + (1 - hp.share) * y, a, b)
    client = Client(
        init=lambda key, hp, ctx, message: message.shared, update=update,
        personalize=lambda key, hp, ctx, message, own, splits: mix(hp, message.shared, own),
        predict=lambda hp, own, x: task.model.apply(own, x), gradients=gradients(work.steps))
    server = Server(
        init=lambda key, hp, ctx: task.init(key), broadcast=lambda key, hp, ctx, mu: Message(mu),
        update=lambda key, hp, ctx, mu, sums: (jax.tree.map(jnp.add, mu, sums.mean()), {}),
        predict_global=lambda hp, mu, x: task.model.apply(mu, x))
    return Algorithm((client,), server, work.steps)

METHOD = Method("mixed", build, Hyper())
CLASH = Method("fedavg", build, Hyper())
BAD_NAME = Method("a/b", build, Hyper())
TWIN = Method("mixed", build, Hyper())
PLAIN = Method("plain", build, (1.0,))
number = 3
'''
MODELS = """
import flax.linen as nn
import jaxpfl
class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(x.reshape(len(x), -1))
class Wide(nn.Module):
    width: int
net, model = Net(), jaxpfl.from_linen(Net())
def made(outputs, shape):
    assert (outputs, shape) == (10, (8, 8, 1))
    return Net()
def wrong(outputs, shape):
    return 3
task = jaxpfl.classification(model, (8, 8, 1), 10)
likely = task._replace(headline="loss", lower=True)
def loss(predictions, y):
    return -predictions[..., 0]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_own", {})
    for name, text in {"mine.py": METHOD, "beside.py": "SHARE = 0.25\n", "models.py": MODELS}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def scores(folder: Path, name: str) -> np.ndarray:
    with np.load(folder / "clients.npz") as arrays:
        return arrays[f"{name}/after_accuracy"]


@pytest.mark.slow
def test_a_run_is_that_of_fit_and_its_folder_lives_on_without_the_file(here: Path, capsys):
    small = [*SMALL, "--set", "mixed.share=0.5", "--lr", "0.05", "--quiet"]
    done = jaxpfl(capsys, "run", "mine.py:METHOD", *small, "--output", "run", "--json")
    assert done.status == 0, done.err
    assert done.json["methods"].keys() == {"mixed"}  # what the file prints is not on standard output
    assert done.err == "the file runs\n"
    record = json.loads((here / "run" / "config.json").read_text())
    assert record["code"] == {"mixed": "mine.py:METHOD"}
    assert sorted(path.name for path in (here / "run" / "code").iterdir()) == ["SHA256SUMS", "beside.py", "mine.py"]
    assert not list(here.rglob("__pycache__"))

    federation = federate(load("digits"), clients=6, classes_per_client=3, test_share=0.5)
    more = {"cohort": 3, "batch_size": 5, "local_steps": 2, "seeds": 2, "lr": 0.05, "rounds": 6, "eval_every": 2}
    longer = fit("mine.py:METHOD", federation, model="linear", hyper={"share": 0.5}, **more)
    np.testing.assert_array_equal(scores(here / "run", "mixed"), longer.scores["after"]["accuracy"][1])

    (here / "beside.py").write_text("SHARE = 0.75\n")
    grown = ["run", "mine.py:METHOD", *small, "--rounds", "6", "--output", "run", "--resume"]
    refused = jaxpfl(capsys, *grown)
    assert refused.status == 2
    assert "beside.py has changed (restore it from run/code/beside.py, or start anew)" in refused.err

    for path in here.glob("*.py"):
        path.unlink()
    for command in ("report", "check"):
        told = jaxpfl(capsys, command, "run")
        assert (told.status, told.err) == (0, "")  # nothing is run
    exported = jaxpfl(capsys, "export", "run")
    assert exported.err.splitlines() == [
        "warning: running code of run/code, written by the author of these results",
        "the file runs",
    ]
    shutil.move("run", "moved")
    resumed = jaxpfl(capsys, "run", "--config", "moved/config.json", "--rounds", "6", "--output", "moved", "--resume")
    assert resumed.status == 0, resumed.err
    assert "rounds: 4 -> 6" in resumed.err
    assert json.loads((here / "moved" / "config.json").read_text())["code"] == record["code"]
    np.testing.assert_array_equal(scores(here / "moved", "mixed"), longer.personalized_accuracy)
    (here / "moved" / "code" / "beside.py").write_text("SHARE = 1\n")
    assert "beside.py does not match SHA256SUMS" in jaxpfl(capsys, "check", "moved").out
    assert jaxpfl(capsys, "export", "moved", "--output", "out").err.startswith("error: moved/code is damaged")


@pytest.mark.filterwarnings("ignore:.*written by the author of these results")
def test_a_sweep_over_own_fields_and_its_worker_elsewhere(here: Path, capsys, monkeypatch):
    grid = ["--grid", "mixed.share=0.2,0.9", "--model", "models.py:net", "--quiet"]
    args = ["sweep", "mine.py:METHOD", *SMALL[2:8], "--rounds", "2", "--seeds", "1", *grid, "--output", "sweep"]
    monkeypatch.setattr("jaxpfl.runs.sweep.sweep.figures", lambda summary: {})
    done = jaxpfl(capsys, *args, "--json")
    assert done.status == 0, done.err
    best = json.loads((here / "sweep" / "best" / "mixed.json").read_text())
    assert (best["methods"], best["model"]) == (["mine.py:METHOD"], "models.py:net")
    journal = (here / "sweep" / "journal" / "main.jsonl").read_text()

    sweep = Sweep.read(here / "sweep")
    (group,) = sweep.groups
    monkeypatch.setattr(registry, "_own", {})
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    for path in here.glob("*.py"):
        path.unlink()
    own_code.refresh()
    runner._sweep_there.cache_clear()
    records = runner._run_there(str(here / "sweep"), group, None)
    assert all(f'"personalized_accuracy": {one.metrics["personalized_accuracy"]}' in journal for one in records)

    monkeypatch.chdir(here)
    monkeypatch.setattr(registry, "_own", {})
    capsys.readouterr()
    for command in ("report", "check", "runs"):
        told = jaxpfl(capsys, command, "." if command == "runs" else "sweep")
        assert (told.status, told.err) == (0, "")
    (here / "mine.py").write_text(METHOD.replace("hp.share * x", "x"))
    (here / "beside.py").write_text("SHARE = 0.25\n")
    (here / "models.py").write_text(MODELS)
    assert "mine.py has changed" in jaxpfl(capsys, *args, "--resume").err


@pytest.mark.parametrize("value", ["Net", "net", "model", "made"])
def test_a_model_is_a_class_an_instance_a_pair_of_functions_or_a_function_of_the_sizes(here: Path, value: str):
    federation = federate(load("digits"), clients=3, partition="iid", test_share=0.5)
    task = task_of(RunSpec(method="fedavg", model=f"models.py:{value}"), federation)
    shapes = {path: leaf.shape for path, leaf in leaves_by_path(task.init(jax.random.key(0))).items()}
    assert shapes == {"Dense_0/bias": (10,), "Dense_0/kernel": (64, 10)}


def test_tasks_and_losses(here: Path):
    federation = federate(load("digits"), clients=3, partition="iid", test_share=0.5)
    spec = RunSpec(method="fedavg", task="models.py:task", loss="models.py:loss")
    task, module = task_of(spec, federation), own_code.load_file(Path("models.py")).module
    assert spec.task is module.task
    assert (task.loss, task.metrics["loss"]) == (module.loss, module.loss)


WRONG = {
    "none.py:METHOD": "cannot read none.py: No such file or directory",
    "mine.py": "mine.py: there is no '' (suitable names in the file: METHOD, CLASH, BAD_NAME, TWIN, PLAIN)",
    "mine.py:METHODS": "mine.py:METHODS: there is no 'METHODS' (suitable names in the file: METHOD, CLASH",
    "mine.py:number": "mine.py:number: number is not a Method (suitable names in the file: METHOD",
    "mine.py:CLASH": "mine.py:CLASH needs another name than 'fedavg', which is a registered method",
    "mine.py:BAD_NAME": "mine.py:BAD_NAME: a Method's name may contain only letters, digits, - and _, got 'a/b'",
    "mine.py:PLAIN": "mine.py:PLAIN: hyper must be a dataclass, with each field declared by jaxpfl.hyper",
    "mine.py:METHOD mine.py:TWIN": "list each method once, got mixed, mixed",
    "syntax.py:METHOD": "syntax.py: SyntaxError: '(' was never closed (syntax.py, line 2)",
    "raises.py:METHOD": "raises.py line 3: ZeroDivisionError: division by zero",
    "exits.py:METHOD": "exits.py line 1: SystemExit: 3",
    "imports.py:METHOD": "imports.py line 1: ModuleNotFoundError: No module named 'nowhere'",
    "local --model models.py:task": "models.py:task: task is not a model (suitable names in the file: Net, Wide, net,",
    "local --model models.py:Wide": "cannot make the model (Wide.__init__() missing 1 required positional argument",
    "local --model models.py:wrong": "the result of the model's function must be a registered name, a flax.linen",
    "local --task models.py:net": "models.py:net: net is not a task (suitable names in the file: task, likely)",
    "mine.py:METHOD --set mixed.shares=1": "unknown hyper-parameter of mixed 'shares'",
}


@pytest.mark.parametrize("given", WRONG)
def test_bad_files_are_one_line_and_write_nothing(here: Path, capsys, given: str):
    texts = {
        "syntax": "a = 1\nb = (",
        "raises": "a = 1\n\n1 / 0",
        "exits": "raise SystemExit(3)",
        "imports": "import nowhere",
    }
    for name, text in texts.items():
        (here / f"{name}.py").write_text(text)
    done = jaxpfl(capsys, "compare", *given.split(" "), "--output", "out")
    assert done.status == 2
    (line,) = (line for line in done.err.splitlines() if line != "the file runs")
    assert line.startswith(f"error: {WRONG[given]}")
    assert not (here / "out").exists()


def test_help_explains_a_method_of_a_file(here: Path, capsys):
    text = jaxpfl(capsys, "run", "mine.py:METHOD", "--model", "models.py:net", "--help").out
    assert "mixed: Averaging; the personal model is a mixture of parameters." in text
    assert "share=0.25" in text
    assert "whole=False" in text


def test_files_of_two_folders_import_their_own_modules(here: Path):
    for name in ("one", "two"):
        (here / name).mkdir()
        (here / name / "beside.py").write_text(f"SHARE = {len(name) / 10 if name == 'one' else 0.9}\n")
        (here / name / "mine.py").write_text(METHOD.replace('"mixed"', f'"{name}"'))
    found = [algorithms.get(f"{name}/mine.py:METHOD").hyper.share for name in ("one", "two")]
    assert found == [0.3, 0.9]
    with pytest.raises(JaxpflError, match=r"two different files are named (mine|beside)\.py"):
        texts_of(RunConfig(), algorithms.names_of([f"{name}/mine.py:METHOD" for name in ("one", "two")]))


_SAVED = "jaxpfl data convert has already split federation:made"
_OWN = "task = models.py:task has its own model"
IGNORED = [
    ("sweep local --task models.py:task --model mlp --grid lr=0.1,1", f"model = mlp has no effect, because {_OWN}"),
    ("sweep local --task models.py:task --grid model=mlp,cnn", f"the axis model has no effect, because {_OWN}"),
    ("compare --data csv:t.csv --date d --split-date 2025-01-01 --test-share 0.25", "test_share = 0.25 has no effect"),
    *[
        (f"run local --data federation:made --{flag}", f"{flag.split()[0]} = {value} has no effect, because {_SAVED}")
        for flag, value in {
            **{f"{name} x": "x" for name in ("client", "target", "ignore", "date", "person", "encoding")},
            **{"missing drop": "drop", "window 3": "3", "tokens": "True"},
        }.items()
    ],
]


@pytest.mark.parametrize(("command", "message"), IGNORED)
def test_settings_without_effect_are_refused(capsys, here: Path, command: str, message: str):
    found = jaxpfl(capsys, *command.split())
    assert (found.status, found.err.count("\n")) == (2, 1)
    assert message in found.err
    assert found.err.endswith(": leave it out\n")


def test_a_recorded_config_may_hold_what_its_presets_gave():
    recorded = RunConfig(task="models.py:task", model="mlp", split_date="2025-01-01", test_share=0.5)
    check_given(recorded, recorded)
    with pytest.raises(JaxpflError, match=r"test_share = 0\.25 has"):
        check_given(replace(recorded, test_share=0.25), recorded)


@pytest.mark.slow
def test_a_report_and_a_comparison_are_about_the_own_tasks_metric(capsys, here: Path):
    federation = federate(load("digits"), clients=4, classes_per_client=3, test_share=0.5)
    for name in ("one", "two"):
        run = fit("local", federation, task="models.py:likely", rounds=2 + (name == "two"), output=name)
    assert run.constant is None
    assert " loss " in repr(run)
    mean = f"{run.scores['after']['loss'][-1].mean():.4g}"
    assert jaxpfl(capsys, "report", "two").status == 0
    page = Path("two/report.html").read_text()
    assert "test loss after the last round" in page
    assert mean in page
    found = jaxpfl(capsys, "compare-runs", "one", "two")
    assert (found.status, mean in found.out, "test loss" in found.out) == (0, True, True), found.err


def test_true_and_false_are_the_names_of_the_classes(tmp_path: Path):
    (tmp_path / "t.csv").write_text("who,x,y\n" + "\n".join(f"{i % 2},{i},{str(i % 3 > 0).upper()}" for i in range(12)))
    source = load(f"csv:{tmp_path / 't.csv'}", table=TableOptions("y", "who"), task="classification")
    assert source.class_names.tolist() == ["FALSE", "TRUE"]
    assert source.y_train.tolist() == [int(i % 3 > 0) for i in range(12)]
