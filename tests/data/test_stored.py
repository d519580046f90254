"""Federations saved in folders: what comes back, what is refused, and that nothing half-written is taken for whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxpfl
from jaxpfl import Federation, JaxpflError
from jaxpfl.core.types import ClientData, Examples
from jaxpfl.data import Source, open_stored, stored
from jaxpfl.support import host_memory


def federation() -> Federation:
    """Ragged clients, one without test examples."""
    rng = np.random.default_rng(2)

    def some(sizes: tuple[int, ...]) -> list[Any]:
        return [(rng.normal(size=(n, 3)), rng.integers(4, size=n)) for n in sizes]

    return jaxpfl.stack_clients(some((5, 1, 9)), some((2, 0, 3)), client_ids=[7, 3, 5])


def assert_same(one: Federation, other: Federation) -> None:
    one = one._replace(preparation=one.preparation or other.preparation)  # opened, it is known to hold features
    assert jax.tree.structure(one) == jax.tree.structure(other)  # capacities and chunks are part of it
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_array_equal(a, b)


def test_it_comes_back_memory_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_EXAMPLES", 4)
    made = federation()
    whole = made._replace(train=made.train.bounded(20))
    jaxpfl.save_federation(whole, tmp_path / "a" / "b")
    found = jaxpfl.open_federation(tmp_path / "a" / "b", check=True)
    assert host_memory.is_mapped(found.train.examples.x)
    assert_same(whole, found)
    jaxpfl.save_federation(found, tmp_path / "again")
    assert_same(whole, jaxpfl.open_federation(tmp_path / "again"))
    # Clients in another order than their examples: those of the store follow them.
    order = whole._replace(train=ClientData(whole.train.examples, np.array([6, 0, 5]), np.array([9, 5, 1]), 20, 3))
    jaxpfl.save_federation(order, str(tmp_path / "order"))
    there = jaxpfl.open_federation(str(tmp_path / "order"))
    np.testing.assert_array_equal(there.train.x, order.train.x)
    np.testing.assert_array_equal(there.train.start, [0, 9, 14])


def test_inputs_of_several_arrays_and_on_devices(tmp_path: Path) -> None:
    one = {"b": np.ones((2, 3)), "a": {"c": np.arange(2)}}
    whole = jaxpfl.stack_clients([(one, [0, 1]), (jax.tree.map(lambda leaf: 2 * leaf, one), [1, 1])])
    jaxpfl.save_federation(jax.device_put(whole), tmp_path / "f")
    assert_same(whole, jaxpfl.open_federation(tmp_path / "f"))
    odd = whole._replace(train=whole.train.with_examples(x=Examples(np.ones((4, 1)), np.ones((4, 1)))))
    with pytest.raises(JaxpflError, match=r"cannot save the inputs: each must be an array, .*, got Examples"):
        jaxpfl.save_federation(odd, tmp_path / "g")
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_the_source_is_kept(tmp_path: Path) -> None:
    source = jaxpfl.load("digits")
    whole = jaxpfl.federate(source, clients=5, classes_per_client=3)
    jaxpfl.save_federation(whole, tmp_path / "f", source=source, split={"clients": 5, "partition": "classes"})
    found = open_stored(tmp_path / "f")
    assert (found.source.name, found.source.num_classes, found.source.inputs) == ("digits", 10, "pixels")
    assert (found.source.scales, found.split) == (source.scales, {"clients": 5, "partition": "classes"})
    assert_same(whole, found.federation)
    assert found.federation.preparation == whole.preparation


@pytest.mark.parametrize("task", ["binary", "ranking"])
def test_both_names_of_two_classes_and_the_persons_are_kept(task: str, tmp_path: Path) -> None:
    x, y, clients = np.eye(8, dtype=np.float32), np.array([0, 1] * 4, np.float32), np.repeat([0, 1], 4)
    source = Source("own", x, y, None, None, 1, "", users_train=clients, persons=np.arange(8), task=task)
    source = source._replace(class_names=np.array(["no", "yes"]))
    whole = jaxpfl.federate(source, partition="natural", test_share=0.5)
    jaxpfl.save_federation(whole, tmp_path / "f", source=source)
    found = open_stored(tmp_path / "f")
    assert found.federation.preparation.class_names.tolist() == ["no", "yes"]
    np.testing.assert_array_equal(found.source.persons, whole.train.persons)


def test_a_folder_that_holds_something_stays(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    jaxpfl.save_federation(federation(), tmp_path / "f")
    for place in (tmp_path / "f", tmp_path / "f" / "train-y.npy"):
        with pytest.raises(JaxpflError, match="exists: choose another folder, or delete it"):
            jaxpfl.save_federation(federation(), place)
    jaxpfl.open_federation(tmp_path / "f", check=True)


@pytest.mark.parametrize("stops", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_half_written_has_the_folders_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: BaseException
) -> None:
    write = stored._write

    def stopping(path: Path, *given: Any) -> Any:
        if path.name == "test-y.npy":
            raise stops
        return write(path, *given)

    monkeypatch.setattr(stored, "_write", stopping)
    wanted = JaxpflError if isinstance(stops, OSError) else KeyboardInterrupt
    with pytest.raises(wanted) as error:
        jaxpfl.save_federation(federation(), tmp_path / "f")
    if wanted is JaxpflError:
        assert str(error.value) == f"cannot write to {tmp_path / 'f'}: No space left on device"
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    # What a kill leaves is hidden, and gone after the next time.
    (tmp_path / ".f.partial").mkdir()
    (tmp_path / ".f.partial" / "train-y.npy").write_text("half")
    with pytest.raises(JaxpflError, match="is not a saved federation: there is no such folder"):
        jaxpfl.open_federation(tmp_path / "f")
    jaxpfl.save_federation(federation(), tmp_path / "f")
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def changed(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))


def test_damage_is_one_line(tmp_path: Path) -> None:
    jaxpfl.save_federation(federation(), tmp_path / "good")
    manifest = json.loads((tmp_path / "good" / "federation.json").read_text())

    def said(**more: Any) -> str:
        return json.dumps(manifest | more)

    entries = manifest["splits"]
    small, endless = (entries | {"train": entries["train"] | {"capacity": most}} for most in (3, float("inf")))
    cases: list[tuple[str, Any, str]] = [
        ("federation.json", Path.unlink, "is not a saved federation: it has no federation.json"),
        ("federation.json", lambda path: path.write_text("{"), "cannot read .*federation.json, which is not JSON"),
        ("federation.json", lambda path: path.write_text(said(format=2)), "has format 2, but this version reads 1"),
        ("federation.json", lambda path: path.write_text(said(splits=small)), "a capacity of 3 and chunks"),
        ("federation.json", lambda path: path.write_text(said(splits=endless)), "cannot convert float infinity"),
        ("federation.json", lambda path: path.write_text(said(classes="x")), "federation.json is damaged"),
        ("federation.json", lambda path: path.write_text(said(split={"clients": "x"})), "damaged: clients = 'x'"),
        (
            "train-x-0.npy",
            lambda path: path.write_bytes(path.read_bytes()[:-1]),
            "is damaged: it has 307 bytes, but 308",
        ),
        ("train-x-0.npy", lambda path: changed(path, 3), "train-x-0.npy is damaged: "),
        (
            "train-y.npy",
            lambda path: np.save(path, np.zeros(15, np.uint32)),
            "is damaged: its array has shape .* and type <u4",
        ),
        ("train-size.npy", lambda path: changed(path, -4), "train-size.npy is damaged: its checksum"),
        ("train-x-0.npy", lambda path: changed(path, -4), "train-x-0.npy is damaged: its checksum"),
    ]
    for name, damage, message in cases:
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        damage(tmp_path / "bad" / name)
        with pytest.raises(JaxpflError, match=message) as error:
            jaxpfl.open_federation(tmp_path / "bad", check=True)
        assert "\n" not in str(error.value)
        shutil.rmtree(tmp_path / "bad")


@pytest.mark.slow
def test_it_trains_from_files_as_from_memory(tmp_path: Path) -> None:
    whole = federation()
    jaxpfl.save_federation(whole, tmp_path / "f")
    plan = jaxpfl.ExecutionPlan(clients_in="disk", devices=1)
    given: dict[str, Any] = {"rounds": 2, "cohort": 2, "local_steps": 2, "batch_size": 3, "model": "linear"}
    one = jaxpfl.fit("fedavg", whole, **given, plan=jaxpfl.ExecutionPlan(devices=1, runs="map"))
    other = jaxpfl.fit("fedavg", jaxpfl.open_federation(tmp_path / "f"), **given, plan=plan)
    assert host_memory.is_mapped(other.simulation.federations[0].train.examples.x)
    for a, b in zip(jax.tree.leaves(one.state.server), jax.tree.leaves(other.state.server), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(one.personalized_accuracy, other.personalized_accuracy)
