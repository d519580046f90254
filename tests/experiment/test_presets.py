"""Presets: one for every known data set, each complete, and none of another partition's options."""

from dataclasses import replace

import numpy as np
import pytest

from jaxpfl import JaxpflError
from jaxpfl.data import Source
from jaxpfl.data.partition.registry import PARTITIONS, options_of
from jaxpfl.data.sources.registry import source_names
from jaxpfl.runs.config import RunConfig, resolve
from jaxpfl.runs.data_sets import PRESETS, model_for, preset

ALWAYS = ("partition", "test_share", "local_steps", "batch_size", "rounds", "seeds")
NAMED = [name for name in source_names() if ":" not in name]
OTHERS = ["own-folder", "idx:own", "npz:own.npz", "tfds:mnist", "leaf:own", "libsvm:own"]


def test_every_named_data_set_has_a_preset():
    assert set(NAMED) == set(PRESETS)


@pytest.mark.parametrize("data", NAMED + OTHERS)
def test_complete_and_the_same_when_read_again(data: str):
    config = resolve(RunConfig(data=data))
    assert None not in {getattr(config, name) for name in ALWAYS}
    assert resolve(config) == config
    assert (config.clients is None) <= (config.partition == "natural")
    assert (config.cohort is None) == (config.clients is None)
    assert (config.model is None) == (data in OTHERS and not data.startswith("libsvm"))


@pytest.mark.parametrize("data", ["digits", "mnist-writers", "cifar100", "shakespeare", "a9a"])
@pytest.mark.parametrize("partition", list(PARTITIONS))
def test_a_partition_of_the_users_own_gets_only_its_own_options(data: str, partition: str):
    values = preset(data, partition)
    assert values["partition"] == partition
    options = {name for name in values if name.endswith("_per_client") or name == "alpha"}
    assert options <= set(options_of(partition))
    if partition != "natural":
        assert values["clients"] == 50


def test_users_are_clients_where_the_preset_says_so_and_the_user_may_say_otherwise():
    own = RunConfig(data="mnist-writers")
    assert (resolve(own).users_per_client, resolve(own).test_share) == (3, 0.12)
    given = resolve(replace(own, test_share=0.3, clients=10))
    assert (given.cohort, given.test_share) == (10, 0.3)
    assert resolve(RunConfig(data="mnist", partition="natural")).clients is None
    found = [resolve(replace(own, users_per_client=n, clients=m)).clients for n, m in ((3, None), (1, None), (1, 66))]
    assert found == [66, None, 66]


def source(x: np.ndarray, inputs: str) -> Source:
    return Source("own", x, np.zeros(len(x), np.int32), None, None, 2, "", inputs=inputs)


@pytest.mark.parametrize(
    ("shape", "inputs", "model"),
    [
        ((2, 28, 28, 1), "pixels", "cnn"),
        ((2, 16, 16), "features", "cnn"),
        ((2, 8, 8, 1), "pixels", "mlp"),
        ((2, 15, 40, 3), "pixels", "mlp"),
        ((2, 123), "features", "mlp"),
        ((2, 80), "tokens", "gru"),
    ],
)
def test_an_unknown_data_set_gets_a_model_that_takes_its_inputs(shape, inputs, model):
    assert model_for(source(np.zeros(shape, np.int32 if inputs == "tokens" else np.float32), inputs)) == model


def test_tokens_that_are_no_classes_have_no_model():
    with pytest.raises(JaxpflError, match="tokens up to 7 but only 2 classes"):
        model_for(source(np.full((2, 5), 7, np.int32), "tokens"))
