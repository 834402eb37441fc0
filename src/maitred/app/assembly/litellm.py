"""Headers of LiteLLM's proxy for one configuration."""

from maitred.admission.prices import PriceList
from maitred.api.litellm.headers import LitellmHeaders
from maitred.config.tree import Config
from maitred.core.clock import Clock


def open_litellm_headers(config: Config, clock: Clock) -> LitellmHeaders | None:
    """Returns the reader and writer of LiteLLM's headers; None: they mean nothing here."""
    if not config.server.litellm_compatibility:
        return None
    single = {name: model.upstreams[0].url for name, model in config.models.items() if len(model.upstreams) == 1}
    return LitellmHeaders(PriceList(config.admission.prices), single, clock)
