"""Seconds of matrix products, timed at their shapes: more of the same takes more, in proportion where it must."""

import math

import pytest

from jaxpfl.benchmarks.cost_model import products
from jaxpfl.benchmarks.cost_model.count import Product


def test_times_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    once = {Product(1, 2, 3, 4): 1e-3, Product(6, 2, 3, 4): 4e-3, Product(3, 5, 5, 5, True): 7e-3}
    monkeypatch.setattr(products, "_once", lambda product, devices: devices * once[product])
    counted = {Product(1, 2, 3, 4): 10.0}
    assert products.seconds_of(counted) == pytest.approx(1e-2)
    assert products.seconds_of(counted, clients=6, devices=2) == pytest.approx(2 * 10 * 4e-3)
    both = counted | {Product(3, 5, 5, 5, True): 2.0}
    assert products.seconds_of(both) == pytest.approx(1e-2 + 1.4e-2)
    monkeypatch.setattr(products, "DEAREST", 1)  # the others run at the rate of those that are timed
    assert products.seconds_of(both) == pytest.approx(1.4e-2 * (1 + 10 * 48 / (2 * 750)))
    assert products.seconds_of({}) == 0


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_product_is_timed(batch: int, turned: bool) -> None:
    small, large = (products._once(Product(batch, n, n, n, turned, turned), 1) for n in (8, 256))
    assert 0 < small < large / 20  # 32768 times the operations
    assert math.isfinite(large)
