"""The `routing` section: where requests go."""

from msgspec import Struct

from maitred.routing.auto.config import AutoModels
from maitred.routing.balance.config import BalanceConfig
from maitred.routing.pools.config import Aliases, Fallbacks, NamedTargets


class RoutingConfig(Struct, frozen=True, kw_only=True):
    """Where requests go."""

    names: NamedTargets = {}
    aliases: Aliases = {}
    fallbacks: Fallbacks = {}
    auto: AutoModels = {}
    balance: BalanceConfig = BalanceConfig()
