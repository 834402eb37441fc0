"""One server of somebody else's as a replica: requests go out over HTTP, answers come back as parts.

    relay: check it is there -> POST -> head within the time -> parts, each within its time -> [DONE]

Every wait has an end, and every end that is not the answer's own is a failure. Leaving the context closes the
connection unless the answer came whole, and that is how all servers are told to stop computing.
"""

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import cache, partial

import msgspec

from maitred import __version__
from maitred.core.errors import MaitredError, ReplicaBusy, ReplicaLost, ReplicaUnavailable
from maitred.core.ports import Hearsay, LoadReport, ModelCard
from maitred.core.relay import TextRequest, TextStream
from maitred.replica.health.breaker import Outcome
from maitred.replica.health.config import HealthConfig
from maitred.replica.health.peers import Peers
from maitred.replica.http.connection import Interrupted, Response
from maitred.replica.http.head import head_of, line_of, request_of
from maitred.replica.http.line import Connections, Line, Unreachable
from maitred.replica.upstream.address import Address
from maitred.replica.upstream.answer import AnswerReader, Reader, broken, how_broken
from maitred.replica.upstream.config import UpstreamConfig
from maitred.replica.upstream.dialects import ANTHROPIC, DIALECTS
from maitred.replica.upstream.failures import error_in, failure_of, retry_after_of
from maitred.replica.upstream.gauges import ServerLoad
from maitred.replica.upstream.hearsay import Grapevine
from maitred.replica.upstream.messages import MessagesReader, messages_body
from maitred.replica.upstream.standing import Standing
from maitred.replica.upstream.stream import UpstreamStream
from maitred.replica.upstream.writing import body_of

log = logging.getLogger(__name__)

UNKNOWN_WINDOW_TOKENS = 1 << 20
"""Of a server that does not say how long prompt and answer may be, and for which nobody has declared it."""
UNKNOWN_VOCABULARY = 1 << 31
_MOST_ERROR_BYTES = 64 * 1024
_ERROR_BODY_S = 5.0
_EVENTS = b"text/event-stream"
_NO_REPORT = LoadReport()


