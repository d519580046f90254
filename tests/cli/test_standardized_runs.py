"""``--standardize`` through a run, its unseen clients, resume and export; and what it means under privacy."""

import json

import numpy as np
import pytest
from command import jaxpfl

from jaxpfl import data
from jaxpfl.runs.config import RunConfig, resolve
from jaxpfl.runs.setup import load_federation, prepare
from jaxpfl.support.errors import JaxpflWarning

SMALL = ["--model", "linear", "--partition", "iid", "--clients", "6", "--cohort", "3", "--rounds", "2"]
SMALL += ["--local-steps", "2", "--batch-size", "4", "--seeds", "1", "--test-share", "0.5"]


@pytest.fixture
def archive(tmp_path):
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(120, 3)) * [1.0, 5000.0, 1.0] + [0, 1e5, 7]).astype(np.float32)
    np.savez(tmp_path / "own.npz", x_train=x, y_train=rng.integers(2, size=120))
    return f"npz:{tmp_path / 'own.npz'}"


@pytest.mark.slow
def test_runs_resumes_and_exports(capsys, archive, tmp_path, recwarn):
    flags = ["fedavg", "--data", archive, *SMALL, "--standardize", "--unseen-clients", "2"]
    first = jaxpfl(capsys, "run", *flags, "--output", tmp_path / "run")
    assert first.status == 0, first.err
    assert not [warning for warning in recwarn if "scale" in str(warning.message)]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["config"]["standardize"] is True
    without = [flag for flag in flags if flag != "--standardize"]
    refused = jaxpfl(capsys, "run", *without, "--output", tmp_path / "run", "--resume")
    assert refused.status == 2
    assert "standardize: True -> False" in refused.err
    flags[flags.index("--rounds") + 1] = "3"
    again = jaxpfl(capsys, "run", *flags, "--output", tmp_path / "run", "--resume")
    assert again.status == 0, again.err
    assert jaxpfl(capsys, "export", tmp_path / "run").status == 0
    manifest = json.loads((tmp_path / "run" / "models" / "manifest.json").read_text())
    (features,) = manifest["features"]
    assert manifest["pixels"] is None
    assert features["deviation"][1] == pytest.approx(5000, rel=0.3)


def test_unseen_clients_have_no_part_in_the_scale(archive):
    config = resolve(
        RunConfig(data=archive, partition="iid", clients=6, unseen_clients=2, standardize=True, batch_size=4)
    )
    experiment = prepare(config, ("fedavg",))
    _, whole = load_federation(config)
    trained, _ = data.set_apart(whole, 2, config.split_seed)
    np.testing.assert_allclose(experiment.scaling.mean, trained.train.x[trained.train.mask].mean(axis=0), rtol=1e-4)
    real = experiment.federation.train.x[experiment.federation.train.mask]
    np.testing.assert_allclose(real.std(axis=0), 1, rtol=1e-3)
    assert abs(experiment.unseen.train.x[experiment.unseen.train.mask]).max() < 10


def test_test_users_come_unseen(capsys, tmp_path):
    rng, users = np.random.default_rng(1), np.repeat([0, 1, 2, 3], 5)
    x = {f"x_{part}": rng.normal(size=(20, 3)) * [1, 500, 1] for part in ("train", "test")}
    place = tmp_path / "own.npz"
    np.savez(place, **x, y_train=users % 2, y_test=users % 2, users_train=users, users_test=users + 2)
    flags = ["--data", f"npz:{place}", "--partition", "natural", "--test-share", "0.4", "--unseen-clients", "test"]
    described = jaxpfl(capsys, "data", "describe", *flags, "--json").json
    assert described["examples"] == {"train": 20, "validation": 0, "test": 10}
    assert described["unseen"] == {"clients": 2, "examples": {"train": 6, "validation": 0, "test": 4}}
    assert described["unused_examples"] == 0
    config = RunConfig(
        data=flags[1], partition="natural", test_share=0.4, unseen_clients="test", standardize=True, batch_size=4
    )
    with pytest.warns(JaxpflWarning, match=r"2 of 4 clients have no test examples \(namely 0, 1\): scores cover only"):
        experiment = prepare(resolve(config), ("local",))
    assert experiment.unseen.client_ids.tolist() == [4, 5]
    np.testing.assert_allclose(experiment.scaling.mean, x["x_train"].mean(axis=0), rtol=1e-4, atol=1e-6)
    for message, *action in (
        ("as a saved federation has no test users, got test", "convert", "--output", tmp_path / "made"),
        ("unseen_clients = test requires partition = natural and no pool_test, got pool", "describe", "--pool-test"),
    ):
        assert message in jaxpfl(capsys, "data", *action, *flags).err


def test_what_it_costs_a_private_run_is_said(capsys, archive, tmp_path):
    private = ["--privacy.noise-multiplier", "1", "--privacy.delta", "1e-3"]
    flags = ["run", "fedavg", "--data", archive, *SMALL, "--standardize", *private, "--output", tmp_path / "run"]
    result = jaxpfl(capsys, *flags, "--strict")
    assert result.status == 2
    assert "the privacy claim does not cover them" in result.err
