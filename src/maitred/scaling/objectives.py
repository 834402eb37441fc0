"""Objectives and limits of the scaling of one model."""

import msgspec

_UNLIMITED = 1_000_000


class ScalingObjectives(msgspec.Struct, frozen=True, kw_only=True):
    """Objectives of a model's replicas, and the limits within which their number is chosen."""

    ttft_s: float
    """Objective of the time to first token, wait included."""
    itl_s: float
    """Objective of the time between tokens."""
    min_replicas: int = 1
    """Fewest serving replicas; 0: a model without demand has none."""
    max_replicas: int
    """Most replicas that serve or are about to."""
    usd_per_hour: float = 0.0
    """Price of one replica."""
    max_usd_per_hour: float | None = None
    """Most that serving and sleeping replicas together may cost. It holds even where `min_replicas` cost more."""
    gpus_per_replica: float = 0.0
    """GPUs of one replica."""
    max_gpus: float | None = None
    """Most GPUs of serving and sleeping replicas together. It holds even where `min_replicas` have more."""
    target_utilisation: float = 0.95
    """Highest share of the capacity within the objectives that the forecast may need."""
    confidence: float = 0.9
    """Quantile of the forecast for which the objectives must hold."""
    sleeping_replicas: int = 0
    """Replicas to keep asleep for bursts, beside those that serve."""

    @property
    def most_replicas(self) -> int:
        """Most replicas by number, GPUs and price."""
        return min(self.max_replicas, self.replicas_with_gpu, self.affordable_replicas)

    @property
    def affordable_replicas(self) -> int:
        """Most replicas by price."""
        return _most(self.max_usd_per_hour, self.usd_per_hour)

    @property
    def replicas_with_gpu(self) -> int:
        """Most replicas by GPUs."""
        return _most(self.max_gpus, self.gpus_per_replica)


def _most(limit: float | None, each: float) -> int:
    """Returns how many replicas a limit allows of which each takes this much."""
    return _UNLIMITED if limit is None or each <= 0 else int(limit / each + 1e-9)
