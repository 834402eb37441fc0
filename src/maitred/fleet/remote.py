"""An engine that somebody else runs: on another machine, or shared by several gateways, or kept while they restart.

    connecting --hello--> ready --end of stream | silence--> connecting

Nothing is started and nothing is stopped here. A connection that ends is made again, for as long as it takes; also one
that was refused, since whoever puts it right does so at the other end.
"""

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType

from maitred.core.backoff import BackoffCeiling
from maitred.core.errors import ReplicaUnavailable
from maitred.core.replica import ModelCard
from maitred.core.request import ModelFingerprint
from maitred.replica.engine.client import EngineClient
from maitred.wire.address import Address, parse_address
from maitred.wire.link.config import LinkConfig
from maitred.wire.link.credentials import Credentials, gateway_credentials

HELLO_TIMEOUT_S = 30.0
"""Long enough for an engine whose steps take seconds: a handshake is some turns of its loop."""
_RECONNECT = BackoffCeiling(first_s=0.2, most_s=2.0)
"""Between attempts that follow one another."""

_log = logging.getLogger(__name__)


class RemoteEngine:
    """Keeps one link connected. Enter it to begin; leave it to let go of the engine.

    Args:
        address: Where the engine listens.
        credentials: What the engine has to know and show.
        silence_timeout_s: When an engine that says nothing is lost; None: never.
        accept: Raises ReplicaUnavailable where what the engine says of its model will not do.
        hello_timeout_s: For one attempt; an address where nobody listens yet is tried again within it.

    Attributes:
        link: The replica. It stays the same over connections.
        restarts: Connections after the first one.
        trouble: Why there is no connection; empty while there is one.
    """

    def __init__(
        self,
        address: Address,
        *,
        credentials: Credentials = Credentials(),  # noqa: B008 - frozen
        silence_timeout_s: float | None = None,
        accept: Callable[[ModelCard], None] = lambda card: None,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
    ) -> None:
        self.link = EngineClient(address, credentials=credentials, silence_timeout_s=silence_timeout_s, accept=accept)
        self.restarts = 0
        self.trouble = "nobody has connected yet"
        self._hello_timeout_s = hello_timeout_s
        self._first: asyncio.Event = asyncio.Event()
        self._maintenance: asyncio.Task[None] | None = None

    async def started(self) -> None:
        """Waits until the engine has been connected once."""
        await self._first.wait()

    async def __aenter__(self) -> "RemoteEngine":
        self._maintenance = asyncio.create_task(self._maintain(), name="engine connection")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._maintenance is not None
        self._maintenance.cancel()
        await asyncio.wait({self._maintenance})
        self.link.close()
        if error is None and not self._maintenance.cancelled():
            self._maintenance.result()  # a fault of the keeper itself must not pass unseen

    async def _maintain(self) -> None:
        failures = 0
        while True:
            try:
                await self.link.connect(self._hello_timeout_s)
            except (ReplicaUnavailable, OSError) as failure:
                if str(failure) != self.trouble:
                    _log.error("The engine at %s cannot be used: %s", self.link.address, failure)
                self.trouble = str(failure)
                failures += 1
                await asyncio.sleep(_RECONNECT.after(failures))
                continue
            failures, self.trouble = 0, ""
            if self._first.is_set():
                self.restarts += 1
            self._first.set()
            _log.info("Connected to the engine at %s.", self.link.address)
            self.trouble = await self.link.lost()
            _log.error("The engine at %s is gone: %s. Connecting again.", self.link.address, self.trouble)


class FingerprintCheck:
    """What all engines of one model have in common: answers begin at one and go on at another.

    What the gateway's own files do not say (it needs no weights, and not the type to compute in), the first engine says
    for those that come after it.

    Args:
        fingerprint: Of the gateway's own files.
    """

    def __init__(self, fingerprint: ModelFingerprint) -> None:
        self._digest = fingerprint
        self._dtype = ""

    def check(self, card: ModelCard) -> None:
        """Remembers what it adds.

        Raises:
            ReplicaUnavailable: An engine with this card may not answer in the place of the others; the reason why.
        """
        if differing := self._digest.differs_in(card.digest):
            raise ReplicaUnavailable(
                f"It runs another model, {card.name}: its {' and '.join(differing)} differ. Start it with the files "
                "that this gateway and its other engines have; or start the gateway again, if all of them have changed."
            )
        if self._dtype and card.dtype != self._dtype:
            raise ReplicaUnavailable(
                f"It computes in {card.dtype} and the other engines in {self._dtype}, so its answers are not theirs. "
                "Start all of them with the same --dtype."
            )
        self._digest = self._digest.completed_by(card.digest)
        self._dtype = card.dtype


def attached(address: str, config: LinkConfig, model: FingerprintCheck) -> RemoteEngine:
    """The engine at an address of the configuration.

    Args:
        address: As it is written there.
        config: How the two ends trust each other.
        model: What the engine has to run.

    Raises:
        ConfigInvalid: That is no address, or not one that may be connected to in this way.
    """
    parsed = parse_address(address)
    return RemoteEngine(
        parsed,
        credentials=gateway_credentials(parsed, config),
        silence_timeout_s=config.silence_timeout_s,
        accept=model.check,
    )
