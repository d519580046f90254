"""Split of a data set (`Source`) among clients by a partition; ``--split-seed`` determines the split."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import jax
import numpy as np

from jaxpfl.core.settings import COUNT, SHARE, Range, check, keywords_of, part_of, read_help, setting
from jaxpfl.core.types import Federation, Names
from jaxpfl.data import portable
from jaxpfl.data.labels import are_classes, check_finite, checked_labels
from jaxpfl.data.partition.deals import ClientClusters, Indices, draw_clusters
from jaxpfl.data.partition.registry import CLASSLESS, PartitionOptions, assign, check_options
from jaxpfl.data.sources.base import Preparation, Source, are_unseen, pooled, unseen
from jaxpfl.data.stack import Dealt, alike, labels, nonempty_clients, stack_dealt, warn_of_shared
from jaxpfl.data.standardize import check_standardizable, filled, fills_of, scaled, scaling_of
from jaxpfl.support import host_memory
from jaxpfl.support.errors import JaxpflError, warn

_LONGEST = 40
"""Largest number of characters of a name that is joined from several users' names."""
_BYTES_PER_CLIENT = 1000
"""Bytes of memory per client for the array objects that contain the client's indices, without the indices
themselves."""


class SplitPurpose(IntEnum):
    """Purpose of a random stream on the host. The values seed the streams, so they must never change."""

    PARTITION = 0
    TEST = 1
    VALIDATION = 2
    UNSEEN = 3


def split_rng(split_seed: int, purpose: SplitPurpose, *names: int) -> np.random.Generator:
    """Return the random generator for one purpose of the split, which draws the same numbers on every platform."""
    return np.random.default_rng(np.random.SeedSequence(split_seed, spawn_key=(int(purpose), *names)))


@read_help
@dataclass(frozen=True, kw_only=True)
class _Dealing:
    partition: str = setting("classes")
    """Assignment of examples to clients: iid, classes (each client holds the same number of classes; client sizes are
    log-normal if sigma is given), shards or pathological, dirichlet (class proportions drawn for each client),
    dirichlet-class (each class is divided among the clients by drawn proportions), lognormal (iid with unequal sizes),
    natural (a client is a writer or user), superclasses, or clusters (iid, and each cluster of clients has its own
    permutation of the labels)."""
    clients: int | None = setting(
        None,
        unless_given="all users, for the partition natural; otherwise required",
        range=COUNT,
        unit="clients",
    )
    """Number of clients m."""


@read_help
@dataclass(frozen=True, kw_only=True)
class Split(PartitionOptions, _Dealing):
    """Split of a data set among clients, and of each client's examples into train, validation and test."""

    test_share: float = setting(0.5, range=SHARE)
    """Share of each client's examples kept for testing, if the data set has no official test set. A client with two
    or more examples keeps at least one for training and one for testing."""
    validation_share: float = setting(0.0, range=SHARE)
    """Share of each client's training examples set apart for validation."""
    pool_test: bool = setting(False)
    """Merge the official test set into the training set; each client's examples are then split by the test share."""
    split_seed: int = setting(0, range=Range(0, 2**32 - 1))
    """Seed of the split into clients, train and test; the run seeds do not change the split."""
    drop_empty: bool = setting(False)
    """Drop clients without training examples, with a warning, instead of raising an error; with the partition
    natural, also drop clients without test examples."""
    standardize: bool = setting(False)
    """Scale each feature to mean 0 and standard deviation 1 over the training clients' training examples; a constant
    feature becomes 0. The means and deviations are not private: no epsilon covers them. Pixels are standardized when
    they are loaded, and commands always standardize tables."""


