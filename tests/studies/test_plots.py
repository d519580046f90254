"""Colours of a study's estimators."""

from jaxpfl.studies import report


def test_estimators_that_are_no_variants_share_no_colour():
    names = ["local", "printed private", "beta-binomial", "algorithm-4", "private", "private, z = 2", "local privacy"]
    assert report.color("printed private") == report.color("beta-binomial")  # in pictures of their own
    found = dict(zip(names, report._apart(names), strict=True))
    assert found["private"] == found["private, z = 2"]
    assert len(set(found.values())) == len(names) - 1
