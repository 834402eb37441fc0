"""Shutdown of the gateway: the time from a signal until no request is left.

The first SIGTERM or SIGINT starts the drain: new requests are refused, and running responses may finish within the
grace period. The second signal ends all remaining requests at once.
"""

import asyncio
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from maitred.api.in_flight import InFlightLimiter

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Shutdown:
    """Handler of signals that shuts the gateway down.

    Args:
        in_flight: The limiter that the first signal closes; the second signal cancels its requests.
        grace_s: Time that running responses get between the two.
    """

    def __init__(self, in_flight: InFlightLimiter, grace_s: float) -> None:
        self._in_flight = in_flight
        self._grace_s = grace_s
        self._requested = asyncio.Event()
        self._forced = asyncio.Event()

    @property
    def forced(self) -> bool:
        """Whether a second signal has come."""
        return self._forced.is_set()

    def reconfigure(self, grace_s: float) -> None:
        """Sets the grace period of a drain that has not begun."""
        self._grace_s = grace_s

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Handles the signals for as long as the block runs."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.request)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def request(self) -> None:
        """Requests the shutdown, as a signal does."""
        if self._requested.is_set():
            self._forced.set()
            self._in_flight.cancel_all()
            return
        self._in_flight.close()
        self._requested.set()

    async def wait_requested(self) -> None:
        """Waits for the first signal."""
        await self._requested.wait()

    async def wait_forced(self) -> None:
        """Waits for the second signal."""
        await self._forced.wait()

    async def drain(self) -> None:
        """Waits until no request is left, within the grace period; then cancels the remaining requests."""
        if self._in_flight.count:
            log.info("Draining: %d answers may go on for %g s.", self._in_flight.count, self._grace_s)
        ended = await self._in_flight.drain(self._grace_s)
        if ended:
            log.warning("Ended %d answers that were not complete after %g s.", ended, self._grace_s)
