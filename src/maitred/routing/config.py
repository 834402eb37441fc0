"""The `routing` section: where requests go."""

from collections.abc import Mapping

from msgspec import Struct

from maitred.routing.auto.config import AutoModels
from maitred.routing.balance.config import BalanceConfig
from maitred.routing.pools.config import (
    Aliases,
    Fallbacks,
    NamedTargets,
    PoolConfig,
    RoutesConfig,
    TargetConfig,
)
from maitred.routing.rollout.config import Rollouts


class RoutingConfig(Struct, frozen=True, kw_only=True):
    """Where requests go."""

    names: NamedTargets = {}
    aliases: Aliases = {}
    fallbacks: Fallbacks = {}
    auto: AutoModels = {}
    rollouts: Rollouts = {}
    balance: BalanceConfig = BalanceConfig()

    def table(self, pools: Mapping[str, PoolConfig]) -> RoutesConfig:
        """All names: every pool under its own, unless the configuration has another use for that, and those here."""
        own = {name: [TargetConfig(pool=name)] for name in pools}
        return RoutesConfig(
            pools=dict(pools),
            names={**own, **self.names},
            aliases=self.aliases,
            fallbacks=self.fallbacks,
            auto=self.auto,
            rollouts=self.rollouts,
        )
