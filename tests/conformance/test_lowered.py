"""The round as an accelerator would take it, traced here: one program, no callback, no copy of the clients' data."""

import math
import re

import jax
import numpy as np
import pytest

import jaxpfl
from jaxpfl import ExecutionPlan
from jaxpfl.engine.assembly import simulation_of
from jaxpfl.engine.spec import Cohorts, RunSpec, Training, Work

FEATURES, COHORT, STEPS, BATCH = 11, 3, 2, 4
SIZES = (400, *(20,) * 29)
METHODS = ("fedavg", "adaped", "scaffold", "ditto", "fedper", "map-gaussian")
CALLS = (
    "jit",
    "pjit",
    "while",
    "scan",
    "cond",
    "shard_map",
    "closed_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat",
)


@pytest.fixture(scope="module")
def skewed():
    """Thirty clients, of which one holds almost half of all examples."""
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(n, FEATURES)).astype(np.float32), rng.integers(3, size=n)) for n in SIZES]
    return jaxpfl.stack_clients(clients, test=clients)


def simulate(method, federation, **plan):
    parts = {"training": Training(model="mlp:8"), "work": Work(local_steps=STEPS, batch_size=BATCH)}
    spec = RunSpec(
        method=jaxpfl.METHODS[method], cohorts=Cohorts(cohort=COHORT), plan=ExecutionPlan(devices=1, **plan), **parts
    )
    return simulation_of(spec, federation)


def operations(jaxpr):
    """All operations of a program and those within it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for one in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(one, "jaxpr", one)
                if hasattr(inner, "eqns"):
                    yield from operations(inner)


@pytest.mark.parametrize("name", [METHODS[0], *(pytest.param(m, marks=pytest.mark.slow) for m in METHODS[1:])])
@pytest.mark.parametrize("platform", ["cuda", pytest.param("tpu", marks=pytest.mark.slow)])
def test_a_device_takes_one_program_without_callbacks_or_copies_of_data(skewed, name, platform):
    simulation = simulate(name, skewed)
    exported = simulation.export(platform)
    assert exported.platforms == (platform,)
    called = set(re.findall(r"custom_call @(\w+)", exported.mlir_module()))
    assert not {one for one in called if "callback" in one}
    largest = {}
    for eqn in operations(simulation.program(platform).jaxpr):
        assert "callback" not in eqn.primitive.name
        if eqn.primitive.name not in CALLS:  # these only hand the store on
            for var in eqn.outvars:
                shape = var.aval.shape
                if len(shape) > 1 and shape[-1] == FEATURES:
                    largest[eqn.primitive.name] = max(largest.get(eqn.primitive.name, 0), math.prod(shape[:-1]))
    assert largest  # batches are read
    assert max(largest.values()) <= COHORT * max(BATCH, 8) < max(SIZES)


def test_the_whole_cohort_is_one_product_there_and_not_here(skewed):
    def batches(platform):
        program = simulate("fedavg", skewed, clients="auto").program(platform)
        products = [eqn for eqn in operations(program.jaxpr) if eqn.primitive.name == "dot_general"]
        return {eqn.params["dimension_numbers"][1][0] for eqn in products}, {
            eqn.invars[0].aval.shape[0] for eqn in products if eqn.params["dimension_numbers"][1][0]
        }

    axes, sizes = batches("cuda")
    assert axes == {(0,)}
    assert sizes == {COHORT}


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
