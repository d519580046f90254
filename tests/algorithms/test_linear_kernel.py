"""Local SGD of linear models in one kernel: the plain form's numbers, interpreted; and its lowering for a GPU."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpfl
from jaxpfl import ExecutionPlan, LocalWork
from jaxpfl.algorithms.parts import linear_kernel, local_work
from jaxpfl.algorithms.parts.augmentation import parse
from jaxpfl.core.protocol import ClientContext
from jaxpfl.core.types import ClientData, Examples
from jaxpfl.engine import execution_plan
from jaxpfl.engine.build import simulation_of
from jaxpfl.engine.execution_plan import explain, resolve
from jaxpfl.engine.spec import RunSpec
from jaxpfl.models import base, build_model

SIZES, SHAPE, TRITON = np.array([5, 9, 1, 0]), (2, 3), "@__gpu$xla.gpu.triton"
TASKS = {
    "softmax": (3, None, lambda task: task),
    "squared": (1, "float", base.regression_task),
    "squared, two outputs": (2, "float", base.regression_task),
    "logistic": (1, "binary", base.binary_task),
    "labels": (3, "binary", base.multilabel_task),
}
"""Number of outputs, kind of labels (classes unless given), and what makes the task."""
DRAWS = {
    "full": {"batch_size": 16},
    "epoch": {},
    "step": {"draw": "step"},
    "replacement": {"draw": "replacement"},
    "replacement of all": {"draw": "replacement", "batch_size": 9},
    "epochs": {"epochs": 2},
    "epochs of all": {"epochs": 2, "batch_size": 16},
}


def problem(name, sizes=SIZES):
    outputs, labels, task_of = TASKS[name]
    rng, n = np.random.default_rng(0), int(sizes.sum())
    shape = (n, outputs) if name in ("labels", "squared, two outputs") else (n,)
    y = rng.normal(size=shape) if labels == "float" else rng.integers(2 if labels else outputs, size=shape)
    task = task_of(base.classification(build_model("linear", outputs, SHAPE), SHAPE, outputs))
    x = rng.normal(size=(n, *SHAPE)).astype(np.float32)
    return task, ClientData.stacked(Examples(x, y.astype(np.float32 if labels == "float" else np.int32)), sizes)


def work_of(sizes=SIZES, epochs=None, **parts):
    work = LocalWork(sizes, **{"steps": 3, "batch_size": 4} | parts)
    return work if epochs is None else work.replace_epochs(epochs)


@functools.cache
def trained(form, name, draw, pull, limits):
    """Parameters and losses of all clients, each with a start of its own, pulled to an anchor or not."""
    task, data = problem(name)
    work, data, nth = work_of(**DRAWS[draw]), jax.tree.map(jnp.asarray, data), jnp.arange(len(data.size))
    params = jax.jit(jax.vmap(lambda n: task.init(jax.random.key(n))))(nth)
    anchor = jax.jit(task.init)(jax.random.key(9)) if pull else None

    def one(nth, start, size, params, limit):
        ctx = ClientContext(jnp.int32(0), nth, nth, limit, jax.random.fold_in(jax.random.key(5), nth))
        own = work, task, ctx.batch_key, ctx, replace(data, start=start, size=size), params
        return local_work.sgd(*own, rate=0.1, weight_decay=0.01, anchor=anchor, prox=0.3)

    with linear_kernel.form(form):
        together = jax.jit(jax.vmap(one, in_axes=(0, 0, 0, 0, 0 if np.ndim(limits) else None)))
        traced = together.trace(nth, data.start, data.size, params, jnp.asarray(limits))
    calls = dict(zip(("interpreted", "loop"), linear_kernel.CALLS, strict=True))
    assert [name in str(traced.jaxpr) for name in calls.values()] == [form == one for one in calls]
    return traced.lower().compile()(nth, data.start, data.size, params, jnp.asarray(limits))


@pytest.mark.parametrize("form", ["interpreted", "loop"])
@pytest.mark.parametrize(
    ("task", "draw", "pull", "limits"),
    [
        ("softmax", "epoch", True, (1, 3, 2, 3)),
        ("squared", "full", False, 7),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                *(("softmax", draw, True, 2) for draw in DRAWS),
                *((task, "full", True, 2) for task in TASKS if task != "softmax"),
                *((task, "epochs", False, (0, 5, 1, 2)) for task in TASKS),
            ]
        ),
    ],
)
def test_other_forms_have_the_numbers_of_the_plain_form(task, draw, pull, limits, form):
    got, want = (trained(one, task, draw, pull, limits) for one in (form, "plain"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-6), got, want)


@pytest.fixture(scope="module")
def federation():
    return jaxpfl.federate(jaxpfl.load("digits"), clients=5, classes_per_client=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "parts"),
    [
        ("fedavg", {"stragglers": 0.5}),
        ("fedavg", {"clients": "2", "clients_in": "host"}),
        ("fedprox", {"seeds": (0, 1), "cohort": 3}),
        ("ditto", {"local_epochs": 1, "runs": "vmap", "seeds": (0, 1)}),
        ("fedavg-ft", {"draw": "replacement", "lr_schedule": "cosine"}),
    ],
)
def test_a_run_has_the_numbers_of_the_plain_form(federation, method, parts):
    of_plan = {name: parts.pop(name) for name in ("clients", "clients_in", "runs") if name in (parts := dict(parts))}
    given = {"model": "linear", "batch_size": 8, "num_classes": 10} | parts
    given |= {} if "local_epochs" in parts else {"local_steps": 3}
    results = []
    for form in ("kernel", "plain"):
        plan = ExecutionPlan(linear=form, **{"clients": "vmap"} | of_plan)
        simulation = simulation_of(RunSpec(method=jaxpfl.METHODS[method], plan=plan, **given), federation)
        assert simulation.execution.linear[0] == {"kernel": "interpreted"}.get(form, form)
        state, history = simulation.advance(simulation.init(given.get("seeds", (0,))), 2)
        adapted = simulation.personal_models(state) if method == "fedavg-ft" else ()
        results.append((state.server, state.clients, history, adapted))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-6), *results)


@pytest.mark.slow
def test_the_plain_form_replaces_a_kernel_that_does_not_compile(federation, monkeypatch):
    """As on a CPU, which has no such kernels."""
    given = {"model": "linear", "rounds": 2, "batch_size": 8, "local_steps": 3}
    want = jaxpfl.fit("fedavg-ft", federation, **given, plan=ExecutionPlan(linear="plain"))
    monkeypatch.setattr(execution_plan, "_linear_of", lambda *_: ("kernel", "a test"))
    result = jaxpfl.fit("fedavg-ft", federation, **given, plan=ExecutionPlan(clients="vmap"))
    assert result.simulation.execution.linear[1].startswith("the kernel does not compile: ")
    np.testing.assert_array_equal(result.personalized_accuracy, want.personalized_accuracy)


def lowered(federation, form, platform="cuda"):
    given = {"model": "linear", "local_steps": 3, "batch_size": 8, "num_classes": 10}
    spec = RunSpec(method=jaxpfl.METHODS["fedavg"], plan=ExecutionPlan(devices=1, linear=form), **given)
    return simulation_of(spec, federation).export(platform).mlir_module()


@pytest.mark.skipif(
    jax.__version_info__ > (0, 10, 2) and jax.default_backend() == "cpu", reason="JAX needs a GPU to lower the kernel"
)
def test_a_gpu_takes_one_kernel_for_all_steps(federation):
    text = lowered(federation, "kernel")
    assert text.count(TRITON) == 1
    assert "dot_general" not in text


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_by_default_a_program_for_another_machine_has_no_kernel(federation, platform):
    assert TRITON not in lowered(federation, "auto", platform)


@pytest.mark.parametrize(
    ("capability", "platform", "plan", "form"),
    [
        ("8.0", "cuda", {}, "kernel"),
        ("7.5", "cuda", {}, "plain"),
        ("gfx90a", "rocm", {}, "plain"),
        ("9.0", "cuda", {"clients": "map"}, "plain"),
        ("9.0", "cuda", {"linear": "plain"}, "plain"),
        (None, "cuda", {}, "plain"),
        (None, "cuda", {"linear": "kernel"}, "kernel"),
        (None, None, {}, "loop"),
        (None, None, {"clients": "map"}, "plain"),
        (None, "tpu", {}, "plain"),
        (None, "tpu", {"linear": "kernel"}, "interpreted"),
    ],
)
def test_the_plan_chooses_the_kernel_where_the_gpu_has_it(monkeypatch, capability, platform, plan, form):
    device = jax.devices()[0] if capability is None else SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(execution_plan.jax, "devices", lambda: [device])
    sizes = {"cohort": 50, "num_clients": 50, "model_bytes": 204}
    resolved = resolve(ExecutionPlan(devices=1, **plan), **sizes, linear=True, platform=platform)
    assert resolved.linear[0] == form
    assert explain(resolved)[-1 if resolved.tuning is None else -2][0] == "SGD of the linear model"


def explained(federation, **parts):
    parts = {"model": "linear", "local_steps": 2, "batch_size": 8, "num_classes": 10, "method": "fedavg"} | parts
    method = jaxpfl.METHODS[parts.pop("method")]
    plan = ExecutionPlan(linear=parts.pop("linear", "kernel"), devices=1, clients="vmap")
    rows = simulation_of(RunSpec(method=method, plan=plan, **parts), federation).explained
    return [row[1:] for row in rows if row[0] == "SGD of the linear model"]


def test_the_plan_says_whether_a_run_has_the_kernel(federation):
    assert explained(federation) == [("one interpreted kernel", "as given; a cpu has no such kernels")]
    ((choice, why),) = explained(federation, client_optimizer="adam")
    assert (choice, why.partition(" the ")[0]) == ("step by step", "the interpreted form does not support")
    assert explained(federation, model="mlp:8") == []
    ((choice, why),) = explained(federation, linear="auto")  # ten outputs
    assert (choice, why.partition(" the ")[0]) == ("step by step", "the loop form does not support")


REFUSED = {
    "optimizer": {"optimizer": "momentum"},
    "clipping": {"clip": 1.0},
    "kept optimizers": {"keeps_optimizer": True},
    "augmentation": {"augment": parse("mixup")},
    "a large batch": {"batch_size": 4096, "sizes": np.array([4096])},
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_training_has_the_plain_form(case):
    sizes = REFUSED[case].get("sizes", SIZES)
    task, data = problem("softmax", sizes)
    work = work_of(**{"sizes": sizes} | REFUSED[case])
    assert kernel_of(work, task, data) is None
    assert kernel_of(work_of(sizes, batch_size=8), task, data) is not None


def test_other_models_and_losses_have_the_plain_form():
    task, data = problem("softmax")
    wide = base.classification(build_model("linear", 11, SHAPE), SHAPE, 11)
    smoothed = task._replace(loss=base.smoothed_cross_entropy(0.1))
    for other in (wide, smoothed, base.in_bfloat16(task), base.regression_task(task, "absolute")):
        assert kernel_of(work_of(), other, data) is None


def kernel_of(work, task, data):
    ctx = ClientContext(jnp.int32(0), jnp.int32(0), jnp.int32(0), 2, jax.random.key(0))
    data = replace(jax.tree.map(jnp.asarray, data), start=jnp.int32(0), size=jnp.int32(1))
    with linear_kernel.form("interpreted"):
        return jax.eval_shape(
            lambda: linear_kernel.local_sgd(
                work, task, ctx, data, task.init(ctx.batch_key), (0.1, 0.0, 0.0), None, None, False
            )
        )
