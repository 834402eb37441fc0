"""Where the workers ask: the controller's end of every line, and the requests that came over it.

    worker -- Line -- Clerk -- Guest, one for each request at one model

A worker that is gone takes its requests with it: they end as if their callers had left, and nothing they held is held
any more.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from maitred.api.gate import Gate
from maitred.app.control import LocalControl
from maitred.app.workers.guest import Guest
from maitred.app.workers.line import Line
from maitred.app.workers.report import tally_of
from maitred.core.answer import Observer
from maitred.core.clock import Clock
from maitred.core.directory import DirectoryChanges, DirectorySource
from maitred.core.errors import MaitredError
from maitred.core.story import Chapter
from maitred.identity.refresh import Refresher
from maitred.wire.desk import (
    Asks,
    Ended,
    FailedThere,
    Heard,
    Hello,
    Knows,
    Leaves,
    News,
    Peeked,
    Peeks,
    Reads,
    Settles,
    ToController,
    Took,
    Welcome,
)
from maitred.wire.written_errors import write_error

_SPREAD_S = 1.0
"""For workers to learn of a change; one that hangs holds up nobody longer."""
_log = logging.getLogger(__name__)


class Desk:
    """Serves all workers.

    Args:
        gate: Counts their requests among those who are inside.
        directory: Keys, tenants and limits, as they are kept.
        refresher: Keeps up with them here.
        welcome: What a worker has to know, as it is now.
        clock: For stories.
    """

    def __init__(
        self,
        gate: Gate,
        directory: DirectorySource,
        refresher: Refresher,
        welcome: Callable[[], Welcome],
        clock: Clock,
    ) -> None:
        self.gate = gate
        self.directory = directory
        self.refresher = refresher
        self.observers: Sequence[Observer] = ()
        self._control: LocalControl | None = None
        self.welcome = welcome
        self.clock = clock
        self.clerks: set[Clerk] = set()
        self._server: asyncio.AbstractServer | None = None
        self._said: Welcome | None = None

    @property
    def control(self) -> LocalControl:
        """Decides, by the settings of now."""
        assert self._control is not None, "nobody decides yet"
        return self._control

    def adopt(self, control: LocalControl, observers: Sequence[Observer]) -> None:
        """Another configuration is in force: these decide, and are told of every request that has ended."""
        self._control, self.observers = control, observers

    @property
    def workers(self) -> list[tuple[int, int]]:
        """Those that are here: their numbers and process ids."""
        return sorted((clerk.worker, clerk.pid) for clerk in self.clerks if clerk.pid)

    async def open(self, path: Path) -> None:
        """Takes lines at a socket from now on."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: Clerk(self).line, str(path))

    def greet(self) -> None:
        """Something in the welcome has changed."""
        self._said = welcome = self.welcome()
        for clerk in self.clerks:
            clerk.greet(welcome)

    def look(self) -> None:
        """Something in the welcome may have changed."""
        if self.clerks and self.welcome() != self._said:
            self.greet()

    async def load(self) -> None:
        """Reads what has changed of keys, tenants and limits; returns when every worker goes by it.

        Raises:
            StoreUnavailable: They cannot be read.
        """
        await self.refresher.load()
        self.greet()
        version = self.welcome().directory
        learning = [asyncio.ensure_future(clerk.learnt(version)) for clerk in self.clerks]
        if learning:
            await asyncio.wait(learning, timeout=_SPREAD_S)
        for each in learning:
            each.cancel()

    async def close(self) -> None:
        """Ends every line."""
        if self._server is not None:
            self._server.close()
        for clerk in list(self.clerks):
            clerk.line.close()
        await asyncio.gather(*(task for clerk in self.clerks for task in clerk.tasks), return_exceptions=True)


class Clerk:
    """One worker's.

    Args:
        desk: Where it stands.
    """

    def __init__(self, desk: Desk) -> None:
        self.line: Line[ToController] = Line(ToController, self._heard, self._gone)
        self.worker = 0
        self.pid = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self._desk = desk
        self._guests: dict[int, Guest] = {}
        self._chapters: dict[tuple[str, float], list[Chapter]] = {}
        """Of requests whose end has not been told, by their ids and when they came."""
        self._knows = asyncio.Condition()
        self._version = -1

    def greet(self, welcome: Welcome) -> None:
        """Tells what has to be known."""
        self.line.tell(welcome)

    async def learnt(self, version: int) -> None:
        """Waits until the worker goes by a version of the directory."""
        async with self._knows:
            await self._knows.wait_for(lambda: self._version >= version or not self.line.open)

    def _heard(self, message: ToController) -> None:
        match message:
            case Took():
                if (guest := self._guests.get(message.number)) is not None:
                    guest.took(message)
            case Asks():
                self._begin(self._attend(message), f"request {message.request_id}")
            case Heard():
                if (guest := self._guests.get(message.number)) is not None:
                    guest.heard()
            case FailedThere() | Settles() | Leaves():
                if (guest := self._guests.get(message.number)) is not None:
                    guest.order(message)
            case Ended():
                self._report(message)
            case Peeks():
                self._begin(self._peek(message), "standing of a caller")
            case Reads():
                self._begin(self._read(message), "changes of the directory")
            case Knows():
                self._begin(self._note(message.version), "version of the directory")
            case Hello():
                self.worker, self.pid = message.worker, message.pid
                self._desk.clerks.add(self)
                self.greet(self._desk.welcome())

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("What worker %d had asked for failed.", self.worker, exc_info=error)

    async def _attend(self, asks: Asks) -> None:
        desk = self._desk
        guest = Guest(asks, desk.control, desk.gate, desk.clock, self.line.tell)
        self._guests[asks.number] = guest
        try:
            await guest.run()
        finally:
            del self._guests[asks.number]
            self._chapters.setdefault((asks.request_id, asks.arrived_s), []).extend(guest.chapters)

    async def _peek(self, peeks: Peeks) -> None:
        self.line.tell(Peeked(peeks.number, await self._desk.control.peek(peeks.principal, peeks.model)))

    async def _read(self, reads: Reads) -> None:
        try:
            self._desk.refresher.check()
            # Most ask again and again, and nothing has changed.
            known = reads.since == self._desk.welcome().directory
            changes = DirectoryChanges(reads.since) if known else await self._desk.directory.changes(reads.since)
        except MaitredError as error:
            self.line.tell(News(reads.number, None, write_error(error)))
        else:
            self.line.tell(News(reads.number, changes))

    async def _note(self, version: int) -> None:
        async with self._knows:
            self._version = version
            self._knows.notify_all()

    def _report(self, ended: Ended) -> None:
        chapters = self._chapters.pop((ended.request_id, ended.started_s), [])
        tally = tally_of(ended, chapters)
        for observer in self._desk.observers:
            observer.ended(tally)

    def _gone(self) -> None:
        """The worker has ended, or its line has: nobody is there for its requests."""
        self._desk.clerks.discard(self)
        if self._guests:
            _log.warning("Worker %d (pid %d) is gone, with %d requests.", self.worker, self.pid, len(self._guests))
        for task in self.tasks:
            task.cancel()
        self._begin(self._note(self._version), "end of a line")
