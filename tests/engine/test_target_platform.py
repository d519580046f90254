"""The program that another platform takes: its block of clients, form of convolutions and placement of data."""

import re

import flax.linen as nn
import jax
import numpy as np
import pytest

import jaxpfl
from jaxpfl import ExecutionPlan, JaxpflError
from jaxpfl.engine.build import simulation_of
from jaxpfl.engine.execution_plan import resolve
from jaxpfl.engine.spec import RunSpec


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.Conv(2, (3, 3))(x).reshape(x.shape[0], -1))


@pytest.fixture(scope="module")
def federation():
    return jaxpfl.federate(jaxpfl.load("digits"), clients=6, classes_per_client=3)


def simulate(federation, method="fedavg", model: object = "mlp:512", **plan):
    given = {"model": model, "local_steps": 2, "batch_size": 4}
    return simulation_of(
        RunSpec(method=jaxpfl.METHODS[method], plan=ExecutionPlan(**plan), num_classes=10, **given), federation
    )


def blocks(simulation, platform):
    """Sizes of the batch axes of the program's products."""
    module = simulation.export(platform).mlir_module()
    found = re.findall(r"dot_general [^\n]*batching_dims = \[0\][^\n]*\(tensor<(\d+)x", module)
    return set(map(int, found))


@pytest.mark.slow
def test_an_accelerator_runs_the_whole_cohort_at_once(federation):
    simulation = simulate(federation, devices=1)
    assert simulation.execution.block == 1
    assert blocks(simulation, "cpu") == set()
    assert blocks(simulation, "cuda") == blocks(simulation, "tpu") == {6}
    assert simulation.execution.block == 1  # this machine's plan is as it was
    assert blocks(simulate(federation, devices=1, clients="3"), "cuda") == {3}


@pytest.mark.slow
def test_one_client_at_a_time_has_plain_convolutions_there(federation):
    with_convolution = [
        "stablehlo.convolution" in simulate(federation, model=Net(), devices=1, clients=clients).export(p).mlir_module()
        for clients, p in (("map", "cpu"), ("map", "cuda"), ("vmap", "cuda"))
    ]
    assert with_convolution == [False, True, False]


def test_an_unknown_platform_is_refused(federation):
    with pytest.raises(JaxpflError, match="unknown platform 'cudda': did you mean 'cuda'"):
        simulate(federation, devices=1).export("cudda")


def test_the_plan_of_a_platform_says_why():
    given = {"cohort": 50, "num_clients": 50, "model_bytes": 10**6, "layers": True}
    here, there = (resolve(ExecutionPlan(devices=1), **given, platform=p) for p in ("cpu", "tpu"))
    assert (here.block, here.form, there.block, there.form) == (1, "products", 50, "products")
    assert "tpu is fastest with the whole cohort" in there.reasons[1]
    single = resolve(ExecutionPlan(devices=1, clients="map"), **given, platform="cuda")
    assert single.form == "plain"
    assert resolve(ExecutionPlan(convolutions="products"), **given, platform="cuda").form == "products"


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_data_lie_with_their_clients_on_several_accelerators(federation):
    simulation = simulate(federation, devices=2)
    examples = int(np.asarray(federation.train.size).sum())

    def rows_of_data(platform):
        """First axes of the images that the module's devices see, within the sharded part too."""
        return {int(n) for n in re.findall(r"tensor<(\d+)x8x8x1xf32>", simulation.export(platform).mlir_module())}

    assert max(rows_of_data("cpu")) == examples
    inside = rows_of_data("cuda")
    assert min(n for n in inside if n > 50) < examples