@keywords_of(Split)
def federate(source: Source, **settings: Any) -> Federation:
    """Split a data set among clients. The result depends only on these arguments, not on a run's seed.

    The partition also assigns the examples of the official test set. If there is no such set (or, for the partition
    "natural", if no test user is a training user), each client's examples are split into training and test examples.
    The two parts have class proportions as equal as the counts allow. In an ordered source (`Source.ordered`), each
    user's last examples are held out instead. If the source names persons, all examples of a person are in the same
    part, and each client's training examples are sorted by person. The partition "natural" leaves out test users who
    have no training examples, with a warning; `federate_unseen` makes clients of such users. If the source is in files,
    the clients' inputs are written to temporary files. Missing values of a table (`TableOptions.missing`) are replaced
    as in `fills_of`.

    Args:
      source: data set to split.

    Raises:
      JaxpflError: if a value is out of range; if the partition is unknown; if an option is missing or unsupported; if
        the split is impossible (for example, a split by class if labels are not classes); if a client has no training
        examples (unless ``drop_empty``); or if an input or label is invalid, for example not finite.

    Examples:
      >>> import jaxpfl
      >>> federation = jaxpfl.federate(jaxpfl.load("digits"), clients=20, classes_per_client=3)
      >>> federation.num_clients, federation.input_shape
      (20, (8, 8, 1))
    """
    given = Split(**settings)
    check(given)
    clients, split_seed, drop_empty = given.clients, given.split_seed, given.drop_empty
    test_share, validation_share = given.test_share, given.validation_share
    options = part_of(PartitionOptions, given)
    check_options(given.partition, options)
    _check_source(source)
    if given.standardize:
        check_standardizable(source)
    if given.pool_test:
        source = pooled(source)
    host_memory.check(
        _BYTES_PER_CLIENT * (clients or 1), f"the split among {clients} clients alone needs", "use fewer clients"
    )

    classes = are_classes(source.y_train)
    if not classes and given.partition not in CLASSLESS:
        raise JaxpflError(
            f"the partition {given.partition!r} splits examples by class, but {source.name} has "
            f"{'several labels per example' if source.y_train.ndim > 1 else 'real-valued labels'}: "
            f"use {', '.join(CLASSLESS)}"
        )
    if source.persons is not None and given.partition != "natural":
        raise JaxpflError(
            f"partition = {given.partition} would divide a person's rows among clients: set partition = natural, "
            "and client to the column that names the client of each row, or leave out person"
        )
    rng = split_rng(split_seed, SplitPurpose.PARTITION)
    dealt = assign(given.partition, source if classes else _single_class(source), clients, options, rng)
    train, test = dealt.train, dealt.test
    if given.partition == "natural" and source.users_test is not None:
        _warn_of_unseen(source, split=test is None and test_share > 0.0)
    x_test, y_test = source.x_test, source.y_test
    if test is None:
        x_test, y_test = source.x_train, source.y_train
        train, test = _hold_out(train, source, test_share, split_seed, SplitPurpose.TEST)
    assert y_test is not None
    train, validation = _hold_out(train, source, validation_share, split_seed, SplitPurpose.VALIDATION)
    persons = source.persons
    if persons is not None:  # renumbered, because the devices have integers of 32 bits
        persons = np.unique(persons, return_inverse=True)[1].astype(np.int32)
        train = [own[np.argsort(persons[own], kind="stable")] for own in train]
    kept, names = np.arange(len(train)), _names(source, dealt.train) if given.partition == "natural" else None
    if given.partition == "natural" and test_share > 0.0:
        # Clients without training examples are not removed here, because `stack_dealt` checks them.
        untested = np.array([len(a) > 0 and len(b) == 0 for a, b in zip(train, test, strict=True)])
        lack, remedy = "have too few examples to be tested", "give them more users"
        kept = np.flatnonzero(nonempty_clients(untested, labels(kept, names), drop_empty, lack, remedy))

    x_train, x_test = alike(source.x_train, x_test, source.name)

    def dealt_of(x: Any, y: np.ndarray, own: list[Indices]) -> Dealt:
        return Dealt(x, y, [own[client] for client in kept], None if dealt.labels is None else dealt.labels[kept])

    federation = stack_dealt(
        dealt_of(x_train, source.y_train, train)._replace(persons=persons),
        dealt_of(x_test, y_test, test),
        dealt_of(x_train, source.y_train, validation),
        kept,
        drop_empty,
        names and names.rows(kept),
    )
    if dealt.test is not None:
        warn_of_shared(federation)
    columns = source.columns
    if columns is not None:
        columns = fills_of(federation, columns)
        federation = filled(federation, columns)
    federation = federation._replace(preparation=Preparation.of(source, columns))
    return scaled(federation, scaling_of(federation)) if given.standardize else federation


@keywords_of(Split)
def federate_unseen(source: Source, **settings: Any) -> Federation:
    """Make unseen clients from the test users who have no training examples, and split each client's examples.

    In LEAF's split by user, for example, the test users differ from the training users. `jaxpfl.data.seen` returns a
    source without these test users. Clients made from that source need no test examples (``test_share=0``), and their
    ids differ from the unseen clients' ids.

    Args:
      source: data set with users.

    Raises:
      JaxpflError: as in `federate`; or if the partition is not "natural", if ``standardize`` is true (use
        `jaxpfl.data.scaled`), or if every test user has training examples.

    Examples:
      >>> from jaxpfl.data import Source, federate_unseen, seen
      >>> x, users = np.eye(4), np.array([0, 0, 1, 1])
      >>> labels = np.array([0, 1, 0, 1])
      >>> source = Source("own", x, labels, x, labels, 2, "", users_train=users, users_test=users + 1)
      >>> federate(seen(source), partition="natural", test_share=0.0).train.size
      array([2, 2], dtype=int32)
      >>> unseen = federate_unseen(source, partition="natural")
      >>> unseen.client_ids, unseen.train.size, unseen.test.size
      (array([2], dtype=int32), array([1], dtype=int32), array([1], dtype=int32))
    """
    given = Split(**settings)
    if given.partition != "natural":
        raise JaxpflError(f"federate_unseen requires partition='natural' (clients are users), got {given.partition!r}")
    if source.persons is not None:
        raise JaxpflError(f"data set {source.name!r}: the persons of unseen clients are unknown: leave out persons")
    if given.standardize:
        raise JaxpflError("standardize must be False for unseen clients: use scaled(unseen, scaling_of(trained))")
    others = federate(unseen(source), **settings)
    assert source.users_train is not None
    return others._replace(client_ids=others.client_ids + np.int32(len(np.unique(source.users_train))))


