"""A second replica for one request, for the time until either has begun to answer."""

from typing import TYPE_CHECKING

from maitred.dispatch.entry import Allocation, QueuedRequest
from maitred.dispatch.request import AnyEndpoint

if TYPE_CHECKING:
    from maitred.dispatch.dispatcher import Dispatcher


class HedgeAllocation:
    """What a request holds there. Made by `Seat.spare`; whoever asked for it calls `settle`, whatever happens."""

    __slots__ = ("_dispatcher", "_grip", "_ticket")

    def __init__(self, dispatcher: "Dispatcher", ticket: QueuedRequest, grip: Allocation) -> None:
        self._dispatcher = dispatcher
        self._ticket = ticket
        self._grip = grip

    @property
    def post(self) -> AnyEndpoint:
        """The replica."""
        return self._grip.station.post

    def submitted(self) -> None:
        """See `Seat.submitted`."""
        self._grip.station.credits.submitted(self._grip.hold)

    def settle(self, *, won: bool) -> None:
        """One of the two is given up: if it has won, the one that the seat had been granted, which it then has."""
        self._dispatcher.settle(self._ticket, self._grip, won=won)
