"""Server with one thread, which waits for sockets and for the next bucket of the timetable.

It uses raw sockets and `epoll` without an event loop: at 100,000 events per second there are ten microseconds per
event, and the system needs eight of them for the send itself. Everything possible is prepared in advance; an event
costs a clock reading, the send and an entry in the timetable.
"""

import contextlib
import math
import select
import socket
import struct
import time
from collections import deque

import httptools

from maitred.testing.scripted_openai.answers import AnswerFactory, AnswerSchedule, head, response
from maitred.testing.scripted_openai.chorus import SynchronizedStreams
from maitred.testing.scripted_openai.connection import ScriptedConnection, ScriptedExchange
from maitred.testing.scripted_openai.odd_stream import StreamEnding
from maitred.testing.scripted_openai.script import ServerScript
from maitred.testing.scripted_openai.timetable import DeliverySchedule
from maitred.testing.scripted_openai.truth import RequestTruth, SendLateness, ServedRecord, pack

SOCKETS_PER_ROUND = 16
"""Most sockets per round: a request takes about 0.1 ms to read, so more would make sends late."""
ACCEPTS_PER_ROUND = 16
READ_BYTES = 1 << 18
READING = select.EPOLLIN | select.EPOLLRDHUP
LONGEST_WAIT_S = 1.0
_NOT_NOTED = -1
_LEFT = -1


