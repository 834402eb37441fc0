"""An engine that can sleep, as its queue sees it: while it sleeps it says when it would be there, so requests wait.

::

    awake --order--> draining --nothing runs--> asleep --a request waits--> waking --> awake

Whether it sleeps the engine says: it may have been another gateway that sent it to sleep, or that woke it.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from maitred.core.errors import ModelLoading
from maitred.core.replica import LoadReport, ModelCard, TokenStream
from maitred.core.request import EngineRequest
from maitred.replica.engine.client import EngineClient

_ASLEEP = "The model sleeps, and wakes for requests that can wait for it. Try again after the time in Retry-After."


class SleepableReplica:
    """Implements `maitred.core.replica.Replica`.

    Args:
        link: The engine.

    Attributes:
        draining: Whether it gets nothing new because it is to sleep.
    """

    def __init__(self, link: EngineClient) -> None:
        self.link = link
        self.draining = False
        self._notified: bool | None = None
        """What the engine was told last and has not done yet: to sleep, or not to."""

    # --- the replica ---

    def card(self) -> ModelCard:
        """See `core.ports.Replica`.

        Raises:
            ModelLoading: It sleeps.
            ReplicaUnavailable: Its engine is down.
        """
        card = self.link.card()
        if self.draining or self.link.load().asleep:
            raise ModelLoading(_ASLEEP, retry_after_s=self.link.wakes_in_s)
        return card

    @property
    def weight(self) -> float:
        """See `core.ports.Host`."""
        return self.link.weight

    def load(self) -> LoadReport:
        """See `core.ports.Host`."""
        return self.link.load()

    def unreported(self) -> int:
        """See `core.ports.Host`."""
        return self.link.unreported()

    def on_change(self, listener: Callable[[], None]) -> None:
        """See `core.ports.Host`."""
        self.link.on_change(listener)

    def generate(self, request: EngineRequest) -> AbstractAsyncContextManager[TokenStream]:
        """See `core.ports.Replica`."""
        return self.link.generate(request)

    # --- its sleep ---

    @property
    def waking(self) -> bool:
        """Whether it was told to wake, and sleeps still."""
        return self.link.asleep and self._notified is False

    @property
    def settled(self) -> bool:
        """Whether it is what it was told to be."""
        return not self.draining and self._notified is None

    def sleep(self) -> None:
        """It is to sleep once nothing runs and nobody waits.

        Raises:
            ReplicaUnavailable: Its engine is down.
        """
        self.link.card()
        if not self.link.asleep or self._notified is False:
            self.draining = True

    def wake(self) -> None:
        """It is to serve. One whose engine is down does so when that is back."""
        was_told, self.draining = self._notified is True, False
        if self.link.ready and (was_told or (self.link.asleep and self._notified is None)):
            self._notified = False
            self.link.request_sleep(asleep=False)

    def check(self, *, running: int, waiting: int) -> None:
        """Something has changed: in its queue, or with the engine. It must be told of both.

        Args:
            running: Requests of this gateway's at the engine.
            waiting: Requests in the queue.
        """
        if not self.link.ready:
            self.draining, self._notified = False, None  # an engine that comes back is awake
            return
        if self._notified is self.link.asleep:
            self._notified = None
            self.draining = self.draining and not self.link.asleep
        if waiting:
            self.wake()
        elif self.draining and not running and self._notified is None:
            self._notified = True
            self.link.request_sleep(asleep=True)
