"""The page of all results has those that come with the package."""

from pathlib import Path

import pytest

from jaxpfl.benchmarks.papers import results, show
from jaxpfl.benchmarks.papers.registry import EXPERIMENTS

PAGE = Path(__file__).parents[2] / "docs" / "records" / "results.md"
BEGIN, END = "<!-- jaxpfl papers show --markdown -->\n\n", "<!-- end of results -->"


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not beside the tests")
def test_the_page_has_what_the_command_prints():
    order = list(EXPERIMENTS)
    found = sorted(results.committed(), key=lambda one: order.index(one.name))
    _, _, rest = PAGE.read_text().partition(BEGIN)
    got, _, _ = rest.partition(END)
    assert got == show.markdown(found)