class ScriptedServer:
    """Server of a script on a loopback port.

    Args:
        script: Script of the answers.
        port: Port to listen on; 0 takes a free one.
        path: Path of a Unix socket to listen on instead.

    Attributes:
        url: Address that it listens at.
    """

    def __init__(self, script: ServerScript, port: int = 0, path: str | None = None) -> None:
        self._script = script
        self._answers = AnswerFactory(script, created=int(time.time()))
        if path is None:
            self._listener = socket.create_server(("127.0.0.1", port), backlog=8192)
            self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        else:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(path)
            self._listener.listen(8192)
            self.url = f"unix:{path}"
        self._listener.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._connections: dict[int, ScriptedConnection] = {}
        self._timetable: DeliverySchedule[ScriptedExchange | SynchronizedStreams] = DeliverySchedule()
        self._line: deque[ScriptedExchange] = deque()
        self._running = 0
        self._least_gap_s = 0.0
        self._exchanges: list[ScriptedExchange] = []
        self._pages = 0
        fixed = script.itl.cv == 0 and script.tokens_per_s is None and not script.faults
        self._gap_s = script.itl.mean_s * script.itl.factor if fixed else 0.0
        self._choruses: dict[tuple[int, int], SynchronizedStreams] = {}
        """By bucket and kind of events, for others to join; used where all gaps are the same."""
        self._pauses = sorted(script.pauses, key=lambda pause: pause.at_s)
        self._first_s: float | None = None
        self._stopped = False

    def stop(self) -> None:
        """Makes `run` end soon; it is safe in a signal handler."""
        self._stopped = True

    def run(self, wakeup: int | None = None) -> None:
        """Serves requests until `stop` is called.

        Args:
            wakeup: A descriptor that becomes readable when `stop` has been called.
        """
        if wakeup is not None:
            self._epoll.register(wakeup, select.EPOLLIN)
        descriptors = [self._epoll.fileno()]
        while not self._stopped:
            self._pause()
            now_s = time.monotonic()  # one time for all buckets: sockets are served even when sends are late
            while due := self._timetable.take(now_s):
                self._send(due)
            wait_s = self._timetable.next_s - time.monotonic()
            if wait_s > 0:
                # epoll itself waits whole milliseconds; select on its descriptor has a resolution of microseconds.
                select.select(descriptors, [], [], min(wait_s, self._until_pause_s(), LONGEST_WAIT_S))
            for descriptor, events in self._epoll.poll(0, SOCKETS_PER_ROUND):
                self._serve(descriptor, events)
        for connection in list(self._connections.values()):
            connection.socket.close()
        self._listener.close()
        self._epoll.close()

    def truth(self) -> ServedRecord:
        """Returns the record of what has happened so far."""
        lateness_s: list[float] = []
        for exchange in self._exchanges:
            due_s, sent_s = exchange.times_s[::2], exchange.times_s[1::2]
            while sent_s and math.isnan(sent_s[-1]):
                sent_s.pop()
            exchange.truth.due, exchange.truth.sent = pack(due_s), pack(sent_s)
            lateness_s += [sent - due for due, sent in zip(due_s, sent_s, strict=False)]
        return ServedRecord(
            requests=[exchange.truth for exchange in self._exchanges],
            unix_minus_monotonic_s=time.time() - time.monotonic(),
            cpu_seconds=time.process_time(),
            lateness=SendLateness.of(lateness_s),
        )

    # --- time ---

    def _send(self, due: "list[ScriptedExchange | SynchronizedStreams]") -> None:
        """Sends what is due, and puts what follows into the timetable."""
        monotonic, add, least_gap_s = time.monotonic, self._timetable.add, self._least_gap_s
        joining: list[ScriptedExchange] = []
        for exchange in due:
            if isinstance(exchange, SynchronizedStreams):
                self._sing(exchange)
                continue
            at = exchange.at
            payload = exchange.sends[at]
            times_s = exchange.times_s
            times_s.append(exchange.due_s)
            times_s.append(monotonic())
            if exchange.blocked is None:
                try:
                    count = exchange.send(payload)
                except BlockingIOError:
                    count = 0
                except OSError:
                    del times_s[-2:]
                    self._on_disconnect(exchange.connection)
                    continue
                if count < len(payload):
                    times_s[-1] = math.nan
                    self._block(exchange, payload[count:], len(times_s) - 1)
            else:
                times_s[-1] = math.nan
                exchange.blocked.append((payload, len(times_s) - 1))
            exchange.at = at = at + 1
            if at == len(exchange.sends):
                self._finish(exchange)
                continue
            gap_s = exchange.gaps_s[at]
            exchange.due_s = due_s = exchange.due_s + (gap_s if gap_s > least_gap_s else least_gap_s)
            if self._gap_s and exchange.blocked is None and at < len(exchange.sends) - 1:
                joining.append(exchange)
            else:
                add(exchange, due_s)
        # After the groups of this bucket have moved on to the buckets that these streams go to
        for exchange in joining:
            self._join(exchange)

    def _join(self, exchange: ScriptedExchange) -> None:
        """Adds a stream to the group whose next event falls into the same bucket."""
        events = exchange.answer.shared
        if events is None:
            self._timetable.add(exchange, exchange.due_s)
            return
        key = (self._timetable.bucket(exchange.due_s), id(events))
        chorus = self._choruses.get(key)
        if chorus is None:
            chorus = self._choruses[key] = SynchronizedStreams(events, exchange.due_s, self._gap_s)
            self._timetable.add(chorus, exchange.due_s)
        chorus.join(exchange)

    def _sing(self, chorus: SynchronizedStreams) -> None:
        """Sends the next event of each stream of a group."""
        key = (self._timetable.bucket(chorus.due_s), id(chorus.events))
        if self._choruses.get(key) is chorus:
            del self._choruses[key]
        chorus.begin_round(time.monotonic())
        events, rounds = chorus.events, chorus.rounds
        rests: dict[ScriptedExchange, bytes] = {}
        for send, first, exchange in chorus.voices:
            payload = events[first + rounds]
            try:
                count = send(payload)
            except BlockingIOError:
                count = 0
            except OSError:
                count = _LEFT
            if count != len(payload):
                rests[exchange] = payload[count:] if count != _LEFT else b""
        for exchange in chorus.end_round(list(rests)):
            self._timetable.add(exchange, exchange.due_s)
        for exchange, rest in rests.items():
            if not rest:
                del exchange.times_s[-2:]
                exchange.at -= 1
                self._on_disconnect(exchange.connection)
                continue
            exchange.times_s[-1] = math.nan
            self._block(exchange, rest, len(exchange.times_s) - 1)
            self._timetable.add(exchange, exchange.due_s)
        if chorus.voices:
            self._choruses.setdefault((self._timetable.bucket(chorus.due_s), key[1]), chorus)
            self._timetable.add(chorus, chorus.due_s)

    def _pause(self) -> None:
        """Pauses for as long as the script wants."""
        while self._pauses and self._first_s is not None:
            end_s = self._first_s + self._pauses[0].at_s + self._pauses[0].for_s
            if self._until_pause_s() > 0:
                return
            while (left_s := end_s - time.monotonic()) > 0 and not self._stopped:
                time.sleep(min(left_s, 0.05))
            del self._pauses[0]

    def _until_pause_s(self) -> float:
        if self._first_s is None or not self._pauses:
            return LONGEST_WAIT_S
        return max(0.0, self._first_s + self._pauses[0].at_s - time.monotonic())

    # --- sockets ---

    def _serve(self, descriptor: int, events: int) -> None:
        """Handles a socket that is ready."""
        connection = self._connections.get(descriptor)
        if connection is None:
            if descriptor == self._listener.fileno():
                self._accept()
            return  # the wakeup descriptor: `run` checks whether it has to stop
        if events & select.EPOLLOUT and connection.exchange is not None:
            self._flush(connection.exchange)
        if events & ~select.EPOLLOUT and connection.socket.fileno() >= 0:
            self._read(connection)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_ROUND):
            try:
                accepted, _address = self._listener.accept()
            except OSError:  # no more connections, or the client has closed it again
                return
            accepted.setblocking(False)
            if accepted.family != socket.AF_UNIX:
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections[accepted.fileno()] = ScriptedConnection(self, accepted)
            self._epoll.register(accepted, READING)

    def _read(self, connection: ScriptedConnection) -> None:
        try:
            data = connection.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._on_disconnect(connection)
            return
        try:
            connection.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._on_disconnect(connection)

    def _on_disconnect(self, connection: ScriptedConnection) -> None:
        """Handles a client that has closed the connection or does not speak HTTP."""
        exchange = connection.exchange
        self._close(connection)
        if exchange is not None:
            self._end(exchange, "client_left")

    def _close(self, connection: ScriptedConnection, *, reset: bool = False) -> None:
        if self._connections.pop(connection.socket.fileno(), None) is None:
            return
        if reset:
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.socket.close()
        connection.parser = None  # the connection refers back to its exchange

    def _write(self, exchange: ScriptedExchange, data: bytes) -> None:
        """Sends bytes that are no step of a stream: a head or a short response."""
        try:
            count = exchange.send(data)
        except BlockingIOError:
            count = 0
        except OSError:
            self._on_disconnect(exchange.connection)
            return
        if count < len(data):
            self._block(exchange, data[count:], _NOT_NOTED)

    def _block(self, exchange: ScriptedExchange, rest: bytes, place: int) -> None:
        """Keeps the following bytes while the client's buffer is full."""
        exchange.blocked = deque([(rest, place)])
        self._epoll.modify(exchange.connection.socket, READING | select.EPOLLOUT)

    def _flush(self, exchange: ScriptedExchange) -> None:
        """Sends the kept bytes when the client reads again."""
        blocked = exchange.blocked
        while blocked:
            data, place = blocked[0]
            now_s = time.monotonic()
            try:
                count = exchange.send(data)
            except BlockingIOError:
                return
            except OSError:
                self._on_disconnect(exchange.connection)
                return
            if count < len(data):
                blocked[0] = (data[count:], place)
                return
            blocked.popleft()
            if place != _NOT_NOTED:
                exchange.times_s[place] = now_s
        exchange.blocked = None
        self._epoll.modify(exchange.connection.socket, READING)
        if exchange.truth.end == "flushing":
            self._finish(exchange)

    # --- requests ---

    def on_request(self, connection: ScriptedConnection, method: str, path: str, body: bytes) -> None:
        """Handles a complete request."""
        if connection.exchange is not None:
            self._on_disconnect(connection)  # pipelining is not supported here
            return
        match method, path:
            case "POST", "/v1/chat/completions" | "/v1/completions":
                self._asked_for_answer(connection, path.startswith("/v1/chat"), body)
            case "GET", "/v1/models":
                self._reply(connection, self._answers.models())
            case "GET", "/health" | "/health/ready":
                self._reply(connection, response(200, {}))
            case "GET", "/metrics" if self._script.metrics:
                self._pages += 1
                if self._script.metrics_pages is not None and self._pages > self._script.metrics_pages:
                    return
                page = self._script.metrics.replace("{open}", str(self._open)).encode()
                self._reply(connection, head(200, "text/plain", {"content-length": str(len(page))}) + page)
            case "GET", "/log":
                self._reply(connection, response(200, self.truth()))
            case _:
                self._reply(connection, response(404, {"error": {"message": f"No such route: {method} {path}"}}))

    @property
    def _open(self) -> int:
        """Number of answers in progress."""
        return sum(connection.exchange is not None for connection in self._connections.values())

    def _asked_for_answer(self, connection: ScriptedConnection, chat: bool, body: bytes) -> None:
        now_s = time.monotonic()
        if self._first_s is None:
            self._first_s = now_s
        number = len(self._exchanges)
        answer = self._answers.answer(number, chat=chat, body=body, least_gap_s=self._least_gap_s)
        truth = RequestTruth(
            number=number,
            received_s=now_s,
            status=answer.status,
            stream=answer.stream,
            user=answer.user,
            prompt_tokens=answer.prompt_tokens,
            answer_tokens=answer.answer_tokens,
            events_per_send=answer.events_per_send,
        )
        connection.exchange = exchange = ScriptedExchange(connection, truth, answer)
        self._exchanges.append(exchange)
        limit = self._script.max_concurrent
        if answer.takes_turn and limit is not None and self._running >= limit:
            self._line.append(exchange)
        else:
            self._start(exchange, now_s)

    def _reply(self, connection: ScriptedConnection, data: bytes) -> None:
        """Answers a request that is not part of the script."""
        exchange = ScriptedExchange(
            connection, RequestTruth(number=-1, received_s=0.0), AnswerSchedule(b"", takes_turn=False)
        )
        connection.exchange = exchange
        self._write(exchange, data)
        self._finish(exchange)

    def _start(self, exchange: ScriptedExchange, now_s: float) -> None:
        exchange.truth.started_s = now_s
        if exchange.answer.takes_turn:
            self._count_running(+1)
        if exchange.answer.head:
            self._write(exchange, exchange.answer.head)
            if exchange.truth.ended_s is not None:
                return
        if not exchange.sends:
            self._finish(exchange)
            return
        exchange.due_s = now_s + exchange.gaps_s[0]
        self._timetable.add(exchange, exchange.due_s)

    def _finish(self, exchange: ScriptedExchange) -> None:
        """Ends an answer after its last byte, and then the connection as its script wants."""
        if exchange.blocked is not None:
            exchange.truth.end = "flushing"
            return
        connection = exchange.connection
        match exchange.answer.ending:
            case StreamEnding.STALL:
                exchange.truth.end = exchange.answer.end
                return  # counts as concurrent until the client closes the connection
            case StreamEnding.KEEP if connection.keep_alive:
                connection.exchange = None
            case ending:
                self._close(connection, reset=ending is StreamEnding.RESET)
        self._end(exchange, exchange.answer.end)

    def _end(self, exchange: ScriptedExchange, end: str) -> None:
        """Records the end, and starts the next waiting request."""
        if exchange.truth.ended_s is not None:
            return  # the client closed the connection while this was still in the timetable
        if exchange.truth.end != "stall":
            exchange.truth.end = end
        exchange.truth.ended_s = now_s = time.monotonic()
        exchange.blocked = None
        if exchange.at == len(exchange.sends):  # no longer in the timetable
            exchange.sends = exchange.answer.sends = []
            exchange.gaps_s = exchange.answer.gaps_s = []
        if exchange.answer.takes_turn:
            with contextlib.suppress(ValueError):
                self._line.remove(exchange)
            if exchange.truth.started_s is not None:
                self._count_running(-1)
        limit = self._script.max_concurrent
        while self._line and limit is not None and self._running < limit:
            self._start(self._line.popleft(), now_s)

    def _count_running(self, change: int) -> None:
        self._running += change
        if self._script.tokens_per_s is not None:
            self._least_gap_s = self._running * self._script.tokens_per_event / self._script.tokens_per_s
