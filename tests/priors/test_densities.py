"""Every penalty is minus a log density: against scipy, and its samples against that density."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

from jaxpfl import JaxpflError
from jaxpfl.priors import Examples, discrete, distillation, gaussian, gaussian_mixture, laplace

pytestmark = pytest.mark.usefixtures("x64")


def mixture(d: int) -> gaussian_mixture.Mixture:
    mu = np.linspace(-2, 3, 3 * d).reshape(3, d)
    return gaussian_mixture.Mixture(jnp.array([0.2, 0.5, 0.3]), jnp.asarray(mu), jnp.array([0.3, 0.05, 1.0]))


def cases(d: int) -> dict:
    """For d entries: a prior, its parameters, and scipy's log density."""
    mu, mix = jnp.linspace(-1, 2, d), mixture(d)

    def mixed(theta):
        parts = [
            p * stats.multivariate_normal.pdf(theta, m, s2 * np.eye(d))
            for p, m, s2 in zip(*map(np.asarray, mix), strict=True)
        ]
        return np.log(sum(parts))

    return {
        "gaussian": (
            gaussian.prior(),
            gaussian.Gaussian(mu, jnp.asarray(0.3)),
            lambda theta: stats.norm.logpdf(theta, mu, np.sqrt(0.3)).sum(),
        ),
        "laplace": (
            laplace.prior(),
            laplace.Laplace(mu, jnp.asarray(0.4)),
            lambda theta: stats.laplace.logpdf(theta, mu, 0.4).sum(),
        ),
        "mixture": (gaussian_mixture.prior(3), mix, mixed),
    }


NAMES = ("gaussian", "laplace", "mixture")


@pytest.mark.parametrize("d", [1, 7])
@pytest.mark.parametrize("name", NAMES)
def test_penalty_is_minus_scipys_log_density(name, d):
    prior, gamma, log_density = cases(d)[name]
    penalty = jax.jit(prior.penalty)
    for theta in np.random.default_rng(d).normal(size=(5, d)):
        assert float(penalty(gamma, theta)) == pytest.approx(-log_density(theta), rel=1e-12)


def test_laplace_does_not_pull_at_its_kink():
    gamma = laplace.Laplace(jnp.zeros(3), jnp.asarray(0.5))
    slope = jax.grad(laplace.penalty, argnums=1)(gamma, jnp.array([0.0, 1.0, -1.0]))
    np.testing.assert_array_equal(slope, [0.0, 2.0, -2.0])


@pytest.mark.parametrize("name", NAMES)
def test_a_tree_is_the_vector_of_its_entries(name):
    prior, gamma, _ = cases(7)[name]

    def as_tree(a):
        return {"w": a[..., :6].reshape(*a.shape[:-1], 2, 3), "b": a[..., 6]}

    theta = jnp.linspace(-2, 1, 7)
    penalty = jax.jit(prior.penalty)
    got = penalty(gamma._replace(mu=as_tree(gamma.mu)), as_tree(theta))
    assert float(got) == pytest.approx(float(penalty(gamma, theta)), rel=1e-12)
    drawn = jax.eval_shape(prior.sample, jax.random.key(0), gamma._replace(mu=as_tree(gamma.mu)))
    assert jax.tree.map(jnp.shape, drawn) == {"w": (2, 3), "b": ()}


@pytest.mark.parametrize("name", NAMES)
def test_samples_have_the_density(name):
    """Kolmogorov-Smirnov in one dimension on 20000 draws at a false-alarm rate of 1e-4; rejects a scale 20 % off."""
    prior, gamma, _ = cases(1)[name]
    sample = jax.jit(jax.vmap(lambda key: prior.sample(key, gamma)))
    draws = np.asarray(sample(jax.random.split(jax.random.key(1), 20000)))[:, 0]

    def cdf(x, scale=1.0):
        if name == "gaussian":
            return stats.norm.cdf(x, -1, scale * np.sqrt(0.3))
        if name == "laplace":
            return stats.laplace.cdf(x, -1, scale * 0.4)
        parts = zip(*map(np.asarray, gamma), strict=True)
        return sum(p * stats.norm.cdf(x, m[0], scale * np.sqrt(s2)) for p, m, s2 in parts)

    assert stats.kstest(draws, cdf).pvalue > 1e-4
    assert stats.kstest(draws, lambda x: cdf(x, 1.2)).pvalue < 1e-4


