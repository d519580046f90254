"""Coefficients in one subspace: steps by dense formulas, exact recovery without noise, and clients of few examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import subspace_angles

from jaxpfl.estimators.empirical_bayes import common_representation as common
from jaxpfl.estimators.empirical_bayes.random_coefficients import message
from jaxpfl.support.errors import JaxpflError

FLOOR = 1e-10


pytestmark = pytest.mark.usefixtures("x64")


def clients(m, n, d, k, *, noise=0.1, seed=0):
    """B [d, k], and X [m, n, d], y [m, n], theta [m, d]."""
    rng = np.random.default_rng(seed)
    basis = rng.normal(size=(d, k))
    theta = rng.normal(size=(m, k)) @ basis.T
    x = rng.normal(size=(m, n, d))
    y = np.einsum("ijd,id->ij", x, theta) + np.sqrt(noise) * rng.normal(size=(m, n))
    return basis, x, y, theta


sums = jax.jit(jax.vmap(message))
em, start = jax.jit(common.em), jax.jit(common.start, static_argnums=1)
alternating = jax.jit(common.alternating)
heads = jax.jit(jax.vmap(common.head, in_axes=(None, 0)))


def distance(basis, other):
    """Sine of the largest principal angle between two column spaces."""
    return np.sin(subspace_angles(np.asarray(basis), np.asarray(other))[0])


def basis_of(x, y, means, second):
    """B by the normal equations of its entries, one client after the other."""
    d, k = x.shape[2], means.shape[1]
    left, right = np.zeros((d * k, d * k)), np.zeros(d * k)
    for own, seen, w, s in zip(x, y, means, second, strict=True):
        left += np.kron(own.T @ own, s)
        right += np.kron(own.T @ seen, w)
    return np.linalg.solve(left, right).reshape(d, k)


def test_a_step_of_em_is_that_of_the_dense_formulas():
    basis, x, y, _ = clients(30, 3, 5, 2)
    means, second, evidence = [], [], 0.0
    for own, seen in zip(x, y, strict=True):
        v = own @ basis @ basis.T @ own.T + 0.1 * np.eye(3)
        gain = (own @ basis).T @ np.linalg.inv(v)
        means.append(gain @ seen)
        second.append(np.eye(2) - gain @ own @ basis + np.outer(means[-1], means[-1]))
        evidence -= (seen @ np.linalg.solve(v, seen) + np.linalg.slogdet(2 * np.pi * v)[1]) / 2
    means, second = np.array(means), np.array(second)
    new = basis_of(x, y, means, second)
    errors = [
        seen @ seen - 2 * seen @ own @ new @ w + np.trace(own @ new @ s @ new.T @ own.T)
        for own, seen, w, s in zip(x, y, means, second, strict=True)
    ]
    at = common.Representation(jnp.asarray(basis), jnp.asarray(0.1))
    of, got = heads(at, sums(x, y)), em(at, sums(x, y), FLOOR, 1)
    np.testing.assert_allclose(of.mean, means, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(of.log_evidence.sum(), evidence, rtol=1e-10)
    expanded = new @ second.mean(axis=0) @ new.T
    np.testing.assert_allclose(got.basis @ got.basis.T, expanded, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(got.noise, np.sum(errors) / y.size, rtol=1e-9)


def test_a_step_in_turns():
    _, x, y, _ = clients(30, 4, 5, 2)
    begin = np.linalg.qr(np.random.default_rng(1).normal(size=(5, 2)))[0]
    means = np.array([np.linalg.lstsq(own @ begin, seen, rcond=None)[0] for own, seen in zip(x, y, strict=True)])
    want = basis_of(x, y, means, means[:, :, None] * means[:, None, :])
    got = alternating(begin, sums(x, y), 1)
    np.testing.assert_allclose(got.T @ got, np.eye(2), atol=1e-12)
    assert distance(got, want) < 1e-9


def test_without_noise_the_subspace_is_found_exactly():
    basis, x, y, theta = clients(60, 4, 6, 2, noise=0.0)
    messages = sums(x, y)
    begin = start(messages, 2)
    assert distance(alternating(begin.basis, messages, 100), basis) < 1e-6
    found = em(begin, messages, FLOOR, 100)
    assert distance(found.basis, basis) < 1e-6
    np.testing.assert_allclose(heads(found, messages).mean @ found.basis.T, theta, atol=1e-5)


@pytest.mark.slow
def test_few_examples_and_a_client_that_arrives():
    """m = 400 clients of 3 examples, d = 10, k = 2: EM is close to the known subspace, and ahead of turns.

    EM's error is 1.06 of the known subspace's at this seed, .99 to 1.08 at seeds 1 to 4; that of turns is 3 to 1e5
    times as much, by clients whose three examples hardly tell their two numbers apart.
    """
    basis, x, y, theta = clients(401, 3, 10, 2, noise=0.3)
    messages = sums(x[:-1], y[:-1])

    def error(found):
        return ((np.asarray(found) - theta[:-1]) ** 2).sum(axis=1).mean()

    def coefficients(at):
        return heads(at, messages).mean @ at.basis.T

    known = error(coefficients(common.Representation(jnp.asarray(basis), jnp.asarray(0.3))))
    begin = start(messages, 2)
    found = em(begin, messages, FLOOR, 200)
    turns = alternating(begin.basis, messages, 200)
    of_turns = jax.vmap(lambda sent: turns @ common.least_squares_head(turns, sent))(messages)
    assert error(coefficients(found)) < 1.15 * known
    assert error(of_turns) > 1.5 * error(coefficients(found))
    arrived = jax.jit(common.head)(found, message(jnp.asarray(x[-1]), jnp.asarray(y[-1])))
    missed = ((found.basis @ arrived.mean - theta[-1]) ** 2).sum()
    assert missed < (theta[-1] ** 2).sum()


@pytest.mark.parametrize("rank", [0, 6])
def test_a_rank_that_cannot_be(rank):
    _, x, y, _ = clients(4, 3, 5, 2)
    with pytest.raises(JaxpflError, match=rf"rank must be from 1 to 5 \(the number of coefficients\), got {rank}"):
        common.start(sums(x, y), rank)
