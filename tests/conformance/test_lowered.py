"""The round as an accelerator would take it, traced here: no callback, no copy of the clients' data."""

import math
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxpfl
from jaxpfl import ExecutionPlan, JaxpflError
from jaxpfl.engine import programs
from jaxpfl.engine.build import simulation_of
from jaxpfl.engine.spec import RunSpec, unused

FEATURES, COHORT, STEPS, BATCH = 11, 3, 2, 4
SIZES = (400, *(20,) * 29)
KINDS = ("adaped", "cfl", "fedem", "fedpac", "fedproto", "ifca", "knn-per", "l2gd", "network-lasso", "persfl", "pooled")
"""Methods that read examples, or work, in ways that differ: passes over all of them, phases, draws, graphs."""
MODELS = {"fedbn": "mlp-ln:8"}
"""Models of the methods that ask for a part which ``mlp:8`` lacks."""
EVERYBODY = ("cfl", "pooled")
"""Methods whose rounds are of all clients."""
CALLS = (
    *("jit", "pjit", "while", "scan", "cond", "shard_map"),
    *("closed_call", "custom_jvp_call", "custom_vjp_call", "remat"),
)


@pytest.fixture(scope="module")
def skewed():
    """Thirty clients, of which one holds almost half of all examples."""
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(n, FEATURES)).astype(np.float32), rng.integers(3, size=n)) for n in SIZES]
    return jaxpfl.stack_clients(clients, test=clients, validation=[(x[:4], y[:4]) for x, y in clients])


def spec_of(method, plan=None, **parts):
    return RunSpec(
        method=jaxpfl.METHODS[method],
        cohort=None if method in EVERYBODY else COHORT,
        plan=ExecutionPlan(devices=1, **plan or {}),
        **{"model": MODELS.get(method, "mlp:8"), "local_steps": STEPS, "batch_size": BATCH} | parts,
    )


def simulate(method, federation, **plan):
    return simulation_of(spec_of(method, plan), federation)


def operations(jaxpr):
    """All operations of a program and those within it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for one in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(one, "jaxpr", one)
                if hasattr(inner, "eqns"):
                    yield from operations(inner)


@pytest.mark.parametrize("name", ["fedavg", *(pytest.param(name, marks=pytest.mark.slow) for name in KINDS)])
def test_a_device_makes_no_copy_of_whole_clients_data(skewed, name):
    largest = {}
    for eqn in operations(simulate(name, skewed).program("cuda").jaxpr):
        assert "callback" not in eqn.primitive.name
        if eqn.primitive.name not in CALLS:  # these only hand the store on
            for var in eqn.outvars:
                shape = var.aval.shape
                if len(shape) > 1 and shape[-1] == FEATURES:
                    largest[eqn.primitive.name] = max(largest.get(eqn.primitive.name, 0), math.prod(shape[:-1]))
    assert largest  # batches are read
    # Batches, and passes over all of a client's examples a chunk at a time.
    rows = len(SIZES) * max(BATCH, 8) if name in EVERYBODY else COHORT * max(BATCH, 8, 4 * skewed.train.chunk)
    assert max(largest.values()) <= rows < max(SIZES)


def test_one_gpu_draws_initial_states_by_calls_of_a_kernel(skewed, monkeypatch):
    texts = []

    def lower(function, arguments, **_):
        texts.append(jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text())
        raise KeyboardInterrupt

    monkeypatch.setattr(programs, "compiled", lower)
    for platforms, called in ((["gpu"], True), (["gpu", "gpu"], False), (["cpu"], False)):
        simulation = simulate("fedavg", skewed)
        devices = tuple(SimpleNamespace(platform=platform) for platform in platforms)
        of = simulation._programs._of
        simulation._programs._of = of._replace(placement=of.placement._replace(devices=devices))
        with pytest.raises(KeyboardInterrupt):
            simulation.init([0])
        assert ("threefry2x32_ffi" in texts.pop()) is called
        assert not jax.config.jax_threefry_gpu_kernel_lowering  # pyright: ignore[reportAttributeAccessIssue]


def test_a_program_is_traced_under_the_plan_and_precision_of_the_platform(skewed):
    found = {}
    for platform in ("cpu", "tpu"):
        program = simulate("fedavg", skewed).program(platform)
        found[platform] = {
            str(eqn.params["precision"]) for eqn in operations(program.jaxpr) if eqn.primitive.name == "dot_general"
        }
    assert found["cpu"] == {"None"}
    assert all("HIGHEST" in one for one in found["tpu"])
    assert jax.config.jax_default_matmul_precision is None  # pyright: ignore[reportAttributeAccessIssue]


SWITCHED = {
    "weighting": {"weighting": "uniform"},
    "server_optimizer": {"server_optimizer": "adam", "server_lr": 0.1},
    **{
        name: {name: value}
        for name, value in {
            "client_optimizer": "adam",
            "clip_gradients": 1.0,
            "draw": "replacement",
            "augment": "mixup",
            "lr_schedule": "cosine",
            "local_steps": STEPS + 1,
            "local_epochs": 1,
            "batch_size": BATCH + 1,
        }.items()
    },
}
"""Settings of which each is to change a method's program, or is refused, or reported as one that changes nothing."""


