"""Remote engine: an engine that runs elsewhere: on another machine, shared, or kept over restarts.

    connecting --hello--> ready --end of stream | silence--> connecting

No process is started or stopped here. A connection that ends is made again, without a time limit; this also holds for a
rejected connection, since the fault is then repaired at the other end.
"""

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType

from maitred.core.backoff import BackoffCeiling
from maitred.core.errors import ReplicaUnavailable
from maitred.core.replica import ModelCard
from maitred.core.request import ModelFingerprint
from maitred.fleet.local import engine_phase
from maitred.replica.engine.client import EngineClient
from maitred.scaling.replica_status import ReplicaPhase
from maitred.wire.address import Address
from maitred.wire.link.config import LinkConfig
from maitred.wire.link.credentials import Credentials, dialer_credentials

HELLO_TIMEOUT_S = 30.0
"""Time limit of a hello, long enough for an engine whose steps take seconds: a handshake takes some turns of its event
loop."""
_RECONNECT_BACKOFF = BackoffCeiling(first_s=0.2, most_s=2.0)
"""Back-off between consecutive attempts."""

_log = logging.getLogger(__name__)


class RemoteEngine:
    """Remote engine that is kept connected. Entering starts the connection; leaving closes it.

    Args:
        address: Address at which the engine listens.
        credentials: Secret and certificates by which the engine and the gateway know each other.
        silence_timeout_s: Time after which an engine that sends nothing counts as lost; None: it never does.
        check_card: Raises ReplicaUnavailable if the engine runs a model that may not be used.
        hello_timeout_s: Time limit of one attempt; an address where nothing listens yet is tried again within it.

    Attributes:
        client: The replica. It stays the same over connections.
        restarts: Connections after the first one.
        failure_reason: Reason why there is no connection; empty while there is one, and during the first attempt.
        on_transition: Called when the connection is made, is lost, or cannot be made for another reason than before.
    """

    def __init__(
        self,
        address: Address,
        *,
        credentials: Credentials = Credentials(),  # noqa: B008 - frozen
        silence_timeout_s: float | None = None,
        check_card: Callable[[ModelCard], None] = lambda card: None,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
    ) -> None:
        self.client = EngineClient(
            address, credentials=credentials, silence_timeout_s=silence_timeout_s, check_card=check_card
        )
        self.restarts = 0
        self.failure_reason = ""
        self.on_transition: Callable[[], None] = lambda: None
        self._hello_timeout_s = hello_timeout_s
        self._connected_once: asyncio.Event = asyncio.Event()
        self._connect_task: asyncio.Task[None] | None = None

    @property
    def phase(self) -> ReplicaPhase:
        """Phase of the engine as its connection shows it."""
        return engine_phase(self.client, self.failure_reason)

    async def wait_started(self) -> None:
        """Waits until the engine has been connected for the first time."""
        await self._connected_once.wait()

    async def __aenter__(self) -> "RemoteEngine":
        self._connect_task = asyncio.create_task(self._keep_connected(), name="engine connection")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._connect_task is not None
        self._connect_task.cancel()
        await asyncio.wait({self._connect_task})
        self.client.close()
        if error is None and not self._connect_task.cancelled():
            self._connect_task.result()  # an error of the task itself must be raised

    async def _keep_connected(self) -> None:
        failures = 0
        while True:
            try:
                await self.client.connect(self._hello_timeout_s)
            except (ReplicaUnavailable, OSError, ValueError) as failure:  # a name that cannot be encoded: ValueError
                if str(failure) != self.failure_reason:
                    _log.error("The engine at %s cannot be used: %s", self.client.address, failure)
                    self.failure_reason = str(failure)
                    self.on_transition()
                failures += 1
                await asyncio.sleep(_RECONNECT_BACKOFF.after(failures))
                continue
            failures, self.failure_reason = 0, ""
            if self._connected_once.is_set():
                self.restarts += 1
            self._connected_once.set()
            _log.info("Connected to the engine at %s.", self.client.address)
            self.on_transition()
            self.failure_reason = await self.client.wait_lost()
            self.on_transition()
            _log.error("The engine at %s is gone: %s. Connecting again.", self.client.address, self.failure_reason)


class RemoteReplica:
    """Replica of a cluster, with the connection to its engine.

    Attributes:
        name: Name of the replica.
        engine: Connection to its engine; None: its address is not known yet, or it is to end.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.engine: RemoteEngine | None = None
        self._closed = asyncio.Event()

    def open(self, engine: RemoteEngine) -> asyncio.Task[None]:
        """Connects, and stays connected until `close`; returns the task that does."""
        self.engine, self._closed = engine, asyncio.Event()
        return asyncio.create_task(self._keep(engine, self._closed), name=f"replica {self.name}")

    def close(self) -> None:
        """Closes the connection to its engine."""
        self._closed.set()
        self.engine = None

    async def _keep(self, engine: RemoteEngine, closed: asyncio.Event) -> None:
        async with engine:
            await closed.wait()


class FingerprintCheck:
    """Check that all engines of one model run the same files: an answer may begin at one and continue at another.

    Facts that the gateway's own files do not have (it needs no weights, and no type to compute in) are taken from the
    first engine and hold for those after it.

    Args:
        fingerprint: Fingerprint of the gateway's own files.
    """

    def __init__(self, fingerprint: ModelFingerprint) -> None:
        self._fingerprint = fingerprint
        self._dtype = ""

    def check(self, card: ModelCard) -> None:
        """Checks a card against the engines before it, and remembers the facts that it adds.

        Raises:
            ReplicaUnavailable: An engine with this card may not answer in place of the others; the message gives the
                reason.
        """
        if differing := self._fingerprint.differs_in(card.digest):
            raise ReplicaUnavailable(
                f"It runs another model, {card.name}: its {' and '.join(differing)} differ. Start it with the files "
                "that this gateway and its other engines have; or start the gateway again, if all of them have changed."
            )
        if self._dtype and card.dtype != self._dtype:
            raise ReplicaUnavailable(
                f"It computes in {card.dtype} and the other engines in {self._dtype}, so its answers are not theirs. "
                "Start all of them with the same --dtype."
            )
        self._fingerprint = self._fingerprint.completed_by(card.digest)
        self._dtype = card.dtype


def make_remote_engine(address: Address, config: LinkConfig, check_card: Callable[[ModelCard], None]) -> RemoteEngine:
    """Makes the remote engine at an address.

    Args:
        address: The address.
        config: Settings by which the two ends trust each other.
        check_card: See `RemoteEngine`.

    Raises:
        ConfigInvalid: The settings do not allow a connection to this address.
    """
    return RemoteEngine(
        address,
        credentials=dialer_credentials(address, config),
        silence_timeout_s=config.silence_timeout_s,
        check_card=check_card,
    )
