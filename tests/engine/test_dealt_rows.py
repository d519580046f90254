"""Rows of clients that are dealt to devices by their examples, and back."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.data import stack
from jaxpfl.engine.cohort import Group, gather, make_groups
from jaxpfl.engine.round import _rows_where as rows_where
from jaxpfl.engine.state import _map_blocks
from jaxpfl.support.errors import JaxpflError

SIZES = np.array([[40, 4], [3, 1], [5, 2], [2, 2], [30, 3], [1, 1], [8, 1]])


def whole(devices: int, sizes: np.ndarray = SIZES) -> Group:
    m = len(sizes)
    return Group(np.arange(m), -(-m // devices) * devices, m, True).dealt(sizes, devices)


@pytest.mark.parametrize("devices", [2, 3])
def test_rows_there_and_back(devices):
    group = whole(devices)
    share = group.rows // devices
    for device in range(devices):  # nobody's rows are the last of each device
        own = np.sort(group.places[group.places // share == device])
        np.testing.assert_array_equal(own, device * share + np.arange(len(own)))

    rows = jnp.array([1, 4, 6, 7, 7])  # three clients, two empty slots
    found = np.asarray(group.cohort(rows))
    np.testing.assert_array_equal(found, np.append(np.sort(group.places[[1, 4, 6]]), [group.rows] * 2))
    np.testing.assert_array_equal(np.sort(group.clients(jnp.asarray(found))), rows)

    names = jnp.arange(7) * 10
    taken = group.take(names)
    np.testing.assert_array_equal(group.members_of(taken), names)
    np.testing.assert_array_equal(taken[group.places[3]], 30)
    np.testing.assert_array_equal(gather([group.restore_order(taken[group.every()])], (group,)), names)
    np.testing.assert_array_equal(group.take_every(taken), taken[group.every()])

    there, back = group.resized(whole=True), group.resized(whole=False)
    np.testing.assert_array_equal(np.asarray(names)[there][back], names)
    np.testing.assert_array_equal(np.asarray(names)[there][group.places], names)


def test_clients_of_two_groups_keep_their_places():
    members = np.array([0, 2, 3, 4, 6]), np.array([1, 5])
    first, second = (Group(own, -(-len(own) // 2) * 2, 7, False).dealt(SIZES[own] * [[1, 0]], 2) for own in members)
    assert (first.places is not None, second.places) == (True, None)
    names = jnp.arange(7) * 10
    found = gather([g.restore_order(g.take(names)[g.every()]) for g in (first, second)], (first, second))
    np.testing.assert_array_equal(found, names)
    changed = first.put(second.put(names, second.take(names) + 1), first.take(names) + 2)
    np.testing.assert_array_equal(changed, names + np.where(np.isin(np.arange(7), members[0]), 2, 1))


@pytest.mark.parametrize("numbers", [[0, 2, 1], [0, -1, 1], [0, 1]])
def test_groups_that_do_not_exist_are_refused(numbers):
    algorithm: Any = SimpleNamespace(clients=(None, None), group_of=lambda ids, count: np.array(numbers))
    with pytest.raises(JaxpflError, match="group_of must give each of 3 clients a group from 0 to 1"):
        make_groups(algorithm, np.arange(3), 1)


def test_nothing_moves_where_nothing_is_saved():
    """Equal clients, also of a number that the devices do not divide, and one client that is most of the examples."""
    assert whole(2, np.full((8, 2), 5)).places is None
    assert whole(4, np.full((10, 2), 5)).places is None
    assert whole(2, np.array([[9], [9], [1], [1]])).places is not None
    assert whole(4, np.array([[9], [1], [1], [1]])).places is None


def test_shares_hold_about_as_many_examples():
    """Sizes of a heavy tail: within a hundredth of the mean wherever no client is more than a share."""
    sizes = np.random.default_rng(0).lognormal(3, 2, (1000, 2)).astype(int) + 1
    for number in (2, 4, 8):
        room = [1000 // number] * number
        dealt = stack.even_shares(sizes[:, :1], room)
        assert [len(own) for own in dealt] == room
        np.testing.assert_array_equal(np.sort(np.concatenate(dealt)), np.arange(1000))
        largest = max(sizes[:, 0].max() * number / sizes[:, 0].sum(), 1)
        assert stack.examples_held(sizes[:, :1], dealt) <= 1.01 * largest * sizes[:, 0].sum()
        both = stack.even_shares(sizes, room)  # two kinds of examples that have nothing to do with each other
        in_order = stack.examples_held(sizes, np.split(np.arange(1000), number))
        assert stack.examples_held(sizes, both) < in_order


def test_a_stack_of_all_is_padded_behind_the_last_client():
    group = Group(np.arange(3), 4, 3, True)  # of two devices
    for shape in ((3,), (3, 2), (3, 2, 2)):
        leaf = np.arange(np.prod(shape)).reshape(shape)
        taken = np.asarray(group.take(jnp.asarray(leaf)))
        assert taken.shape == (4, *shape[1:])
        np.testing.assert_array_equal(taken[:3], leaf)
        assert not taken[3:].any()


def test_rows_of_those_that_meet_a_condition():
    condition = jnp.array([True, False, True, True, False])
    every = Group(np.arange(5), 5, 5, True)
    assert rows_where(condition, every).tolist() == [0, 2, 3, 5, 5]
    some = Group(np.array([1, 2, 4]), 4, 5, False)
    assert rows_where(jnp.array([True, False, True, True]), some).tolist() == [0, 2, 3]


@pytest.mark.parametrize("block", [2, 3, 7])
def test_states_that_are_made_in_blocks_are_those_made_at_once(block):
    every = jax.vmap(lambda name, rows: {"own": 10 * name, "all": rows.sum()})
    given = jnp.arange(7), jnp.arange(14.0).reshape(7, 2)
    jax.tree.map(np.testing.assert_array_equal, _map_blocks(every, given, block), every(*given))
