"""Settings of `routing`: where requests go."""

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
    """Settings of routing: where requests go."""

    names: NamedTargets = {}
    aliases: Aliases = {}
    fallbacks: Fallbacks = {}
    auto: AutoModels = {}
    rollouts: Rollouts = {}
    balance: BalanceConfig = BalanceConfig()

    def make_routes_config(self, pools: Mapping[str, PoolConfig]) -> RoutesConfig:
        """Returns the routes of all names: those of this section, and each pool's own unless it has another use."""
        own = {name: [TargetConfig(pool=name)] for name in pools}
        return RoutesConfig(
            pools=dict(pools),
            names={**own, **self.names},
            aliases=self.aliases,
            fallbacks=self.fallbacks,
            auto=self.auto,
            rollouts=self.rollouts,
        )
