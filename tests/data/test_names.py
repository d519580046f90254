"""Clients keep the names that they have in the data, through splits, subsets, files and training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import jaxpfl
from jaxpfl import Federation, JaxpflError
from jaxpfl.data import Source, federate, federate_unseen, scaled, scaling_of, set_apart, single, stored
from jaxpfl.support import host_memory

NAMES = np.array(["Zug", "Bern", "<b>Ulm</b>", "a\nb", "", "x" * 500])
M = len(NAMES)


def source() -> Source:
    """Six users, whose first feature is their number, with an official test set of the last two only."""
    users = np.repeat(np.arange(M), 5).astype(np.int32)
    labels, x = (np.arange(5 * M) % 2).astype(np.int32), np.stack([users, np.arange(5 * M)], axis=1).astype(np.float32)
    return Source("own", x, labels, None, None, 2, "", users)._replace(user_names=NAMES)


def check(federation: Federation) -> list[str]:
    """Assert that each client has the examples of the user with its name, and return the names."""
    assert federation.client_names is not None
    for client, name in enumerate(federation.client_names):
        own = {NAMES[int(x[0])] for x in np.asarray(federation.train.client(client).x)}
        assert " + ".join(sorted(own, key=NAMES.tolist().index)) == name
    return list(federation.client_names)


def test_names_follow_the_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = federate(source(), partition="natural")
    assert check(whole) == NAMES.tolist()
    assert sorted(check(federate(source(), partition="natural", clients=3))) != NAMES.tolist()[:3]
    assert check(whole.rows([4, 1])) == ["", "Bern"]
    trained, unseen = map(check, set_apart(whole, 2))
    assert (len(trained), len(unseen), {*trained, *unseen}) == (4, 2, {*NAMES.tolist()})
    assert check(single(whole)) == NAMES.tolist()
    assert scaled(whole, scaling_of(whole)).client_names == whole.client_names
    assert whole.pooled().client_names is None
    # A user with one example is left out, as it cannot be tested.
    few = source()
    few = few._replace(**{name: getattr(few, name)[4:] for name in ("x_train", "y_train", "users_train")})
    with pytest.warns(UserWarning, match="they are left out"):
        assert check(federate(few, partition="natural", drop_empty=True)) == NAMES.tolist()[1:]
    # Users who are only in the test set are clients of their own.
    later = np.asarray(few.users_train) >= 4
    split = {f"{name}_train": getattr(few, f"{name}_train")[~later] for name in ("x", "y", "users")}
    split |= {f"{name}_test": getattr(few, f"{name}_train")[later] for name in ("x", "y", "users")}
    assert check(federate_unseen(few._replace(**split), partition="natural")) == ["", "x" * 500]
    # In files, and back.
    monkeypatch.setattr(stored, "_EXAMPLES", 4)
    jaxpfl.save_federation(whole, tmp_path / "a", source=source())
    again = stored.open_stored(tmp_path / "a", check=True)
    assert check(again.federation) == NAMES.tolist()
    assert host_memory.is_mapped(again.federation.train.examples.x)
    assert check(again.federation.rows(np.arange(M) % 2 == 1)) == NAMES.tolist()[1::2]
    assert jaxpfl.fit("local", whole, model="linear", rounds=1).client_names == whole.client_names


def test_clients_made_by_a_partition_have_no_names() -> None:
    assert federate(source(), clients=3, classes_per_client=1).client_names is None
    with_numbers = source()._replace(user_names=np.arange(M))
    assert federate(with_numbers, partition="natural").client_names is None
    assert federate(source()._replace(user_names=None), partition="natural").client_names is None


def test_short_names_of_several_users_are_joined() -> None:
    named = source()._replace(user_names=np.array([*"abcdef"]))
    joined = federate(named, partition="natural", users_per_client=2).client_names
    assert joined is not None
    assert sorted("".join(joined).replace(" + ", "")) == [*"abcdef"]
    assert federate(source(), partition="natural", users_per_client=2).client_names is None  # one has 500 characters


def test_own_names_are_given_with_the_arrays() -> None:
    clients = [(np.full((n, 1), n), np.zeros(n, int)) for n in (2, 0, 3)]
    with pytest.warns(UserWarning, match="left out"):
        made = jaxpfl.stack_clients(clients, client_names=["a", "b", "a"], drop_empty=True)
    assert made.client_names == ("a", "a")
    with pytest.raises(JaxpflError, match="client_names must be 3 strings, got 2"):
        jaxpfl.stack_clients(clients, client_names=["a", "b"], drop_empty=True)


def test_a_folder_without_names_opens_and_a_wrong_number_of_names_is_refused(tmp_path: Path) -> None:
    jaxpfl.save_federation(federate(source(), partition="natural"), tmp_path / "a")
    file = tmp_path / "a" / "federation.json"
    manifest = json.loads(file.read_text())
    for names, words in ((["a"], "1 names for 6 clients"), (7, "not iterable")):
        file.write_text(json.dumps(manifest | {"client_names": names}))
        with pytest.raises(JaxpflError, match=words):
            jaxpfl.open_federation(tmp_path / "a")
    file.write_text(json.dumps({name: own for name, own in manifest.items() if not name.endswith("_names")}))
    assert jaxpfl.open_federation(tmp_path / "a").client_names is None
