"""Checkpoints: damage of any bit is noticed, an older one is taken, and a disk that is full loses nothing."""

import resource
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl import JaxpflError
from jaxpfl.engine import RunState
from jaxpfl.engine.state import Counts
from jaxpfl.runs.checkpoint import Checkpoints


def state(round: int) -> RunState:
    """A state as of two runs of three clients, after some rounds."""
    return RunState(
        server=jnp.arange(8.0).reshape(2, 4) + round,
        clients=({"w": jnp.full((2, 3, 5), round, jnp.float32)},),
        counts=Counts(jnp.zeros((2, 3, 9), jnp.int32)),
        round=jnp.full(2, round, jnp.int32),
        key=jax.random.split(jax.random.key(round), 2),
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "local"
    checkpoints = Checkpoints(folder)
    for round in (2, 4):
        checkpoints.save(round, state(round), 0.5 * round)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "local")


def restored(folder: Path, most: int = 9) -> tuple[int, list[str]]:
    """The round that a run would go on from, and what it would say; asserts that the state is that of the round."""
    said: list[str] = []
    found, seconds = Checkpoints(folder).restore(state(0), most, said.append)
    round = int(found.round[0])
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(state(round)), strict=True):
        if jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        np.testing.assert_array_equal(got, want)
    assert seconds == 0.5 * round
    return round, said


def test_one_alone_stays_when_a_secret_run_ends(folder):
    """Nor does one whose writing was cut off: it has the key of the noise."""
    (folder / ".4.partial").mkdir()
    Checkpoints(folder).keep_only(4)
    assert [path.name for path in folder.iterdir()] == ["4"]


def test_the_last_one_is_restored_without_a_word(folder):
    assert restored(folder) == (4, [])
    assert restored(folder / "none") == (0, [])


def test_every_flipped_bit_is_noticed(folder):
    newest = folder / "4"
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    assert {"SHA256SUMS", "_METADATA", "manifest.ocdbt"} <= {path.name for path in files}
    rng = np.random.default_rng(0)
    for path in files:
        whole = path.read_bytes()
        for bit in rng.integers(8 * len(whole), size=16):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << (bit % 8)
            path.write_bytes(flipped)
            with pytest.raises(JaxpflError, match="cannot be used") as refused:
                Checkpoints(folder).read(4, state(0))
            assert "\n" not in str(refused.value)
        path.write_bytes(whole)
    assert restored(folder) == (4, [])


@pytest.mark.parametrize(
    "damage",
    [
        lambda newest: (newest / "SHA256SUMS").unlink(),
        lambda newest: (newest / "state" / "more").write_bytes(b""),
        lambda newest: (newest / "state" / "_METADATA").unlink(),
        lambda newest: shutil.rmtree(newest / "state"),
        lambda newest: (shutil.rmtree(newest), newest.mkdir()),
        lambda newest: (shutil.rmtree(newest), shutil.copytree(newest.with_name("2"), newest)),
    ],
)
def test_an_older_one_is_taken_in_one_line(folder, damage):
    damage(folder / "4")
    round, said = restored(folder)
    assert (round, len(said), said[0].count("\n")) == (2, 1, 0)
    assert "round 4 cannot be used" in said[0]
    assert said[0].endswith("continuing from round 2")
    # The run comes to that round again, and what it saves there is whole.
    checkpoints = Checkpoints(folder)
    checkpoints.restore(state(0), 9, said.append)
    checkpoints.save(4, state(4), 2.0)
    assert restored(folder) == (4, [])


def test_none_that_is_whole_is_an_error(folder):
    for round in ("2", "4"):
        (folder / round / "SHA256SUMS").write_text("")
    with pytest.raises(
        JaxpflError, match=r"round 4 .*; .* round 2 .* is damaged.*: delete .*local, then --resume"
    ) as e:
        restored(folder)
    assert "\n" not in str(e.value)


def test_what_is_no_checkpoint_is_passed_over(folder):
    for name in ("04", "x", "-1", "4.orbax-checkpoint-tmp", ".6.partial"):
        (folder / name).mkdir()
    (folder / "8").write_text("a file")
    assert restored(folder) == (4, [])


def test_one_beyond_the_run_is_passed_over(folder):
    assert restored(folder, most=3) == (
        2,
        ["the checkpoint of round 4 is beyond the run's 3 rounds: continuing from round 2"],
    )


def test_two_are_kept(folder):
    checkpoints = Checkpoints(folder)
    for round in (5, 6, 6):
        checkpoints.save(round, state(round), 0.5 * round)
    assert checkpoints.rounds() == [6, 5]
    assert restored(folder) == (6, [])


@pytest.mark.parametrize("size", [300, *(pytest.param(size, marks=pytest.mark.slow) for size in (40, 1000))])
def test_a_full_disk_is_one_line_and_loses_nothing(folder, size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoints = Checkpoints(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with pytest.raises(JaxpflError, match=r"cannot write the checkpoint of round 6 to .*File too large") as refused:
            checkpoints.save(6, state(6), 3.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(refused.value)
    assert sorted(path.name for path in folder.iterdir()) == ["2", "4"]
    assert restored(folder) == (4, [])
    checkpoints.save(6, state(6), 3.0)
    assert restored(folder) == (6, [])
