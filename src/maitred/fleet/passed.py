"""What a gateway tells the engine that it starts, on its command line."""

from msgspec import Struct

from maitred.core.token_costs import ServiceWeights
from maitred.engine.config import EngineConfig
from maitred.observe.config import LogConfig


class EngineArgs(Struct, frozen=True, kw_only=True):
    """All of it."""

    engine: EngineConfig
    service: ServiceWeights
    """What the gateway's own queue counts a token as: two fair orders that count differently undo each other."""
    log: LogConfig
    """The gateway's own, but in JSON, which it reads (see `printed`)."""
