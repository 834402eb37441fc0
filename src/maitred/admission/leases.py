"""Leases of running requests: kept alive while the request runs, and given back without fail.

A lease expires some time after its last renewal, which frees the counters if a gateway dies. While the gateway lives,
its leases must last as long as the answer takes, and each lease must be released even if the counters could not be
reached when the answer ended. A background task does both, so that no answer waits: it renews all leases in one call,
and it retries a failed settlement until it succeeds.
"""

import asyncio
import logging
from collections.abc import Mapping

from maitred.core.counters import Counters
from maitred.core.errors import StoreUnavailable

log = logging.getLogger(__name__)

_PATIENCE_S = 1.0
"""Maximum seconds that a finished answer waits for its settlement. After that the background task settles it."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_LAST_CALL_S = 2.0
"""Seconds at shutdown for settlements that are still open."""


class Leases:
    """Manager of all leases of this gateway.

    Args:
        counters: Counters that hold the leases.
        lease_s: Lifetime of a lease in seconds after it was made or renewed.
        patience_s: How long `settle` may keep its caller waiting.

    Attributes:
        lease_s: How long a lease lasts without being renewed.
    """

    def __init__(self, counters: Counters, lease_s: float, *, patience_s: float = _PATIENCE_S) -> None:
        self._counters = counters
        self.lease_s = lease_s
        self._patience_s = patience_s
        self._leases: set[str] = set()
        self._late: dict[str, Mapping[str, int]] = {}
        self._woken = asyncio.Event()

    @property
    def active(self) -> int:
        """Number of leases that are not settled yet."""
        return len(self._leases)

    @property
    def late(self) -> int:
        """Number of leases whose request has ended, but whose release the counters have not confirmed yet."""
        return len(self._late)

    def hold(self, lease: str) -> None:
        """Keeps a lease alive from now on."""
        self._leases.add(lease)

    async def settle(self, lease: str, amounts: Mapping[str, int]) -> None:
        """Settles a lease reliably, even if the caller leaves or the counters cannot be reached.

        The call fails only if it is cancelled. After a cancellation or any other failure, the background task settles
        the lease.
        """
        try:
            if self._counters.settles_immediately:
                await self._counters.settle(lease, amounts)
            else:
                async with asyncio.timeout(self._patience_s):
                    await self._counters.settle(lease, amounts)
        except BaseException as error:
            self.settle_later(lease, amounts)
            if not isinstance(error, Exception):
                raise
            log.warning("A request could not be settled at once; this is tried again.", exc_info=_cause(error))
        else:
            self._leases.discard(lease)

    def settle_later(self, lease: str, amounts: Mapping[str, int]) -> None:
        """Leaves a settlement to the background task."""
        self._leases.add(lease)
        self._late[lease] = amounts
        self._woken.set()

    async def run(self) -> None:
        """Renews and settles until it is cancelled; then tries a last time to settle what is left."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep(), name="lease renewal")
                tasks.create_task(self._catch_up(), name="late settlements")
        finally:
            if self._late:
                try:
                    async with asyncio.timeout(_LAST_CALL_S):
                        await self.settle_late()
                except TimeoutError:
                    pass
                if self._late:
                    log.error("%d requests are not settled. Their usage is in the ledger.", len(self._late))

    async def renew(self) -> None:
        """Renews all leases that are held."""
        if not self._leases:
            return
        try:
            async with asyncio.timeout(self.lease_s / 3):
                await self._counters.renew(list(self._leases), self.lease_s)
        except Exception as error:
            log.warning("%d leases could not be renewed.", len(self._leases), exc_info=_cause(error))

    async def settle_late(self) -> None:
        """Retries open settlements; stops early while the counters cannot be reached."""
        for lease, amounts in list(self._late.items()):
            try:
                await self._counters.settle(lease, amounts)
            except (StoreUnavailable, OSError):
                return
            except Exception:
                log.exception("A request could not be settled; this is tried again.")
                continue
            del self._late[lease]
            self._leases.discard(lease)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self.lease_s / 3)
            await self.renew()

    async def _catch_up(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            await self._woken.wait()
            await asyncio.sleep(pause_s)
            self._woken.clear()
            await self.settle_late()
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S) if self._late else _FIRST_PAUSE_S
            if self._late:
                self._woken.set()


def _cause(error: Exception) -> Exception | None:
    """Returns the exception to log in full; None if a store is unreachable, which is logged elsewhere."""
    return None if isinstance(error, StoreUnavailable | TimeoutError) else error