def test_discrete_shares_and_posterior():
    rng = np.random.default_rng(0)
    p, losses = np.array([0.2, 0.5, 0.3]), rng.uniform(0, 3, size=3)
    joint = p * np.exp(-losses)
    got = discrete.responsibilities(jnp.asarray(p), jnp.asarray(losses))
    np.testing.assert_allclose(got, joint / joint.sum(), rtol=1e-12)
    mu = rng.normal(size=(3, 4))
    np.testing.assert_allclose(discrete.posterior_mean(got, jnp.asarray(mu)), got @ mu, rtol=1e-12)
    # Losses of a thousand examples would underflow in exp.
    far = discrete.responsibilities(jnp.asarray(p), jnp.asarray(losses + 5000))
    np.testing.assert_allclose(far, got, rtol=1e-9)


# --- the distillation prior -----------------------------------------------------------------------


def examples(valid) -> Examples:
    """Models here are their own logits."""
    return Examples(lambda logits: logits, jnp.asarray(valid))


def divergence_of_classes(teacher, student):
    """Of a task of its own: ``KL(teacher || student)``, by example."""
    p, q = jax.nn.log_softmax(teacher), jax.nn.log_softmax(student)
    return (jnp.exp(p) * (p - q)).sum(axis=-1)


def test_distillation_surrogate():
    rng = np.random.default_rng(1)
    teacher, student = rng.normal(size=(2, 4, 3))
    p, q = (np.exp(a) / np.exp(a).sum(1, keepdims=True) for a in (teacher, student))
    valid = np.array([True, True, False, True])
    f = {"kd": (p * np.log(p / q)).sum(1), "reversed-kd": (q * np.log(q / p)).sum(1), "square": ((p - q) ** 2).sum(1)}
    for distance, values in f.items():
        for own in (None, divergence_of_classes) if distance != "square" else (None,):
            prior = distillation.prior(distance=distance, own=own)
            got = prior.penalty(distillation.Shared(teacher, 0.8), student, examples(valid))
            assert float(got) == pytest.approx(np.log(1.6) / 2 + values[valid].mean() / 1.6, rel=1e-10)


@pytest.mark.parametrize("weight", [0.0, 0.7, 30.0])
def test_exact_normaliser_of_two_classes(weight):
    p = 1 / (1 + np.exp(-0.8))

    def density(q):
        return np.exp(-weight * (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))))

    want = np.log(integrate.quad(density, 0, 1)[0])
    got = distillation.log_normalizer(jnp.asarray(weight), jnp.array([[0.8, 0.0]]))[0]
    assert float(got) == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize("weight", [0.0, 5.0])
def test_exact_normaliser_of_three_classes(weight):
    logits = np.array([0.3, -0.5, 0.9])
    p = np.exp(logits) / np.exp(logits).sum()

    def density(a, b):
        q = np.array([a, b, 1 - a - b])
        return np.exp(-weight * (p * np.log(p / np.maximum(q, 1e-300))).sum())

    want = np.log(integrate.dblquad(density, 0, 1, 0, lambda b: 1 - b, epsabs=1e-9)[0])
    got = distillation.log_normalizer(jnp.asarray(weight), jnp.asarray(logits)[None])[0]
    assert float(got) == pytest.approx(want, abs=1e-6)


def test_exact_penalty_is_the_sum_over_real_examples():
    """n examples, w = 1 / (2 psi n): the product of n densities on simplices, each with its own normaliser."""
    rng = np.random.default_rng(2)
    teacher, student = rng.normal(size=(2, 4, 3))
    valid, psi = np.array([True, False, True, True]), 0.02
    got = distillation.prior(exact=True).penalty(distillation.Shared(teacher, psi), student, examples(valid))
    weight = 1 / (2 * psi * 3)
    rows = weight * distillation.divergence(teacher, student) + distillation.log_normalizer(weight, teacher)
    assert float(got) == pytest.approx(float(rows[valid].sum()), rel=1e-12)


def test_distillation_refuses():
    with pytest.raises(JaxpflError, match="did you mean 'kd'"):
        distillation.prior(distance="kdd")
    with pytest.raises(JaxpflError, match="exact = true requires distance = kd, got square"):
        distillation.prior(distance="square", exact=True)
    with pytest.raises(JaxpflError, match="requires examples"):
        distillation.prior().penalty(distillation.Shared(0.0, 1.0), 0.0)
