"""The `routing` section: where requests go."""

from msgspec import Struct

from maitred.routing.balance.config import BalanceConfig


class RoutingConfig(Struct, frozen=True, kw_only=True):
    """Where requests go."""

    balance: BalanceConfig = BalanceConfig()
