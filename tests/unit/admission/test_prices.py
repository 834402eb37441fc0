"""Prices by model."""

import pytest

from maitred.admission.config import PriceConfig
from maitred.admission.prices import FREE, PriceList, PriceTag
from maitred.core.usage import Price

PRICES = PriceList({"tiny": PriceConfig(prompt=0.5, cached=0.05, output=1.5), "*": PriceConfig(prompt=3, output=15)})


@pytest.mark.parametrize(
    ("model", "tag"),
    [
        ("tiny", PriceTag(Price(500_000, 50_000, 1_500_000), "0.5/0.05/1.5 USD per million")),
        ("other", PriceTag(Price(3_000_000, 3_000_000, 15_000_000), "3/3/15 USD per million")),
    ],
)
def test_prices(model, tag):
    assert PRICES.price_for(model) == tag


def test_what_has_no_price_is_free():
    assert PriceList({}).price_for("tiny") is FREE
    assert PriceList({"tiny": PriceConfig(cached=0.0)}).price_for("tiny") is FREE
