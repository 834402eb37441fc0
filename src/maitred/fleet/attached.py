"""An engine that somebody else runs: on another machine, or shared by several gateways, or kept while they restart.

    connecting --hello--> ready --end of stream--> connecting

Nothing is started and nothing is stopped here. A connection that ends is made again, for as long as it takes.
"""

import asyncio
import logging
from types import TracebackType

from maitred.core.errors import ReplicaUnavailable
from maitred.replica.engine_link import EngineLink
from maitred.wire.address import Address

HELLO_TIMEOUT_S = 10.0
"""For one attempt; an address where nobody listens yet is tried again within it."""
RECONNECT_S = 0.2
"""Between attempts; also what callers are told to wait while the engine is away."""

_log = logging.getLogger(__name__)


class AttachedEngine:
    """Keeps one link connected. Enter it to begin; leave it to let go of the engine.

    Args:
        address: Where the engine listens.

    Attributes:
        link: The replica. It stays the same over connections.
        restarts: Connections after the first one.
    """

    def __init__(self, address: Address) -> None:
        self.link = EngineLink(address)
        self.restarts = 0
        self._first: asyncio.Event = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    async def started(self) -> None:
        """Waits until the engine has been connected once."""
        await self._first.wait()

    async def __aenter__(self) -> "AttachedEngine":
        self._keeper = asyncio.create_task(self._keep(), name="engine connection")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._keeper is not None
        self._keeper.cancel()
        await asyncio.wait({self._keeper})
        self.link.close()
        if error is None and not self._keeper.cancelled():
            self._keeper.result()  # a fault of the keeper itself must not pass unseen

    async def _keep(self) -> None:
        while True:
            try:
                await self.link.connect(HELLO_TIMEOUT_S)
            except (ReplicaUnavailable, OSError) as failure:
                _log.warning("No engine at %s: %s", self.link.address, failure)
                await asyncio.sleep(RECONNECT_S)
                continue
            if self._first.is_set():
                self.restarts += 1
            self._first.set()
            _log.info("Connected to the engine at %s.", self.link.address)
            reason = await self.link.lost()
            _log.error("The engine at %s is gone: %s. Connecting again.", self.link.address, reason)
