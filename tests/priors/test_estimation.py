"""Estimates of a prior's parameters: closed forms, fixed points of the gradient message, EM, floors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl import JaxpflError
from jaxpfl.priors import Examples, Rates, distillation, gaussian, gaussian_mixture, laplace

VALID = np.array([True, True, False, True, True, True, False, True])


def models(d: int = 3) -> np.ndarray:
    """Eight models, of which `VALID` count; the others are far off."""
    rng = np.random.default_rng(3)
    return np.where(VALID[:, None], rng.normal(size=(8, d)), 1e3)


def tree(a):
    return {"w": a[..., :2], "b": a[..., 2]}


start = jax.jit(gaussian_mixture.start, static_argnums=(0, 3))
em = jax.jit(gaussian_mixture.em, static_argnums=(3, 4))
PRIORS = {"gaussian": gaussian.prior(floor=1e-3), "laplace": laplace.prior(floor=1e-3)}


def closed_form(name: str, thetas: np.ndarray) -> tuple[np.ndarray, float]:
    if name == "gaussian":
        return thetas.mean(0), thetas.var(0).mean()
    mu = np.median(thetas, axis=0)
    return mu, np.abs(thetas - mu).mean()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", PRIORS)
def test_fit_is_the_maximum_likelihood_estimate(name):
    prior, thetas = PRIORS[name], models()
    gamma = jax.jit(prior.fit)(prior.init(tree(np.zeros(3))), tree(jnp.asarray(thetas)), jnp.asarray(VALID))
    mu, scale = closed_form(name, thetas[VALID])
    np.testing.assert_allclose(np.append(gamma[0]["w"], gamma[0]["b"]), mu, rtol=1e-12)
    np.testing.assert_allclose(gamma[1], scale, rtol=1e-12)

    @jax.jit
    def total(gamma):
        return sum(prior.penalty(gamma, tree(theta)) for theta in jnp.asarray(thetas[VALID]))

    best = total(gamma)
    for other in (gamma._replace(**{gamma._fields[1]: s * gamma[1]}) for s in (0.9, 1.1)):
        assert total(other) > best
    for shift in (-0.3, 0.3):
        assert total(gamma._replace(mu=jax.tree.map(lambda a, s=shift: a + s, gamma.mu))) > best


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("name", "tolerance"), [("gaussian", 1e-9), ("laplace", 0.02)])
def test_gradient_message_rests_at_the_maximum_likelihood_estimate(name, tolerance):
    """Many rounds of one step on each client, averaged. Laplace's sign steps leave a ripple of the rate's size."""
    prior, thetas = PRIORS[name], jnp.asarray(models()[VALID][:5])  # an odd number has one median
    descend = prior.descend

    def one_round(t, gamma):
        rates = Rates(0.5 if name == "gaussian" else 4 / (t + 20), 0.1)
        ends = jax.vmap(lambda theta: descend(rates, gamma, theta))(thetas)
        return jax.tree.map(lambda a: a.mean(axis=0), ends)

    # Of the Gaussian's message the variance is about the mean after its step: at a small last rate, the mean itself.
    gamma = jax.lax.fori_loop(0, 3000, one_round, prior.init(jnp.zeros(3)))
    last = jax.vmap(lambda theta: descend(Rates(0.0, 1.0), gamma, theta))(thetas)
    mu, scale = closed_form(name, np.asarray(thetas))
    np.testing.assert_allclose(gamma[0], mu, atol=tolerance)
    np.testing.assert_allclose(last[1].mean(), scale, rtol=tolerance)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", PRIORS)
def test_gradient_message_descends_the_penalty(name):
    """A small step is along minus the gradient of each parameter, divided by its Fisher information."""
    prior = PRIORS[name]
    gamma = prior.init(jnp.array([0.3, -0.2]))._replace(**{prior.init(0.0)._fields[1]: jnp.asarray(0.7)})
    theta, rate = jnp.array([1.3, 0.4]), 1e-6
    gradient = jax.jit(jax.grad(prior.penalty))(gamma, theta)
    # Of each entry of mu; of s2 and b over two entries: d / (2 s2^2), d / b^2.
    fisher = {"gaussian": (1 / 0.7, 1 / 0.7**2), "laplace": (1 / 0.7**2, 2 / 0.7**2)}[name]
    got = jax.jit(prior.descend)(Rates(rate, rate), gamma, theta)
    for new, old, slope, information in zip(got, gamma, gradient, fisher, strict=True):
        np.testing.assert_allclose((old - new) / rate, slope / information, rtol=1e-4)


def test_distillation_message_steps_mu_then_psi_at_the_new_mu():
    rng = np.random.default_rng(0)
    mu, theta = jnp.asarray(rng.normal(size=(2, 4, 3)))
    on = Examples(lambda logits: logits, jnp.ones(4, bool))
    prior = distillation.prior(c=5.0, floor=0.01, weight_decay=0.1)
    got = jax.jit(lambda gamma: prior.descend(Rates(0.3, 0.02), gamma, theta, on))(distillation.Shared(mu, 0.8))
    slope = jax.jit(jax.grad(lambda mu: distillation.divergence(mu, theta).mean() / 1.6))(mu)
    new = mu - 0.3 * (slope + 0.1 * mu)
    np.testing.assert_allclose(got.mu, new, rtol=1e-6)
    f = distillation.divergence(new, theta).mean()
    np.testing.assert_allclose(got.psi, 0.8 - 0.02 * distillation.scale_gradient(0.8, f, 5.0), rtol=1e-6)


@pytest.mark.parametrize("exact", [False, True])
def test_floor_of_psi(exact):
    prior = distillation.prior(floor=0.5, exact=exact)
    same = jnp.zeros((4, 3))
    on = Examples(lambda logits: logits, jnp.ones(4, bool))
    descend = jax.jit(lambda gamma: prior.descend(Rates(0.1, 100.0), gamma, same, on).psi)
    assert float(descend(distillation.Shared(same, 0.7))) == 0.5


@pytest.mark.parametrize("name", [*PRIORS, "mixture"])
def test_floors_hold_and_nobody_changes_nothing(name):
    prior = PRIORS.get(name) or gaussian_mixture.prior(2, floor=1e-3)
    gamma = prior.init(jnp.zeros(3))
    fit = jax.jit(prior.fit)
    same = fit(gamma, jnp.ones((4, 3)), jnp.ones(4, bool))
    np.testing.assert_allclose(same[-1], 1e-3, rtol=1e-6)
    if prior.descend is not None:
        at = jax.lax.fori_loop(0, 200, lambda t, g: prior.descend(Rates(1.0, 1.0), g, jnp.ones(3)), gamma)
        np.testing.assert_allclose(at[-1], 1e-3, rtol=1e-6)
    nobody = fit(gamma, jnp.full((4, 3), 7.0), jnp.zeros(4, bool))
    jax.tree.map(np.testing.assert_array_equal, nobody, gamma)


# --- the mixture ----------------------------------------------------------------------------------


def clusters(m: int, d: int, gap: float) -> tuple[np.ndarray, np.ndarray]:
    """m models about three centers of unequal shares, at unequal variances; and whose they are."""
    rng = np.random.default_rng(5)
    label = rng.choice(3, size=m, p=[0.5, 0.3, 0.2])
    centers = gap * rng.normal(size=(3, d))
    return centers[label] + np.sqrt(np.array([0.1, 0.3, 1.0])[label])[:, None] * rng.normal(size=(m, d)), label


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("floor", [1e-6, 0.5], ids=["low floor", "floor in force"])
def test_em_step_is_the_textbooks(floor):
    thetas, valid = clusters(14, 2, 0.5)[0], np.arange(14) % 7 != 3
    gamma = start(3, jnp.asarray(thetas), jnp.asarray(valid), floor)
    got = em(gamma, jnp.asarray(thetas), jnp.asarray(valid), floor, 1)
    thetas = thetas[valid]
    p, mu, s2 = map(np.asarray, gamma)
    squares = ((thetas[:, None] - mu) ** 2).sum(-1)
    r = p * (2 * np.pi * s2) ** -1.0 * np.exp(-squares / (2 * s2))  # d = 2
    r /= r.sum(1, keepdims=True)
    new = r.T @ thetas / r.sum(0)[:, None]
    np.testing.assert_allclose(got.p, r.mean(0), rtol=1e-10)
    np.testing.assert_allclose(got.mu, new, rtol=1e-10)
    squares = ((thetas[:, None] - new) ** 2).sum(-1)
    variances = (r * squares).sum(0) / r.sum(0) / 2
    np.testing.assert_allclose(got.s2, np.maximum(variances, floor), rtol=1e-10)
    assert (variances < floor).any() == (floor == 0.5)


@pytest.mark.usefixtures("x64")
def test_fit_finds_separated_clusters_from_coinciding_centers():
    thetas, label = clusters(80, 4, 6.0)
    prior = gaussian_mixture.prior(3, floor=1e-6)
    fit = jax.jit(prior.fit)
    gamma = fit(prior.init(jnp.zeros(4)), jnp.asarray(thetas), jnp.ones(80, bool))
    want = np.stack([thetas[label == c].mean(0) for c in range(3)])
    order = ((want[:, None] - np.asarray(gamma.mu)) ** 2).sum(-1).argmin(1)
    np.testing.assert_allclose(np.asarray(gamma.mu)[order], want, atol=1e-6)
    np.testing.assert_allclose(np.asarray(gamma.p)[order], np.bincount(label) / 80, atol=1e-6)
    variances = [((thetas[label == c] - want[c]) ** 2).mean() for c in range(3)]
    np.testing.assert_allclose(np.asarray(gamma.s2)[order], variances, rtol=1e-5)
    # Again from there, in another order: the same.
    again = fit(gamma, jnp.asarray(thetas[::-1]), jnp.ones(80, bool))
    np.testing.assert_allclose(again.mu, gamma.mu, rtol=1e-9)


@pytest.mark.usefixtures("x64")
def test_a_component_without_models_keeps_its_center():
    thetas = jnp.zeros((5, 2))
    gamma = gaussian_mixture.Mixture(jnp.array([0.5, 0.5]), jnp.array([[0.0, 0.0], [1e3, 0.0]]), jnp.array([0.1, 0.2]))
    got = em(gamma, thetas, jnp.ones(5, bool), 1e-3, 3)
    np.testing.assert_array_equal(got.p, [1.0, 0.0])
    np.testing.assert_array_equal(got.mu[1], gamma.mu[1])
    value, slope = jax.jit(jax.value_and_grad(gaussian_mixture.penalty, argnums=1))(got, thetas[0])
    assert np.isfinite(value)
    assert np.isfinite(slope).all()


@pytest.mark.slow
def test_large_models_in_float32():
    """A million entries: densities underflow by far, their logarithms, shares and gradients do not."""
    d = 10**6
    key = jax.random.key(0)
    thetas = jnp.where(jnp.arange(6)[:, None] < 4, 1.0, -1.0) + 0.1 * jax.random.normal(key, (6, d))
    prior = gaussian_mixture.prior(2, floor=1e-6)
    gamma = jax.jit(prior.fit)(prior.init(jnp.zeros(d)), thetas, jnp.ones(6, bool))
    np.testing.assert_allclose(jnp.sort(gamma.p), [1 / 3, 2 / 3], rtol=1e-6)
    # The spread about a mean of c models: (1 - 1/c) of theirs.
    np.testing.assert_allclose(gamma.s2[jnp.argsort(gamma.p)], [0.01 / 2, 0.01 * 3 / 4], rtol=0.01)
    value, gradient = jax.value_and_grad(prior.penalty, argnums=1)(gamma, thetas[0])
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()

    single = PRIORS["gaussian"].fit(PRIORS["gaussian"].init(jnp.zeros(d)), thetas[:4], jnp.ones(4, bool))
    np.testing.assert_allclose(single.s2, 0.01 * 3 / 4, rtol=0.01)
    want = d / 2 * np.log(2 * np.pi * float(single.s2)) + d / 2
    np.testing.assert_allclose(single_penalty(single, thetas), want, rtol=1e-4)


def single_penalty(gamma, thetas) -> float:
    return float(jnp.mean(jnp.stack([gaussian.penalty(gamma, theta) for theta in thetas[:4]])))


def test_mixture_refuses_no_component():
    with pytest.raises(JaxpflError, match="components must be at least 1, got 0"):
        gaussian_mixture.prior(0)
