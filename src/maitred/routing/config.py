"""Settings of `routing`: which pools serve which requests."""

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
    """Settings of routing: which pools serve which requests."""

    names: NamedTargets = {}
    aliases: Aliases = {}
    fallbacks: Fallbacks = {}
    auto: AutoModels = {}
    rollouts: Rollouts = {}
    balance: BalanceConfig = BalanceConfig()

    def make_routes_config(self, pools: Mapping[str, PoolConfig]) -> RoutesConfig:
        """Returns the routes of all names.

        These are the routes of this section, and one route for each pool that has no other use.
        """
        own = {name: [TargetConfig(pool=name)] for name in pools}
        return RoutesConfig(
            pools=dict(pools),
            names={**own, **self.names},
            aliases=self.aliases,
            fallbacks=self.fallbacks,
            auto=self.auto,
            rollouts=self.rollouts,
        )
