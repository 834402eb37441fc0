"""Hedging: when a request without a first token is also sent to a second replica.

Any replica is slow now and then for unknown reasons. A request that has waited longer than nearly all of its kind is
likely to be there, and a second copy elsewhere is likely to be sooner; sent so late, few copies are needed (J. Dean and
L. A. Barroso, "The Tail at Scale", CACM 56(2), 2013).

The policy learns the time from dispatch to first token, from whichever replica it came. A replica that is always slow
shifts the quantile, so it causes no hedges; the balancer handles it. A token bucket limits the copies: every eligible
request adds a fraction of a token, and every copy takes one.

Pure: times are arguments.
"""

import math
from collections import deque

from maitred.core.flow import PriorityClass
from maitred.dispatch.config import HedgingConfig
from maitred.dispatch.request import DispatchRequest

_MAX_SAMPLES = 256
_MIN_SAMPLES = 20
"""Minimum number of samples before any request is hedged."""
_MAX_TOKENS = 5.0
"""Maximum budget, in copies, so that a quiet period cannot pay for a burst."""


class HedgePolicy:
    """Hedging policy of one model: the delay before a hedge, and the budget.

    Args:
        config: The settings.
        model: Its name.

    Attributes:
        on: Whether hedging is enabled for this model.
    """

    def __init__(self, config: HedgingConfig, model: str) -> None:
        self._model = model
        self.reconfigure(config)
        self._ttft_samples_s: deque[float] = deque(maxlen=_MAX_SAMPLES)
        self._budget = 0.0

    def reconfigure(self, config: HedgingConfig) -> None:
        """Applies new settings and keeps the learnt times."""
        self._config = config
        self.on = self._model in config.models

    def is_for(self, dispatch_request: DispatchRequest) -> bool:
        """Whether hedging is enabled and the request is small and interactive."""
        if not self.on or dispatch_request.flow.priority is not PriorityClass.INTERACTIVE:
            return False
        return (
            dispatch_request.prompt_tokens + dispatch_request.max_tokens * dispatch_request.choices
            <= self._config.most_tokens
        )

    def on_dispatch(self) -> None:
        """Adds to the budget when an eligible request is dispatched."""
        self._budget = min(_MAX_TOKENS, self._budget + self._config.share)

    def on_answered(self, after_s: float) -> None:
        """Records the seconds from dispatch to first token of an eligible request."""
        self._ttft_samples_s.append(after_s)

    @property
    def after_s(self) -> float | None:
        """Seconds after dispatch from which a request counts as late; None: too few samples."""
        if len(self._ttft_samples_s) < _MIN_SAMPLES:
            return None
        ordered = sorted(self._ttft_samples_s)
        index = min(len(ordered) - 1, math.ceil(self._config.quantile * len(ordered)) - 1)
        return max(self._config.least_s, ordered[index])

    @property
    def affordable(self) -> bool:
        """Whether the budget allows a copy. The tolerance covers rounding errors of the sum."""
        return self._budget >= 1.0 - 1e-9

    def spend(self) -> None:
        """Takes one copy from the budget."""
        self._budget -= 1.0
