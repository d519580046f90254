"""Compressed FedAvg with error feedback, in plain NumPy and float64: what is sent, what is kept, and in how many bits.

``p = change + e``, ``mu <- mu + sum n_i C(p_i) / sum n_i``, ``e <- p - C(p)``. The random bits are drawn by their
documented keys, everything else is written down again.
"""

import sys
from pathlib import Path

import jax
import numpy as np
import oracle
import pytest
from numpy_reference import average, decay, flat, sgd, subtract, unflat
from oracle import IDS, NEWCOMERS, ROUNDS, SEED, SETTINGS, SGD, SIZES, STEPS, M, Setting, assert_same, client_row

from jaxpfl.core.participation import Availability
from jaxpfl.core.protocol import ALL_STEPS
from jaxpfl.core.randomness import Purpose, stream

sys.path.insert(0, str(Path(__file__).parents[1] / "compression"))

import messages
from tv_reference import dynamic_programme

D = 43


def numbers(round: int, i: int) -> np.ndarray:
    """The uniform numbers by which client i rounds."""
    key = jax.random.fold_in(stream(jax.random.key(SEED), Purpose.LOCAL_WORK, round, IDS[i]), ALL_STEPS - 1)
    return np.asarray(jax.random.uniform(jax.random.fold_in(key, 0), (D,), float))


def by_qsgd(x, u, round, s):
    norm = np.linalg.norm(x)
    z = s * np.abs(x) / norm
    levels = np.sign(x) * (np.floor(z) + (u < z - np.floor(z)))
    return norm / s * levels, len(messages.encode_qsgd(np.float32(norm), levels))


def by_fed_back_qsgd(x, u, round):
    value, bits = by_qsgd(x, u, round, 1)
    return value / (1 + np.sqrt(D)), bits


def by_uniform(x, u, round):
    top, most = 7, np.abs(x).max()
    z = (x + most) * top / (2 * most)
    return (np.floor(z) + (u < z - np.floor(z))) * 2 * most / top - most, 32 + 3 * D


def by_sign(x, u, round):
    return np.abs(x).mean() * np.where(x < 0, -1, 1), 32 + D


def by_top_k(x, u, round):
    value = np.zeros(D)
    places = np.argsort(-np.abs(x), kind="stable")[:4]
    value[places] = x[places]
    gaps = np.diff(np.sort(places), prepend=-1)
    assert len(messages.encode_top_k(value)) == 4 * 32 + len(messages.encode_elias(np.array([5, *gaps])))
    return value, len(messages.encode_top_k(value))


def by_tv(x, u, round):
    value = dynamic_programme(x, 0.05 / np.sqrt(round + 1))
    # The updates' runs are found with a tolerance; numbers that single precision cannot tell apart are one.
    return value, len(messages.encode_runs(np.float32(np.round(value, 12))))