def _names(source: Source, own: list[Indices]) -> Names | None:
    """Return the name of each client, joined from its users' names.

    Return None if the names are unknown or just the numbers 0, 1, ..., or if a joined name would be too long.

    Args:
      source: data set with users.
      own: indices of the clients' training examples.
    """
    if source.user_names is None or source.users_train is None:
        return None
    known = list(map(str, source.user_names.tolist()))
    of_clients = [[known[user] for user in sorted(set(source.users_train[indices].tolist()))] for indices in own]
    names = Names(map(" + ".join, of_clients))
    long = any(len(users) > 1 and len(name) > _LONGEST for users, name in zip(of_clients, names, strict=True))
    return None if long or names == tuple(map(str, range(len(names)))) else names


def true_clusters(clients: int, clusters: int, num_classes: int, split_seed: int = 0) -> ClientClusters:
    """Return the true clusters that the partition "clusters" draws with these settings.

    The client with id i (`Federation.client_ids`) is in cluster ``member[i]``, even if it was set apart as an unseen
    client. The result includes each cluster's permutation of the labels.

    Raises:
      JaxpflError: if these settings are not valid for the partition "clusters".
    """
    return draw_clusters(clients, clusters, num_classes, split_rng(split_seed, SplitPurpose.PARTITION))


def _hold_out(
    own: list[Indices], source: Source, share: float, split_seed: int, purpose: SplitPurpose
) -> tuple[list[Indices], list[Indices]]:
    """Return the indices of the examples that each client keeps, and of the examples held out.

    The draw for a client depends only on the client's own examples.
    """
    if share == 0.0:
        return own, [indices[:0] for indices in own]
    labels = source.y_train
    of_class = labels if are_classes(labels) else np.zeros(len(labels), np.int32)
    keeps, held_out = [], []
    for client, indices in enumerate(own):
        if source.ordered:
            indices = np.sort(indices)
            users = np.zeros(len(labels), np.int32) if source.users_train is None else source.users_train
            held = hold_out(users[indices], share)
        elif source.persons is not None:  # hold out whole persons, stratified by the class of their first examples
            _, first, person = np.unique(source.persons[indices], return_index=True, return_inverse=True)
            held = hold_out(of_class[indices[first]], share, split_rng(split_seed, purpose, client))[person]
        else:
            held = hold_out(of_class[indices], share, split_rng(split_seed, purpose, client))
        keeps.append(indices[~held])
        held_out.append(indices[held])
    return keeps, held_out


def _warn_of_unseen(source: Source, split: bool) -> None:
    """Warn about test users who have no training examples.

    Args:
      source: data set with test users.
      split: whether each client's test examples are drawn from its training examples.
    """
    apart = are_unseen(source)
    if not apart.any():
        return
    assert source.users_test is not None
    users, all_users = (len(np.unique(own)) for own in (source.users_test[apart], source.users_test))
    tested = ", so each client is tested on part of its own examples" if split else ""
    warn(
        f"data set {source.name!r}: {users} of {all_users} test users have no training examples, and their "
        f"{apart.sum()} examples are left out{tested}; "
        "--unseen-clients test (federate_unseen in Python) scores these users as unseen clients"
    )


def _single_class(source: Source) -> Source:
    """Return the source with all labels set to one class, so that a partition ignores the labels."""
    y_test = None if source.y_test is None else np.zeros(len(source.y_test), np.int32)
    return source._replace(y_train=np.zeros(len(source.y_train), np.int32), y_test=y_test, num_classes=1)


