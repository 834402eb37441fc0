"""Replica whose engine can sleep: while it sleeps, its card raises an error with the time of waking, so requests wait.

::

    awake --order--> draining --nothing runs--> asleep --a request waits--> waking --> awake

The engine itself reports whether it sleeps, since another gateway may have sent it to sleep or woken it.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from maitred.core.errors import ModelLoading
from maitred.core.replica import LoadReport, ModelCard, TokenStream
from maitred.core.request import EngineRequest
from maitred.replica.engine.client import EngineClient

_ASLEEP = "The model sleeps, and wakes for requests that can wait for it. Try again after the time in Retry-After."


class SleepableReplica:
    """Replica whose engine can sleep. Implements `maitred.core.replica.Replica`.

    Args:
        client: Client of the engine.

    Attributes:
        is_draining: Whether it gets no new requests because it is to sleep.
    """

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.is_draining = False
        self._ordered_asleep: bool | None = None
        """Order that the engine has got and not carried out yet: to sleep (True), or to wake; None: there is none."""

    # --- replica interface ---

    def card(self) -> ModelCard:
        """Returns the card of the model while its engine is awake. Implements `maitred.core.replica.Replica`.

        Raises:
            ModelLoading: The engine sleeps.
            ReplicaUnavailable: The engine is down.
        """
        card = self.client.card()
        if self.is_draining or self.client.load().asleep:
            raise ModelLoading(_ASLEEP, retry_after_s=self.client.wakes_in_s)
        return card

    @property
    def weight(self) -> float:
        """Weight of its engine. Implements `maitred.core.replica.Replica`."""
        return self.client.weight

    def load(self) -> LoadReport:
        """Returns the last load report of its engine. Implements `maitred.core.replica.Replica`."""
        return self.client.load()

    def unreported(self) -> int:
        """Returns the number of submitted requests that the last report cannot know of."""
        return self.client.unreported()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every report and change of the engine. Implements `maitred.core.replica.Replica`."""
        self.client.on_change(listener)

    def generate(self, request: EngineRequest) -> AbstractAsyncContextManager[TokenStream]:
        """Submits the request to its engine. Implements `maitred.core.replica.Replica`."""
        return self.client.generate(request)

    # --- sleep ---

    @property
    def is_waking(self) -> bool:
        """Whether the engine was told to wake, and still sleeps."""
        return self.client.is_asleep and self._ordered_asleep is False

    @property
    def is_settled(self) -> bool:
        """Whether the engine has carried out its last order."""
        return not self.is_draining and self._ordered_asleep is None

    def sleep(self) -> None:
        """Orders the engine to sleep once no request runs and none waits.

        Raises:
            ReplicaUnavailable: The engine is down.
        """
        self.client.card()
        if not self.client.is_asleep or self._ordered_asleep is False:
            self.is_draining = True

    def wake(self) -> None:
        """Orders the engine to serve. An engine that is down serves when it is back."""
        was_ordered, self.is_draining = self._ordered_asleep is True, False
        if self.client.is_ready and (was_ordered or (self.client.is_asleep and self._ordered_asleep is None)):
            self._ordered_asleep = False
            self.client.request_sleep(asleep=False)

    def check(self, *, running: int, waiting: int) -> None:
        """Carries on after a change in the replica's queue or of its engine. To be called after every such change.

        Args:
            running: Requests of this gateway that run at the engine.
            waiting: Requests in the queue.
        """
        if not self.client.is_ready:
            self.is_draining, self._ordered_asleep = False, None  # an engine that comes back is awake
            return
        if self._ordered_asleep is self.client.is_asleep:
            self._ordered_asleep = None
            self.is_draining = self.is_draining and not self.client.is_asleep
        if waiting:
            self.wake()
        elif self.is_draining and not running and self._ordered_asleep is None:
            self._ordered_asleep = True
            self.client.request_sleep(asleep=True)
