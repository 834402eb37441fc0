"""Prices by model."""

import pytest

from maitred.admission.config import PriceConfig
from maitred.admission.prices import FREE, PriceList, PriceTag
from maitred.core.request import Usage
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


def test_answers_from_a_cache_have_a_price_of_their_own():
    prices = PriceList(
        {
            "tiny": PriceConfig(prompt=3, cached=0.3, output=15, cache_write=4, hit=0.25),
            "hits": PriceConfig(hit=0.000001),
        }
    )
    computed, hits = prices.price_for("tiny"), prices.price_for("tiny").of_hits
    assert computed.text == "3/0.3/15 USD per million, cache writes 4/4"
    assert hits == PriceTag(Price(250_000, 250_000, 250_000, hit=250_000), "0.25 USD per million")
    assert hits.price.cost_nusd(Usage(1_000, 100, 400, cache_write_tokens=600)) == 1_100 * 250
    assert prices.price_for("hits").price.is_free
    assert prices.price_for("hits").text == ""
    assert prices.price_for("hits").of_hits.text == "1e-06 USD per million"
    assert prices.price_for("hits").of_hits.price.cost_nusd(Usage(1_000, 1)) == 2, "rounded up"
    assert PRICES.price_for("tiny").of_hits == FREE


def test_written_tokens_have_prices_of_their_own():
    prices = PriceList(
        {
            "claude": PriceConfig(prompt=3, cached=0.3, output=15, cache_write=3.75, cache_write_1h=6),
            "short": PriceConfig(prompt=3, output=15, cache_write=3.75),
            "plain": PriceConfig(prompt=3, output=15),
        }
    )
    usage = Usage(1_000, 0, 100, cache_write_tokens=500, cache_write_1h_tokens=200)
    costs = {model: prices.price_for(model).price.cost_nusd(usage) for model in ("claude", "short", "plain")}
    assert costs == {
        "claude": 400 * 3_000 + 100 * 300 + 300 * 3_750 + 200 * 6_000,
        "short": 500 * 3_000 + 500 * 3_750,
        "plain": 1_000 * 3_000,
    }
    assert prices.price_for("claude").text == "3/0.3/15 USD per million, cache writes 3.75/6"
    assert prices.price_for("short").text == "3/3/15 USD per million, cache writes 3.75/3.75"
    assert prices.price_for("plain").text == "3/3/15 USD per million"