def _check_source(source: Source) -> None:
    """Check a source before it is split, because errors can then give the index of an example in the user's arrays."""
    if (source.x_test is None) != (source.y_test is None):
        raise JaxpflError(f"data set {source.name!r}: give both x_test and y_test, or neither")
    for part, x, y in (("train", source.x_train, source.y_train), ("test", source.x_test, source.y_test)):
        if x is None or y is None:
            continue
        whose = f"data set {source.name!r}, {part}"
        for leaf in jax.tree.leaves(x):
            if len(leaf) != len(y):
                raise JaxpflError(f"{whose}: {len(leaf)} inputs but {len(y)} labels")
        check_finite(x, whose)
        y = checked_labels(y, whose)
        if y.shape[1:] != source.y_train.shape[1:]:
            raise JaxpflError(f"{whose}: labels have shape {y.shape[1:]}, but y_train has {source.y_train.shape[1:]}")
        if source.task != "classification":
            continue
        if not are_classes(y):
            raise JaxpflError(
                f"{whose}: labels of a classification must be integers [N], got {y.dtype} {list(y.shape)}; for other "
                "labels, set Source.task"
            )
        if len(y) and y.max() >= source.num_classes:
            raise JaxpflError(f"{whose}: labels must be from 0 to {source.num_classes - 1}")
    for part, kind, who, y in (
        ("train", "users", source.users_train, source.y_train),
        ("test", "users", source.users_test, source.y_test),
        ("train", "persons", source.persons, source.y_train),
    ):
        if who is not None and (y is None or who.shape != y.shape[:1] or not np.issubdtype(who.dtype, np.integer)):
            raise JaxpflError(f"data set {source.name!r}, {part}: {kind} must be integers, one for each example")
    if source.persons is not None and (source.y_test is not None or source.ordered):
        has = "a test set whose persons are unknown" if source.y_test is not None else "ordered examples"
        raise JaxpflError(f"data set {source.name!r}: persons cannot be kept together with {has}: leave out persons")
    if source.superclasses is not None and source.superclasses.shape != (source.num_classes,):
        raise JaxpflError(f"data set {source.name!r}: superclasses must have shape [{source.num_classes}]")


def number_held(n: int, share: float) -> int:
    """Return how many of n examples are held out: round(share * n), within bounds.

    If share > 0 and n >= 2, at least one and at most n - 1 examples are held out.
    """
    return 0 if share == 0.0 or n < 2 else min(max(int(share * n + 0.5), 1), n - 1)  # halves round up


def hold_out(groups: np.ndarray, share: float, rng: np.random.Generator | None = None) -> np.ndarray:
    """Choose the examples of one client to hold out, from all classes or users as evenly as possible.

    `number_held` gives the total number. Each group contributes floor(share * its count); the remaining examples
    come from the groups with the largest remainders.

    Args:
      groups: class or user of each of the client's examples, in their order, [n].
      share: fraction of the client's examples to hold out.
      rng: generator that draws the examples and breaks ties. By default, the last examples of each group are held out,
        and ties are broken in the order of the groups.

    Returns:
      Mask of the examples to hold out, [n] bool.
    """
    held, total = np.zeros(len(groups), bool), number_held(len(groups), share)
    if not total:
        return held
    names, counts = np.unique(groups, return_counts=True)
    order = np.arange(len(names)) if rng is None else rng.permutation(len(names))
    quotas = np.floor(share * counts).astype(int)
    remainders = share * counts - quotas
    # Because of rounding or the cap at n - 1, the total can be larger or smaller than the sum of the quotas.
    for place in order[np.argsort(-remainders[order], kind="stable")][: max(total - quotas.sum(), 0)]:
        quotas[place] += 1
    for name, quota in zip(names, quotas, strict=True):
        own = np.flatnonzero(groups == name)
        own = own[::-1] if rng is None else rng.permutation(own)
        held[own[:quota]] = True
    return held


def set_apart(federation: Federation, unseen: int, split_seed: int = 0) -> tuple[Federation, Federation]:
    """Split a federation into training clients and ``unseen`` unseen clients, which are drawn uniformly.

    Args:
      federation: stacked data of m clients.
      unseen: number of clients to set apart, at least 1 and fewer than m.
      split_seed: seed of the draw, at least 0.

    Returns:
      A pair: the federation of the training clients, and the federation of the unseen clients. Clients keep their ids
      and their order.

    Raises:
      JaxpflError: if ``unseen`` is below 1, or no training client would remain.
    """
    clients = federation.num_clients
    if not 1 <= unseen < clients:
        raise JaxpflError(f"unseen clients must be at least 1 and fewer than all {clients}, got {unseen}")
    scores = portable.uniform(split_rng(split_seed, SplitPurpose.UNSEEN), clients)
    apart = np.zeros(clients, bool)
    apart[np.argsort(scores, kind="stable")[:unseen]] = True
    return federation.rows(~apart), federation.rows(apart)
