"""Execution plans: settings like all others, declared once for help, checks, files and documentation."""

import dataclasses

import jax
import pytest

import jaxpfl
from jaxpfl import ExecutionPlan, JaxpflError
from jaxpfl.engine import execution_plan, programs
from jaxpfl.engine.build import simulation_of
from jaxpfl.engine.execution_plan import explain, resolve
from jaxpfl.engine.spec import RunSpec
from jaxpfl.runs.config import from_mapping

TUNING_OF = execution_plan.tuning_of

WRONG = [
    ("devices", 0, "plan.devices must be auto or a positive number, got 0"),
    ("devices", True, "plan.devices must be auto or a positive number, got True"),
    ("clients", "seven", "plan.clients must be auto, map, vmap or a positive number, got 'seven'"),
    ("clients", 1.0, "plan.clients must be auto, map, vmap or a positive number, got 1.0"),
    ("clients", "9" * 5000, "plan.clients must be auto, map, vmap or a positive number, got"),
    ("clients_in", "cloud", "plan.clients_in must be auto, device, host or disk, got 'cloud'"),
    ("runs", 2, "plan.runs must be auto, map or vmap, got 2"),
    ("rounds_per_call", 0, "plan.rounds_per_call must be at least 1, got 0"),
    ("rounds_per_call", 2.5, "plan.rounds_per_call must be a whole number, got 2.5"),
    ("donate", "no", "plan.donate must be True or False, got 'no'"),
    ("tuning", "fast", "plan.tuning must be auto, quick or full, got 'fast'"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_wrong_values_are_refused_by_name(name, value, message):
    with pytest.raises(JaxpflError, match=message):
        ExecutionPlan(**{name: value})


def test_every_field_is_a_setting_that_help_documents():
    text = " ".join((ExecutionPlan.__doc__ or "").split())
    for field in dataclasses.fields(ExecutionPlan):
        assert f"{field.name}: {field.metadata['help']}" in text
    assert "Allowed: >= 1 (rounds)." in text


def test_a_plan_of_a_file_is_that_of_python():
    plan = from_mapping({"plan": {"clients": 4, "devices": "2", "runs": "map", "donate": False}}, "here").plan
    assert plan == ExecutionPlan(clients=4, devices="2", runs="map", donate=False)


PREDICTED = {"cohort": 5, "num_clients": 50, "model_bytes": 178_000}


@pytest.mark.parametrize(("platform", "reason"), [("cpu", "small operations are"), ("cuda", "cuda can run them")])
def test_why_seeds_run_together(platform, reason):
    whole = explain(resolve(ExecutionPlan(), **PREDICTED | {"model_bytes": 1000}, platform=platform))
    ((choice, why),) = (row[1:] for row in whole if row[0] == "seeds and settings")
    assert choice == "one vectorized axis"
    assert why.startswith(reason)


@pytest.mark.parametrize(
    ("tuning", "platform", "client_steps", "choice", "reason"),
    [
        ("auto", "cuda", 5e3, "quick", "5e+03 steps of a model of 173.8 KiB: less time is lost in slower products"),
        ("auto", "gpu", 1e9, "full", "1e+09 steps of a model of 173.8 KiB: faster products save more time"),
        ("auto", "rocm", 1e9, "full", "1e+09 steps of"),
        ("full", "cuda", 5e3, "full", "as given"),
        ("quick", "cuda", 1e9, "quick", "as given"),
        ("quick", "tpu", 5e3, "XLA's own", "a tpu has no other"),
    ],
)
def test_the_products_of_a_gpu_are_tuned_for_the_runs_length(tuning, platform, client_steps, choice, reason):
    plan = ExecutionPlan(tuning=tuning)
    resolved = resolve(plan, **PREDICTED, platform=platform, client_steps=client_steps)
    what, chosen, why = explain(resolved)[-1]
    assert (what, chosen) == ("tuning of products", choice)
    assert why.startswith(reason)
    assert bool(resolved.compiler_options) == (choice == "quick")


def test_only_a_small_run_on_a_gpu_has_its_parameters_in_one_vector():
    for platform, cohort, steps, expected in (
        *(("cuda", 5, 5e3, True), ("cuda", 1000, 5e3, False), ("cuda", 5, 1e9, False)),
        *(("tpu", 5, 5e3, False), ("cpu", 5, 5e3, False)),
    ):
        given: dict = {**PREDICTED, "cohort": cohort, "num_clients": 1000}
        resolved = resolve(ExecutionPlan(), **given, platform=platform, client_steps=steps)
        assert resolved.one_vector is expected


def test_a_cpu_gets_no_option_of_the_compiler():
    for tuning in ("auto", "quick", "full"):
        resolved = resolve(ExecutionPlan(tuning=tuning), **PREDICTED, platform="cpu", client_steps=5e3)
        assert resolved.compiler_options == {}
    short, unknown = resolve(ExecutionPlan(), **PREDICTED, client_steps=1), resolve(ExecutionPlan(), **PREDICTED)
    assert short.tuning is unknown.tuning is None


def test_xla_knows_the_options():
    resolved = resolve(ExecutionPlan(tuning="quick"), **PREDICTED, platform="cuda")
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    lowered.compile(**resolved.compiler_options)
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        lowered.compile(compiler_options={"xla_gpu_enable_triton_products": False})


def test_all_programs_have_the_tuning_and_keys_of_their_own(monkeypatch):
    """As on a GPU: the platform is replaced where the plan asks for it, and XLA on a CPU ignores the options."""
    federation = jaxpfl.federate(jaxpfl.load("digits"), clients=4, classes_per_client=3)
    given, digests = {"model": "linear", "local_steps": 1, "num_classes": 10, "rounds": 3}, {}
    asked: list[dict] = []
    compile_with = programs.compiled
    monkeypatch.setattr(programs, "compiled", lambda *args, **more: asked.append(more) or compile_with(*args, **more))
    monkeypatch.setattr(execution_plan, "tuning_of", lambda plan, backend, *work: TUNING_OF(plan, "gpu", *work))
    for tuning in ("auto", "full"):
        plan = ExecutionPlan(devices=1, clients="map", runs="map", tuning=tuning)
        simulation = simulation_of(RunSpec(method=jaxpfl.METHODS["fedavg"], plan=plan, **given), federation)
        digests[tuning] = simulation.digest()
        asked.clear()
        simulation.evaluate(simulation.advance(simulation.init([0]), 1)[0])
        own = {"xla_gpu_enable_triton_gemm": False} if tuning == "auto" else None
        assert [more.get("compiler_options") for more in asked] == [{"xla_backend_optimization_level": 0}, own, own]
    assert digests["auto"] != digests["full"]
