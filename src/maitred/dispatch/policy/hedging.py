"""When a request that waits for its first token is sent to a second replica as well.

Of many replicas one is slow now and then, for reasons that nobody sees. A request that has waited longer than nearly
all of its kind is likely to be there, and a second copy elsewhere is likely to be sooner; sent so late, few copies are
needed (J. Dean and L. A. Barroso, "The Tail at Scale", CACM 56(2), 2013, where it is called a hedged request).

What is learnt is the time from a request's release to its first token, whoever gave it. So a replica that is always
slow moves the quantile and is not hedged against: that is the balancer's to see. A budget bounds the copies: every
small request adds a part of one, so in any number of requests there are never more than that part of them.

Pure: times are arguments.
"""

import math
from collections import deque

from maitred.core.flow import PriorityClass
from maitred.dispatch.config import HedgingConfig
from maitred.dispatch.request import DispatchRequest

_REMEMBERED = 256
_LEAST_SAMPLES = 20
"""Before so many times are known, none of them is called long."""
_MOST_SAVED = 5.0
"""Copies that can be saved up, so that a quiet hour does not pay for a burst of them."""


class HedgePolicy:
    """Hedging of one model: when a second replica is asked, and how many may be.

    Args:
        config: The settings.
        model: Its name.

    Attributes:
        on: Whether it is, for this model.
    """

    def __init__(self, config: HedgingConfig, model: str) -> None:
        self._model = model
        self.reconfigure(config)
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._saved = 0.0

    def reconfigure(self, config: HedgingConfig) -> None:
        """Goes by these settings from now on, and by the times that it has seen."""
        self._config = config
        self.on = self._model in config.models

    def is_for(self, dispatch_request: DispatchRequest) -> bool:
        """Whether it is on, and the request small and urgent enough."""
        if not self.on or dispatch_request.flow.priority is not PriorityClass.INTERACTIVE:
            return False
        return (
            dispatch_request.prompt_tokens + dispatch_request.max_tokens * dispatch_request.choices
            <= self._config.most_tokens
        )

    def on_dispatch(self) -> None:
        """Such a request was sent to a replica."""
        self._saved = min(_MOST_SAVED, self._saved + self._config.share)

    def on_answered(self, after_s: float) -> None:
        """The first token of such a request came so long after its release."""
        self._seconds.append(after_s)

    @property
    def after_s(self) -> float | None:
        """How long after its release a request is late; None: nobody knows yet."""
        if len(self._seconds) < _LEAST_SAMPLES:
            return None
        ordered = sorted(self._seconds)
        place = min(len(ordered) - 1, math.ceil(self._config.quantile * len(ordered)) - 1)
        return max(self._config.least_s, ordered[place])

    @property
    def affordable(self) -> bool:
        """Whether the budget has a copy left. To the rounding of twenty twentieths."""
        return self._saved >= 1.0 - 1e-9

    def spend(self) -> None:
        """A copy was sent."""
        self._saved -= 1.0
