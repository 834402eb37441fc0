"""Replica whose engine can sleep.

While an engine sleeps, the card of its replica raises an error with the time of waking, so requests wait. The engine
itself reports whether it sleeps, since another gateway may have sent it to sleep or woken it.
"""

from collections.abc import Callable

from maitred.core.errors import ModelLoading, ReplicaUnavailable
from maitred.core.replica import ModelCard
from maitred.replica.engine.client import EngineClient

_ASLEEP = "The model sleeps, and wakes for requests that can wait for it. Try again after the time in Retry-After."


class SleepableReplica:
    """Replica whose engine can sleep. Implements `maitred.core.replica.Replica`.

    Args:
        client: Client of the engine.

    Attributes:
        is_reserved: Whether its pool keeps it asleep.
        refusal: Returns what callers are told while the engine is down or asleep, and whether they wait; None: they do
            not wait for one that is down, and wait for as long as one that sleeps says that it takes to wake.
    """

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.is_reserved = False
        self.refusal: Callable[[], ReplicaUnavailable] | None = None
        self._ordered_asleep: bool | None = None
        """Order that the engine has got and not carried out yet: to sleep (True), or to wake; None: there is none."""
        # The rest of the replica is the client itself.
        self.load = client.load
        self.count_unreported = client.count_unreported
        self.on_change = client.on_change
        self.generate = client.generate

    # --- replica interface ---

    def card(self) -> ModelCard:
        """Returns the card of the model while its engine is awake. Implements `maitred.core.replica.Replica`.

        Raises:
            ModelLoading: The engine sleeps, or it is down and requests wait for it.
            ReplicaUnavailable: The engine is down, or its pool refuses requests for another reason.
        """
        try:
            card = self.client.card()
        except ReplicaUnavailable:
            if self.refusal is None:
                raise
            raise self.refusal() from None
        if self.load().asleep:
            if self.refusal is None:
                raise ModelLoading(_ASLEEP, retry_after_s=self.client.wakes_in_s)
            raise self.refusal()
        return card

    @property
    def weight(self) -> float:
        """Weight of its engine. Implements `maitred.core.replica.Replica`."""
        return self.client.weight

    # --- sleep ---

    @property
    def is_waking(self) -> bool:
        """Whether the engine was told to wake, and still sleeps."""
        return self.client.is_asleep and self._ordered_asleep is False

    def on_report(self) -> None:
        """Takes a report of the engine; call it for each one once an order was given."""
        if not self.client.is_ready or self._ordered_asleep is self.client.is_asleep:
            self._ordered_asleep = None  # carried out, or lost: an engine that comes back is awake

    def wake(self) -> None:
        """Orders the engine to serve. An engine that is down serves when it is back."""
        was_ordered = self._ordered_asleep is True
        if self.client.is_ready and (was_ordered or (self.client.is_asleep and self._ordered_asleep is None)):
            self._ordered_asleep = False
            self.client.request_asleep(asleep=False)

    def reserve(self, *, tells_engine: bool = True) -> None:
        """Has the engine sleep from now on, until `release`; no request may run there.

        Call it again when an engine that was down is back: it is awake then.

        Args:
            tells_engine: Whether the engine is told here; False: the owner of the engine tells it.
        """
        if tells_engine and self.client.is_ready and (not self.client.is_asleep or self._ordered_asleep is False):
            self.client.request_asleep(asleep=True)
        self.is_reserved, self._ordered_asleep = True, True

    def follow(self, *, is_reserved: bool) -> None:
        """Takes over whether the engine sleeps until it is needed, as its owner says."""
        self.is_reserved, self._ordered_asleep = is_reserved, None

    def release(self) -> None:
        """Wakes the engine, so that it serves."""
        self.is_reserved = False
        if self.client.is_ready:
            self.wake()
        else:
            self._ordered_asleep = None  # an engine that comes back is awake
