"""The worker's end of the line to the controller: what is asked, and who waits for which answer.

A line that ends is connected again, for as long as it takes. Whoever asks meanwhile waits for a moment and is then told
when to come back; whoever has been answered before goes on. The next controller is told first of all what that is: what
was granted and has not been settled, whether it runs still or has ended since.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from maitred.app.workers.ipc import IpcConnection
from maitred.core.errors import MaitredError, StoreUnavailable, Unavailable
from maitred.core.tenancy import DirectoryChanges
from maitred.wire.error_codec import read_error
from maitred.wire.worker_protocol import (
    ControllerSnapshot,
    DirectoryQuery,
    DirectoryUpdate,
    RateLimitReply,
    ResumeGrant,
    ToWorker,
    WorkerHello,
)

AWAY = "The process of this gateway that decides on requests is being started again. Try again shortly."
_PATIENCE_S = 5.0
"""For a controller that is away: a start of one takes a second or two, on a machine that is busy with answers."""
_KEPT_S = 10.0
"""The same for who has a grant, which the next one knows of."""
_RETRY_AFTER_S = 2.0
_RECONNECT_S = 0.05
_GATHERED_S = 0.25
"""How long tokens are gathered before the controller is told of them, whose fair queue charges them. Of a stream of 20
tokens a second it hears 4 times."""
_REPORTED_S = 0.025
"""How long the end of a request waits for something else to go out with."""
_MOST_UNTOLD = 10_000
"""Ends of requests that wait for a controller to hear of them. What they have used is owed beside that."""


class Caller(Protocol):
    """A request that is told something from time to time."""

    def hear(self, message: ToWorker) -> None:
        """The controller has said something of it."""
        ...

    def cut(self) -> None:
        """The controller is gone."""
        ...

    def resumes(self) -> ResumeGrant | None:
        """There is another one, and this is what it has to know; None: nothing was granted."""
        ...

    @property
    def unanswered(self) -> str | None:
        """The id of its request, if that has asked and was not told of any grant."""
        ...


class Gatherer(Protocol):
    """A request that has something to tell, which can wait for a moment."""

    def flush(self) -> None:
        """Tells it now; nothing, if it was told meanwhile."""
        ...


class ControllerClient:
    """The line.

    Args:
        worker: The number of this worker.
        pid: Its process id.
        path: Where the controller listens.
        welcomed: Told of every welcome.
    """

    def __init__(self, worker: int, pid: int, path: Path, welcomed: Callable[[ControllerSnapshot], None]) -> None:
        self._worker, self._pid = worker, pid
        self._path = path
        self._welcomed = welcomed
        self._line: IpcConnection[ToWorker] | None = None
        self._up = asyncio.Event()
        self._over = asyncio.Event()
        self._numbers = itertools.count(1)
        self._callers: dict[int, Caller] = {}
        self._answers: dict[int, asyncio.Future[ToWorker]] = {}
        self._owed: list[ResumeGrant] = []
        """What has ended while there was no controller..."""
        self._given_up: list[str] = []
        """...and the ids of what was never answered."""
        self._untold: deque[msgspec.Struct] = deque(maxlen=_MOST_UNTOLD)
        self._gathered: list[Gatherer] = []

    @property
    def up(self) -> bool:
        """Whether the controller is there."""
        return self._up.is_set()

    async def run(self) -> None:
        """Keeps it connected; until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                _, line = await loop.create_unix_connection(
                    lambda: IpcConnection(ToWorker, self._heard, self._ended), str(self._path)
                )
            except OSError:
                await asyncio.sleep(_RECONNECT_S)
                continue
            self._over.clear()
            self._line = line
            callers = self._callers.values()
            running = [told for caller in callers if (told := caller.resumes()) is not None]
            asking = [request_id for caller in callers if (request_id := caller.unanswered) is not None]
            line.tell(WorkerHello(self._worker, self._pid, [*self._owed, *running], [*self._given_up, *asking]))
            self._tell_untold()
            try:
                await self._over.wait()
            finally:
                self._tell_untold()
                line.close()

    async def ready(self, *, kept: bool = False) -> None:
        """Waits for a controller that is away, for a moment; longer where a grant is `kept`.

        Raises:
            Unavailable: It stays away.
        """
        if self._up.is_set():
            return
        try:
            async with asyncio.timeout(_KEPT_S if kept else _PATIENCE_S):
                while not self._up.is_set():
                    await self._up.wait()
        except TimeoutError:
            raise Unavailable(AWAY, retry_after_s=_RETRY_AFTER_S) from None

    def tell(self, message: msgspec.Struct) -> None:
        """Says something; nobody hears it while the controller is away."""
        if self._line is not None:
            self._tell_untold()
            self._line.tell(message)

    def report(self, message: msgspec.Struct) -> None:
        """Says something that can wait for a moment, or for the next controller.

        It goes out with what cannot wait, so that a busy controller is not woken for it.
        """
        if not self._untold and self._line is not None:
            asyncio.get_running_loop().call_later(_REPORTED_S, self._tell_untold)
        self._untold.append(message)

    def _tell_untold(self) -> None:
        if (line := self._line) is not None:
            while self._untold:
                line.tell(self._untold.popleft())

    def gather(self, gatherer: Gatherer) -> None:
        """Has it tell before long what it has to tell, together with others."""
        if not self._gathered:
            asyncio.get_running_loop().call_later(_GATHERED_S, self._flush)
        self._gathered.append(gatherer)

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, []
        for gatherer in gathered:
            gatherer.flush()

    def owe(self, resumes: ResumeGrant) -> None:
        """The next controller is to settle this."""
        self._owed.append(resumes)

    def give_up(self, request_id: str) -> None:
        """A request is over that was never answered: the next controller is to forget it."""
        self._given_up.append(request_id)

    def enter(self, caller: Caller) -> int:
        """A number for a request, under which it hears what is said of it."""
        number = next(self._numbers)
        self._callers[number] = caller
        return number

    def leave(self, number: int) -> None:
        """It hears nothing any more."""
        self._callers.pop(number, None)

    async def ask(self, question: Callable[[int], msgspec.Struct]) -> ToWorker:
        """Asks something that is answered at once.

        Raises:
            Unavailable: The controller is away.
        """
        await self.ready()
        number = next(self._numbers)
        answer: asyncio.Future[ToWorker] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self.tell(question(number))
        try:
            return await answer
        finally:
            del self._answers[number]

    async def changes(self, since: int) -> DirectoryChanges:
        """See `maitred.core.tenancy.DirectorySource`."""
        try:
            news = await self.ask(lambda number: DirectoryQuery(number, since))
        except Unavailable as away:
            raise StoreUnavailable(away.message, retry_after_s=away.retry_after_s) from None
        assert isinstance(news, DirectoryUpdate)
        if news.changes is None:
            raise MaitredError if news.error is None else read_error(news.error)
        return news.changes

    def _heard(self, message: ToWorker) -> None:
        match message:
            case ControllerSnapshot():
                self._owed.clear()  # it is settled
                self._given_up.clear()
                self._up.set()
                self._welcomed(message)
            case DirectoryUpdate() | RateLimitReply():
                answer = self._answers.get(message.number)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case _:
                if (caller := self._callers.get(message.number)) is not None:
                    caller.hear(message)

    def _ended(self) -> None:
        self._line = None
        self._up.clear()
        self._over.set()
        for caller in list(self._callers.values()):
            caller.cut()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(Unavailable(AWAY, retry_after_s=_RETRY_AFTER_S))