CASES = {
    "lossless": (lambda x, u, round: (x, 64 * D), False),
    "qsgd:levels=2": (lambda x, u, round: by_qsgd(x, u, round, 2), False),
    "qsgd:levels=1,feedback=true": (by_fed_back_qsgd, True),
    "uniform:bits=3": (by_uniform, False),
    "sign": (by_sign, True),
    "top-k:share=0.1": (by_top_k, True),
    "top-k:share=0.1,feedback=false": (by_top_k, False),
    "tv:gamma=0.05": (by_tv, True),
    "tv:gamma=0.05,decay=false,feedback=false": (lambda x, u, round: by_tv(x, u, 0), False),
}
"""Compressor -> (its reference, whether there is error feedback)."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_fedavg(name):
    (reference, feeds), cohort = CASES[name], SETTINGS["reliable"].cohort
    got = oracle.run_method("fedavg", SGD, cohort=cohort, compress=name)
    mu, memory, data = got.states[0].server, np.zeros((M, D)), oracle.train_data()
    bits = np.zeros((ROUNDS, M), int)
    for r, drawn in enumerate(oracle.world(Setting(cohort, 100)).cohorts):
        sent = []
        for i in drawn:
            w, _ = sgd(mu, [data[i]] * STEPS, SGD["lr"] * decay(SGD, r, STEPS), SGD["weight_decay"])
            wanted = flat(subtract(w, mu)) + memory[i]
            value, bits[r, i] = reference(wanted, numbers(r, i), r)
            memory[i] = wanted - value if feeds else 0
            sent.append(unflat(value, mu))
        mu = average(mu, sent, [SIZES[i] for i in drawn])
        state = got.states[r + 1]
        assert_same(state.server, mu)
        if feeds:
            assert_same(state.clients[0].memory, [memory])
        else:
            assert state.clients[0].memory == ()
        np.testing.assert_array_equal(state.counts.upload_bits, bits[: r + 1].sum(axis=0))
    np.testing.assert_array_equal(got.history["upload_bits"], bits.sum(axis=1))
    assert (bits > 0).sum() == 3 * ROUNDS


@pytest.mark.slow
def test_lost_uploads_failed_clients_and_who_is_left_out():
    """A client whose upload is lost keeps the memory that it made; one that fails keeps the memory that it had, and
    neither counts."""
    given, bad, train = Availability(dropout=0.4), 1, oracle.train_data()
    problem = oracle.spoiled(bad)
    got = oracle.run_method("fedavg", SGD, problem=problem, engine={"availability": given}, compress="sign")
    mu, memory, bits, lost_so_far = got.states[0].server, np.zeros((M, D)), np.zeros(M, int), 0
    for r in range(ROUNDS):
        heard, sent = [], []
        for i in (i for i in range(M) if i != bad):
            w, _ = sgd(mu, [train[i]] * STEPS, SGD["lr"] * decay(SGD, r, STEPS), SGD["weight_decay"])
            wanted = flat(subtract(w, mu)) + memory[i]
            value, length = by_sign(wanted, None, r)
            memory[i] = wanted - value
            if given.drops_out(jax.random.key(SEED), r, IDS[i]):
                lost_so_far += 1
                continue
            heard.append(i)
            sent.append(unflat(value, mu))
            bits[i] += length
        mu = average(mu, sent, [SIZES[i] for i in heard])
        state = got.states[r + 1]
        assert_same(state.server, mu)
        assert_same(state.clients[0].memory, [memory])
        np.testing.assert_array_equal(state.counts.upload_bits, bits)
    assert lost_so_far
    assert got.states[-1].diverged.tolist() == [ROUNDS if i == bad else 0 for i in range(M)]
    assert np.all(memory[bad] == 0)


@pytest.mark.slow
def test_each_cluster_has_a_memory_of_its_own():
    """IFCA: a client sends the part of its cluster, and what it keeps of the other waits."""
    hyper = {"lr": 0.4, "weight_decay": 0.0}
    got = oracle.run_method("ifca", hyper, compress="top-k:share=0.1")
    plain = oracle.run_method("ifca", hyper, rounds=2, compress="lossless")
    found = [one.simulation.clusters(one.state) for one in (plain, oracle.run_method("ifca", hyper, rounds=2))]
    np.testing.assert_array_equal(*found)  # clients choose their cluster as they do without a code
    # In the first round nothing is remembered yet: what both runs would send is the same, so is who chose what.
    for i in range(M):
        (memory,) = client_row(got.states[1].clients[0], i).memory
        chosen = [bool(np.any(part)) for part in memory]
        assert sum(chosen) == 1
        assert (memory[chosen.index(True)] != 0).sum() == D - 4
    assert plain.states[1].counts.upload_bits.tolist() == [64 * D] * M
    for before, after in zip(got.states, got.states[1:], strict=False):
        (then,), (now,) = before.clients[0].memory, after.clients[0].memory
        assert ((then == now).all(axis=2).sum(axis=1) == 1).all()


@pytest.mark.slow
def test_unseen_clients_start_with_an_empty_memory_and_adapt():
    """Their uploads are discarded, so without a state of the method's own they are served as in a plain run."""
    engine, found = {"unseen": oracle.classification_problem(*NEWCOMERS), "adapt_rounds": 2}, []
    for compress in ("sign", "lossless"):
        made = oracle.simulation("fedavg-ft", SGD, engine=engine, compress=compress)
        found.append(made.evaluate_unseen(made.init([SEED])))
    jax.tree.map(np.testing.assert_array_equal, *found)
