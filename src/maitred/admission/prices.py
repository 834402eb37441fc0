"""Looks up what a model's tokens cost."""

from collections.abc import Mapping

import msgspec

from maitred.admission.config import PriceConfig
from maitred.core.usage import NANO, PRICED_TOKENS, Price, to_nano_usd

_ANY = "*"


class PriceTag(msgspec.Struct, frozen=True):
    """A price, for counting and for reading."""

    price: Price
    text: str
    """Price as text in the ledger: ``0.5/0.05/1.5 USD per million``, with ``, cache writes 0.625/1`` behind it if
    these cost more or less than other tokens; empty if tokens are free."""

    @property
    def of_hits(self) -> "PriceTag":
        """The price tag of cached answers: ``0.1 USD per million``."""
        price = self.price.of_hits
        return PriceTag(
            price, "" if price.is_free else f"{price.hit * 1_000_000 / PRICED_TOKENS / NANO:g} USD per million"
        )


FREE = PriceTag(Price(), "")


class PriceList:
    """The prices of all models.

    Args:
        prices: Model -> price; ``*`` is the price of all other models.
    """

    def __init__(self, prices: Mapping[str, PriceConfig]) -> None:
        self._tags = {model: _price_tag(config) for model, config in prices.items()}
        self._other = self._tags.pop(_ANY, FREE)
        all_prices = [tag.price for tag in (*self._tags.values(), self._other)]
        self._lowest = PriceTag(
            Price(
                prompt=min(price.max_per_prompt_token for price in all_prices),
                output=min(price.output for price in all_prices),
            ),
            "",
        )

    def price_for(self, model: str | None) -> PriceTag:
        """Returns the price of one model; None: the price below which none is."""
        return self._lowest if model is None else self._tags.get(model, self._other)


def _price_tag(config: PriceConfig) -> PriceTag:
    price = Price.per_million_usd(
        config.prompt, config.cached, config.output, config.cache_write, config.cache_write_1h, config.hit
    )
    price = msgspec.structs.replace(
        price,
        images={name: to_nano_usd(usd) for name, usd in config.images.items()},
        characters=round(config.characters * NANO * PRICED_TOKENS / 1_000_000),
        audio_minute=to_nano_usd(config.audio_minute),
    )
    if price.is_free:
        return PriceTag(price, "") if price.hit else FREE
    if not price.max_per_prompt_token and not price.output:
        return PriceTag(price, "")  # units say their price in each line of the ledger
    cached = config.prompt if config.cached is None else config.cached
    text = f"{config.prompt:g}/{cached:g}/{config.output:g} USD per million"
    if price.cache_write_surcharge or price.cache_write_1h_surcharge:
        write = config.prompt if config.cache_write is None else config.cache_write
        write_1h = write if config.cache_write_1h is None else config.cache_write_1h
        text += f", cache writes {write:g}/{write_1h:g}"
    return PriceTag(price, text)
