"""One client's arrays in parts: methods with and without, in this process or in one that has four devices."""

import json
import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))

from problem import WHOLE, assert_close, numbers, ragged_federation, simulate
from toys import CASES

from jaxpfl import ExecutionPlan
from jaxpfl.engine import placement


def assert_same_in_parts(method, *plans, **given):
    """Three rounds of two seeds in float64, models whole and under plans that share them."""
    want, *found = (numbers(method, plan=plan, **given) for plan in (WHOLE, *plans))
    for got in found:
        assert_close(got, want, 1e-9)


def main(methods: list[str]) -> None:
    """On four devices: two groups of two with the cohort in blocks, and one group of four."""
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_disable_most_optimizations", True)
    plans = [
        ExecutionPlan(model_shards=2, clients="3", runs="vmap"),
        ExecutionPlan(model_shards=4, clients="map", runs="map"),
    ]
    first, second = methods
    assert_same_in_parts(CASES[first], *plans, model="mlp:8")
    placement._shares_memory = lambda platform: False  # as accelerators, each group with its own clients' data
    assert_same_in_parts(CASES[second], plans[0], model="mlp:8")
    resolved = [simulate(CASES["local"], ragged_federation(), plan=plan, model="mlp:8").execution for plan in plans]
    print(json.dumps([(one.devices, one.all_devices) for one in resolved]))


if __name__ == "__main__":
    main(sys.argv[1:])
