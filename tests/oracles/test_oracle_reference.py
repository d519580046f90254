"""The oracle's own gradients, which are written by hand, against central finite differences."""

import numpy as np
import pytest
from numpy_reference import backward, cross_entropy, distillation, forward

CLASSES, EPS = 3, 1e-6


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def numerical(f, at: np.ndarray) -> np.ndarray:
    """``(f(at + eps e_j) - f(at - eps e_j)) / (2 eps)`` for every entry j."""
    gradient = np.empty_like(at)
    for j in np.ndindex(at.shape):
        up, down = at.copy(), at.copy()
        up[j] += EPS
        down[j] -= EPS
        gradient[j] = (f(up) - f(down)) / (2 * EPS)
    return gradient


def test_cross_entropy(rng):
    logits, y = rng.normal(size=(5, CLASSES)), rng.integers(CLASSES, size=5)
    want = numerical(lambda a: cross_entropy(a, y)[0], logits)
    np.testing.assert_allclose(cross_entropy(logits, y)[1], want, atol=1e-9)


def test_distillation(rng):
    teacher, student = rng.normal(size=(2, 5, CLASSES))
    _, d_teacher, d_student = distillation(teacher, student)
    np.testing.assert_allclose(d_teacher, numerical(lambda b: distillation(b, student)[0], teacher), atol=1e-9)
    np.testing.assert_allclose(d_student, numerical(lambda a: distillation(teacher, a)[0], student), atol=1e-9)


def test_backward(rng):
    shapes = {"w1": (4, 6), "b1": (6,), "w2": (6, CLASSES), "b2": (CLASSES,)}
    params = {k: rng.normal(size=shape) for k, shape in shapes.items()}
    x, y = rng.normal(size=(5, 4)), rng.integers(CLASSES, size=5)
    got = backward(params, x, cross_entropy(forward(params, x), y)[1])
    for name in shapes:
        want = numerical(lambda w, k=name: cross_entropy(forward(params | {k: w}, x), y)[0], params[name])
        np.testing.assert_allclose(got[name], want, atol=1e-9)