def test_weights_that_no_method_of_a_run_has_are_reported():
    of = [spec_of(name, **SWITCHED["weighting"]) for name in ("mr-mtl", "local", "fedavg")]
    why = "weighting = uniform has no effect: no method of the run (mr-mtl, local) weights its clients"
    assert unused(of[:2], newcomers=False) == [why]
    assert unused(of, newcomers=False) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["local", "adaped", "fedem", "knn-per", "l2gd", "network-lasso", "pooled"])
@pytest.mark.filterwarnings("ignore::jaxpfl.JaxpflWarning")
def test_a_setting_changes_the_program_or_is_reported(skewed, name):
    def program(**parts):
        return re.sub("0x[0-9a-f]+", "", str(simulation_of(spec_of(name, **parts), skewed).program("cpu").jaxpr))

    want, silent = program(), []
    assert want == program()
    for setting, parts in SWITCHED.items():
        try:
            reported = any(f"{setting} = " in one for one in unused([spec_of(name, **parts)], newcomers=False))
            changed = program(**parts) != want
        except JaxpflError:
            continue
        if changed == reported:
            silent.append(setting)
    assert not silent


PRODUCTS = {"mlp:8": (4, 8, (2, 4)), "cnn": (15, 10, (5, 10))}
"""Distinct products and convolutions of a round; all those of an evaluation; and the distinct ones of an evaluation of
FedAvg, and of methods with personal models, where the clients are together and the global model is one matrix for all.

XLA compiles each of them, and on a GPU searches for its fastest form.
"""


@pytest.mark.parametrize(
    ("model", "name"),
    [
        pytest.param(model, name, marks=() if (model, name) == ("mlp:8", "adaped") else pytest.mark.slow)
        for model in ("mlp:8", "cnn")
        for name in ("fedavg", "adaped", "ditto")
    ],
)
@pytest.mark.filterwarnings("ignore::jaxpfl.JaxpflWarning")
def test_programs_have_few_distinct_products(model, name):
    rng, shape = np.random.default_rng(0), (28, 28, 1) if model == "cnn" else (FEATURES,)
    clients = [(rng.normal(size=(n, *shape)).astype(np.float32), rng.integers(3, size=n)) for n in (40, *(20,) * 9)]
    federation = jaxpfl.stack_clients(clients, test=clients)
    of_round, scored, of_scores = PRODUCTS[model]
    for platform in ("cpu", "cuda"):
        simulation = simulation_of(spec_of(name, {"clients": "vmap", "linear": "plain"}, model=model), federation)
        programs, (state, values, inputs, rounds) = simulation._on(platform, 1)
        many, rows = programs._of.scoring.block, (values.hp, inputs)
        texts = [
            jax.jit(function).trace(*given).lower(lowering_platforms=(platform,)).as_text()
            for function, given in (
                (programs.function("start", len(clients)), (simulation._run_keys([0]), *rows)),
                (programs.function("advance", programs.execution.block), (state, values, inputs, rounds)),
                (programs.function("scores", many), (state, *rows)),
            )
        ]
        found = [re.findall(r"= (stablehlo\.(?:dot_general|convolution).*)", text) for text in texts]
        distinct = [len({re.sub(r"%\w+(#\d+)?", "", line) for line in lines}) for lines in found]
        assert distinct == [0, of_round, of_scores[name != "fedavg"]]
        # Without adaptation, a client's model is scored once: not both before and after.
        assert len(found[2]) == scored
