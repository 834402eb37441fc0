"""Looks up what a model's tokens cost."""

from collections.abc import Mapping

import msgspec

from maitred.admission.config import PriceConfig
from maitred.core.usage import Price

_ANY = "*"


class PriceTag(msgspec.Struct, frozen=True):
    """A price, for counting and for reading."""

    price: Price
    text: str
    """Price as text in the ledger: ``0.5/0.05/1.5 USD per million``; empty if tokens are free."""


FREE = PriceTag(Price(), "")


class PriceList:
    """The prices of all models.

    Args:
        prices: Model -> price; ``*`` is the price of all other models.
    """

    def __init__(self, prices: Mapping[str, PriceConfig]) -> None:
        self._tags = {model: _price_tag(config) for model, config in prices.items()}
        self._other = self._tags.pop(_ANY, FREE)

    def price_for(self, model: str) -> PriceTag:
        """Returns the price of one model."""
        return self._tags.get(model, self._other)


def _price_tag(config: PriceConfig) -> PriceTag:
    price = Price.per_million_usd(config.prompt, config.cached, config.output)
    if price == FREE.price:
        return FREE
    cached = config.prompt if config.cached is None else config.cached
    return PriceTag(price, f"{config.prompt:g}/{cached:g}/{config.output:g} USD per million")
