"""Empirical Bayes in the form of scikit-learn."""

import subprocess
import sys

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from jaxpfl.estimators import ebbinomial, ebnm, ebpoisson
from jaxpfl.estimators.sklearn import EmpiricalBayes
from jaxpfl.support.errors import JaxpflError


def test_it_fits_transforms_and_is_cloned():
    rng = np.random.default_rng(0)
    X = np.column_stack([3 + rng.normal(size=8), np.full(8, 0.5)])
    made = EmpiricalBayes()
    found = made.fit_transform(X)
    np.testing.assert_array_equal(found[:, 0], ebnm(*X.T).mean)
    np.testing.assert_allclose(made.transform(X[:2]), found[:2], rtol=1e-6)  # under the prior of all
    again = clone(made.set_params(prior="normal"))
    assert again.get_params() == {"kind": "estimate", "prior": "normal", "components": None}
    assert not hasattr(again, "answer_")
    chain = make_pipeline(FunctionTransformer(), again)
    np.testing.assert_array_equal(chain.fit(X).transform(X), found)

    counts = np.column_stack([[1.0, 4, 2, 7, 3, 5, 0, 2], np.full(8, 9.0)])
    for kind, fit in (("successes", ebbinomial), ("count", ebpoisson)):
        np.testing.assert_allclose(EmpiricalBayes(kind).fit_transform(counts)[:, 0], fit(*counts.T).mean, rtol=1e-6)


def test_misuse_is_refused_and_scikit_learn_is_not_imported():
    with pytest.raises(JaxpflError, match="transform needs a fitted prior"):
        EmpiricalBayes().transform(np.ones((2, 2)))
    with pytest.raises(JaxpflError, match=r"X must have two columns, got shape \(2, 3\)"):
        EmpiricalBayes().fit(np.ones((2, 3)))
    with pytest.raises(JaxpflError, match="unknown kind 'counts': did you mean 'count'"):
        EmpiricalBayes("counts").fit(np.ones((2, 2)))
    with pytest.raises(JaxpflError, match="unknown parameter 'center'"):
        EmpiricalBayes().set_params(center=0)
    code = "import sys, jaxpfl.estimators.sklearn; assert not {'sklearn', 'pandas'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_new_clients_are_checked_and_may_be_one():
    made = EmpiricalBayes().fit(np.column_stack([[3.0, 4, 1, 2, 5, 3], np.ones(6)]))
    assert made.transform([[5.0, 0.5]]).shape == (1, 1)
    for row, said in (
        ([5.0, 0.0], "s must be finite and > 0, got 0.0 for client 1"),
        ([np.nan, 1.0], "x must be finite, got nan for client 1"),
        ([5.0, np.inf], "s must be finite and > 0, got inf for client 1"),
    ):
        with pytest.raises(JaxpflError, match=said):
            made.transform([[5.0, 1.0], row])
    hidden = np.ma.masked_array([[5.0, 1.0], [-999.0, 1.0]], mask=np.array([[False, False], [True, False]]))
    for call in (made.transform, made.fit):
        with pytest.raises(JaxpflError, match=r"X must not be masked, got a masked entry at \[1, 0\]"):
            call(hidden)

    counts = np.column_stack([[1.0, 4, 2, 7, 3, 5, 0, 2], np.full(8, 9.0)])
    for kind in ("successes", "count"):
        made = EmpiricalBayes(kind).fit(counts)
        np.testing.assert_allclose(made.transform(counts[:1]), made.transform(counts)[:1], rtol=1e-6)
        with pytest.raises(JaxpflError, match="needs at least 1 client, got 0"):
            made.transform(counts[:0])
    with pytest.raises(JaxpflError, match="successes must be at most trials, got 25 of 20 for client 0"):
        EmpiricalBayes("successes").fit(counts).transform([[25, 20]])