class Upstream:
    """Implements `core.relay.TextReplica` over OpenAI's HTTP API, or Anthropic's.

    Args:
        config: Where it is, and how it is spoken to.
        model: The name under which the model is served here.
        context_tokens: Prompt and answer together, if that is declared.
        max_choices: Largest `n`.
        connections: Closes those that are made here; whoever made it closes it.
        health: When it gets fewer requests or none.
        peers: The other servers of the model, which it joins.
        before: The same server as it was spoken to before: what is known of it stays true.

    Attributes:
        name: What ledger and log call it.
        model: What it calls the model.
        address: Where it is.
        standing: Whether it is there, and how well it does.
        window_tokens: Its own word for `context_tokens`, once it has said it.
        reported: What it said last of its own load.
        open_streams: Contexts of `relay` that have not been left. 0 when nothing leaks.
        settings: All that it was made from; equal ones make the same.
    """

    def __init__(
        self,
        config: UpstreamConfig,
        model: str,
        connections: Connections,
        *,
        context_tokens: int | None = None,
        max_choices: int = 128,
        health: HealthConfig | None = None,
        peers: Peers | None = None,
        before: "Upstream | None" = None,
    ) -> None:
        self.config = config
        self.address = Address(config.url)
        self.name = config.name or self.address.host_and_port
        self.dialect = ANTHROPIC if config.kind == "anthropic" else DIALECTS[config.dialect]
        known = None if before is None else before.standing
        self.standing: Standing = known or Standing(self.name, config.probe_every_s, health, peers)
        self.window_tokens: int | None = None if before is None else before.window_tokens
        self.reported = ServerLoad()
        self._grapevine = Grapevine(config.probe_every_s)
        self.open_streams = 0
        self.model = config.model or model
        self._fixed_headers = self._headers()
        self._heads: dict[tuple[str, str], bytes] = {}
        """Of the requests that are sent, without what each has for itself."""
        self._declared_tokens = context_tokens
        self._card: ModelCard | None = None
        self._max_choices = max_choices
        self.settings = (config, context_tokens, max_choices)
        tls = None
        if self.address.tls:
            tls = _trusted if config.ca_file is None else partial(_same, _trust(config.ca_file))
        self._line = Line(connections, self.address.host, self.address.port, config.connect_timeout_s, tls)

    def is_at(self, config: UpstreamConfig) -> bool:
        """Whether these settings lead to the same server under the same name."""
        mine = self.config
        return (mine.url, mine.name, mine.kind, mine.dialect) == (config.url, config.name, config.kind, config.dialect)

    # --- the replica ---

    def card(self) -> ModelCard:
        """See `core.ports.Host`."""
        self.standing.check()
        window = self._declared_tokens or self.window_tokens or UNKNOWN_WINDOW_TOKENS
        if self._card is None or self._card.context_tokens != window:
            self._card = self._card_of(window)
        return self._card

    def _card_of(self, window: int) -> ModelCard:
        return ModelCard(
            name=self.model,
            context_tokens=window,
            vocab_size=UNKNOWN_VOCABULARY,
            eos_token_ids=(),
            max_sequences=UNKNOWN_WINDOW_TOKENS,
            kv_capacity_tokens=window,
            max_choices=self._max_choices,
            dtype="",
            device=self.name,
        )

    @property
    def window_known(self) -> bool:
        """Whether `card` has a window that somebody has named."""
        return (self._declared_tokens or self.window_tokens) is not None

    def load(self) -> LoadReport:
        """See `core.ports.Host`; empty, since what such servers say of themselves is too old to release requests by."""
        return _NO_REPORT

    def tells(self, load: ServerLoad) -> None:
        """It was asked for its load."""
        self.reported = load
        self._grapevine.heard(load, self.open_streams, time.monotonic())

    def hearsay(self, now_s: float) -> Hearsay:
        """What it has to do for others, by its own word; `now_s` is monotonic."""
        return self._grapevine.at(now_s)

    def unheard(self) -> int:
        """See `core.ports.Host`."""
        return self.open_streams

    @property
    def whereabouts(self) -> Mapping[str, str | int]:
        """See `core.relay.TextReplica`."""
        provider = self.config.kind if self.config.kind == "anthropic" else self.config.dialect
        return {"provider": provider, "host": self.address.host, "port": self.address.port, "model": self.model}

    @property
    def weight(self) -> float:
        """See `core.ports.Host`."""
        return self.standing.weight

    def watch(self, listener: Callable[[], None]) -> None:
        """See `core.ports.Host`."""
        self.standing.watch(listener)

    @asynccontextmanager
    async def relay(self, request: TextRequest) -> AsyncIterator[TextStream]:
        """See `core.relay.TextReplica`."""
        standing, config = self.standing, self.config
        attempt, outcome = standing.begin(), Outcome.NEITHER
        path, body, reader = self._exchange(request)
        now_s = asyncio.get_running_loop().time()
        total_s = now_s + config.total_timeout_s
        begin_s = min(now_s + config.first_part_timeout_s, total_s)
        self.open_streams += 1
        try:
            response = await self._ask(path, request, body, begin_s)
            stream = UpstreamStream(
                response,
                reader,
                begin_s=begin_s,
                idle_s=config.idle_timeout_s,
                total_s=total_s,
                begun=partial(standing.answered, attempt),
            )
            try:
                yield stream
                if reader.whole:
                    outcome = Outcome.SUCCESS
            finally:
                stream.close()
        except ReplicaBusy:
            raise
        except ReplicaUnavailable:
            outcome = Outcome.FAILURE
            raise
        except ReplicaLost as failure:
            outcome = Outcome.FAILURE
            log.warning("An answer of the upstream %s failed: %s.", self.name, how_broken(failure))
            raise
        finally:
            self.open_streams -= 1
            standing.ended(attempt, outcome)

    def _exchange(self, request: TextRequest) -> tuple[str, bytes, Reader]:
        """Where the request goes, how it is written there, and who reads the answer."""
        parameters, model = self.config.parameters, request.model or self.model
        if self.config.kind == "anthropic":
            return "messages", messages_body(request, model, parameters), MessagesReader(self.name)
        path = "chat/completions" if request.chat else "completions"
        body = body_of(request, self.dialect, model, parameters)
        return path, body, AnswerReader(self.name, request.choices, self.dialect, int(request.fields.get("n") or 1))

    async def _ask(self, path: str, request: TextRequest, body: bytes, begin_s: float) -> Response:
        """Sends the request; the response, if it is the beginning of an answer."""
        lines = [line_of("x-request-id", request.id)]
        if request.trace is not None:
            lines += [line_of(name, value) for name, value in request.trace.headers().items()]
        try:
            async with asyncio.timeout_at(begin_s):
                response = await self._response(request_of(self._head("POST", path), lines, body))
        except TimeoutError:
            raise self._late("gave no answer", self.config.first_part_timeout_s) from None
        if response.status == 200 and _kind_of(response) == _EVENTS:
            return response
        try:
            raise await self._refusal(response)
        finally:
            response.close()

    @asynccontextmanager
    async def get(self, path: str) -> AsyncIterator[Response]:
        """Asks for a path, on a connection of its own: servers that fail here may close it without a word.

        Raises:
            ReplicaUnavailable: No connection can be made, or not one that is safe.
            ReplicaLost: It ended before a response began.
            Interrupted: From what the response reads.
        """
        response = await self._response(self._head("GET", path) + b"connection: close\r\n\r\n", kept=False)
        try:
            yield response
        finally:
            response.close()

    async def _response(self, request: bytes, *, kept: bool = True) -> Response:
        """Sends a request; the response, when its head is there."""
        try:
            return await self._line.ask(request, kept=kept)
        except Unreachable as error:
            self.standing.missed(f"it cannot be reached ({error})")
            unavailable = ReplicaUnavailable(retry_after_s=self.config.probe_every_s)
            unavailable.add_note(self.standing.reason)
            raise unavailable from None
        except Interrupted as error:
            raise broken(f"it gave no answer ({error})") from None

    def _head(self, method: str, path: str) -> bytes:
        head = self._heads.get((method, path))
        if head is None:
            kinds = {"content-type": "application/json", "accept": _EVENTS.decode()} if method == "POST" else {}
            headers = {"host": self.address.host_and_port, **self._fixed_headers, **kinds}
            head = self._heads[method, path] = head_of(method, self.address.target(path), headers)
        return head

    def _headers(self) -> dict[str, str]:
        config = self.config
        headers = {"user-agent": f"maitred/{__version__}", **self.dialect.headers, **config.headers}
        headers["accept-encoding"] = "identity"
        if config.api_key is not None:
            key = config.api_key.reveal()
            header = self.dialect.key_header
            headers[header] = f"Bearer {key}" if header == "Authorization" else key
        return headers

    async def _refusal(self, response: Response) -> MaitredError:
        """What a response means that is not a stream of events."""
        try:
            async with asyncio.timeout(_ERROR_BODY_S):
                body = await response.body(_MOST_ERROR_BYTES)
        except (TimeoutError, Interrupted):
            body = b""
        error = None
        with suppress(msgspec.MsgspecError, UnicodeError, RecursionError):
            error = error_in(msgspec.json.decode(body))
        if response.status != 200:
            told = [response.headers.get(name, b"").decode("latin-1") for name in (b"retry-after-ms", b"retry-after")]
            return failure_of(self.name, response.status, error, retry_after_of(*told))
        if error is not None:
            return failure_of(self.name, error.status or 502, error, None)
        if not body:
            return broken("it sent nothing")
        return broken(f"it was asked for a stream of events and sent {_kind_of(response).decode('latin-1')[:80]}")

    def _late(self, what: str, seconds: float) -> MaitredError:
        log.warning("The upstream %s %s within %g s.", self.name, what, seconds)
        return ReplicaUnavailable(
            "The server that runs this model did not answer in time. Try again after the time in Retry-After.",
            retry_after_s=1.0,
        )


def _kind_of(response: Response) -> bytes:
    """The media type, without what more is said of it."""
    return response.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()


@cache
def _trusted() -> ssl.SSLContext:
    """Whom this system trusts."""
    return _trust(None)


def _trust(ca_file: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca_file)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _same(context: ssl.SSLContext) -> ssl.SSLContext:
    return context
