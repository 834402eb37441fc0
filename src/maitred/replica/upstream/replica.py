"""One server of somebody else's as a replica: where it is, how it is reached, what is known of it.

Requests go out over HTTP, and answers come back as parts; see `exchange` for one of them.
"""

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import cache, lru_cache, partial
from types import TracebackType

import msgspec

from maitred import __version__
from maitred.core.errors import MaitredError, ReplicaBusy, ReplicaLost, ReplicaUnavailable
from maitred.core.replica import ExternalLoad, LoadReport, ModelCard
from maitred.core.text_replica import TextRequest
from maitred.replica.health.breaker import AttemptOutcome, BreakerAttempt
from maitred.replica.health.config import HealthConfig
from maitred.replica.health.peers import PoolHealth
from maitred.replica.http.connection import Response, ResponseBroken
from maitred.replica.http.pool import ConnectFailed, HostPool, OpenConnections
from maitred.replica.http.request_head import encode_head, encode_line, encode_request
from maitred.replica.upstream.address import Address
from maitred.replica.upstream.anthropic import AnthropicStreamParser, messages_body
from maitred.replica.upstream.config import UpstreamConfig
from maitred.replica.upstream.dialects import ANTHROPIC, DIALECTS
from maitred.replica.upstream.errors import error_in, parse_retry_after, to_failure
from maitred.replica.upstream.external_load import ExternalLoadTracker, ServerLoad
from maitred.replica.upstream.openai_stream import OpenAIStreamParser, StreamParser, broken, how_broken
from maitred.replica.upstream.request_body import encode_body
from maitred.replica.upstream.status import UpstreamStatus
from maitred.replica.upstream.stream import UpstreamStream

UNKNOWN_WINDOW_TOKENS = 1 << 20
"""Of a server that does not say how long prompt and answer may be, and for which nobody has declared it."""
UNKNOWN_VOCABULARY = 1 << 31
_NO_REPORT = LoadReport()


class UpstreamCall:
    """A context: entering it sends the request and gives the answer; leaving it ends what is unfinished.

    ::

        request -> POST -> head within the time -> parts, each within its time -> [DONE]

    Every wait has an end, and every end that is not the answer's own is a failure. Leaving the context closes the
    connection unless the answer came whole, and that is how all servers are told to stop computing.

    Args:
        upstream: The server.
        request: What is asked.
    """

    __slots__ = ("_attempt", "_reader", "_request", "_stream", "_upstream")

    _attempt: BreakerAttempt
    _reader: StreamParser
    _stream: UpstreamStream

    def __init__(self, upstream: "UpstreamReplica", request: TextRequest) -> None:
        self._upstream = upstream
        self._request = request

    async def __aenter__(self) -> UpstreamStream:
        upstream, config = self._upstream, self._upstream.config
        attempt = self._attempt = upstream.status.start_attempt()
        upstream.open_streams += 1
        try:
            path, body = self._written()
            now_s = asyncio.get_running_loop().time()
            total_s = now_s + config.total_timeout_s
            begin_s = min(now_s + config.first_part_timeout_s, total_s)
            response = await self._ask(path, body, begin_s)
            if response.status != 200 or _media_type(response.headers.get(b"content-type", b"")) != _EVENTS:
                raise await self._refusal(response)
            self._stream = UpstreamStream(
                response,
                self._reader,
                begin_s=begin_s,
                idle_s=config.idle_timeout_s,
                total_s=total_s,
                begun=partial(upstream.status.on_first_part, attempt),
            )
        except BaseException as error:
            self._over(error)
            raise
        return self._stream

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
        self._over(error)

    def _over(self, error: BaseException | None) -> None:
        """Says of the server what its end says."""
        outcome = AttemptOutcome.NEITHER
        if error is None:
            if self._reader.whole:
                outcome = AttemptOutcome.SUCCESS
        elif isinstance(error, ReplicaLost):
            outcome = AttemptOutcome.FAILURE
            log.warning("An answer of the upstream %s failed: %s.", self._upstream.name, how_broken(error))
        elif isinstance(error, ReplicaUnavailable) and not isinstance(error, ReplicaBusy):
            outcome = AttemptOutcome.FAILURE
        self._upstream.open_streams -= 1
        self._upstream.status.on_end(self._attempt, outcome)

    def _written(self) -> tuple[str, bytes]:
        """Where the request goes, and how it is written there."""
        upstream, request = self._upstream, self._request
        parameters, model = upstream.config.parameters, request.model or upstream.model
        if upstream.config.kind == "anthropic":
            self._reader = AnthropicStreamParser(upstream.name)
            return "messages", messages_body(request, model, parameters)
        samples = int(request.fields.get("n") or 1)
        self._reader = OpenAIStreamParser(upstream.name, request.choices, upstream.dialect, samples)
        path = "chat/completions" if request.chat else "completions"
        return path, encode_body(request, upstream.dialect, model, parameters)

    async def _ask(self, path: str, body: bytes, begin_s: float) -> Response:
        """Sends the request; the response, when its head is there."""
        upstream, request = self._upstream, self._request
        lines = [encode_line("x-request-id", request.id)]
        if request.trace is not None:
            lines += [encode_line(name, value) for name, value in request.trace.headers().items()]
        try:
            return await upstream.line.ask(encode_request(upstream.head("POST", path), lines, body), until_s=begin_s)
        except TimeoutError:
            log.warning(
                "The upstream %s gave no answer within %g s.", upstream.name, upstream.config.first_part_timeout_s
            )
            raise ReplicaUnavailable(
                "The server that runs this model did not answer in time. Try again after the time in Retry-After.",
                retry_after_s=1.0,
            ) from None
        except (ConnectFailed, ResponseBroken) as error:
            raise upstream.missed(error) from None

    async def _refusal(self, response: Response) -> MaitredError:
        """What a response means that is not a stream of events."""
        try:
            async with asyncio.timeout(_ERROR_BODY_S):
                body = await response.body(_MOST_ERROR_BYTES)
        except (TimeoutError, ResponseBroken):
            body = b""
        finally:
            response.close()
        name, headers, error = self._upstream.name, response.headers, None
        with suppress(msgspec.MsgspecError, UnicodeError, RecursionError):
            error = error_in(msgspec.json.decode(body))
        if response.status != 200:
            told = [headers.get(header, b"").decode("latin-1") for header in (b"retry-after-ms", b"retry-after")]
            return to_failure(name, response.status, error, parse_retry_after(*told))
        if error is not None:
            return to_failure(name, error.status or 502, error, None)
        if not body:
            return broken("it sent nothing")
        kind = _media_type(headers.get(b"content-type", b"")).decode("latin-1")
        return broken(f"it was asked for a stream of events and sent {kind[:80]}")


class UpstreamReplica:
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
        status: Whether it is there, and how well it does.
        window_tokens: Its own word for `context_tokens`, once it has said it.
        reported: What it said last of its own load.
        open_streams: Contexts of `send` that have not been left. 0 when nothing leaks.
        settings: All that it was made from; equal ones make the same.
    """

    def __init__(
        self,
        config: UpstreamConfig,
        model: str,
        connections: OpenConnections,
        *,
        context_tokens: int | None = None,
        max_choices: int = 128,
        health: HealthConfig | None = None,
        peers: PoolHealth | None = None,
        before: "UpstreamReplica | None" = None,
    ) -> None:
        self.config = config
        self.address = Address(config.url)
        self.name = config.name or self.address.host_and_port
        self.dialect = ANTHROPIC if config.kind == "anthropic" else DIALECTS[config.dialect]
        known = None if before is None else before.status
        self.status: UpstreamStatus = known or UpstreamStatus(self.name, config.probe_every_s, health, peers)
        self.window_tokens: int | None = None if before is None else before.window_tokens
        self.reported = ServerLoad()
        self._grapevine = ExternalLoadTracker(config.probe_every_s)
        self.open_streams = 0
        self.model = config.model or model
        provider = config.kind if config.kind == "anthropic" else config.dialect
        self._location: Mapping[str, str | int] = {
            "provider": provider,
            "host": self.address.host,
            "port": self.address.port,
            "model": self.model,
        }
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
        self.line = HostPool(connections, self.address.host, self.address.port, config.connect_timeout_s, tls)

    def is_at(self, config: UpstreamConfig) -> bool:
        """Whether these settings lead to the same server under the same name."""
        mine = self.config
        return (mine.url, mine.name, mine.kind, mine.dialect) == (config.url, config.name, config.kind, config.dialect)

    # --- the replica ---

    def card(self) -> ModelCard:
        """See `core.ports.Host`."""
        self.status.check()
        window = self._declared_tokens or self.window_tokens or UNKNOWN_WINDOW_TOKENS
        if self._card is None or self._card.context_tokens != window:
            self._card = self._make_card(window)
        return self._card

    def _make_card(self, window: int) -> ModelCard:
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

    def on_load_report(self, load: ServerLoad) -> None:
        """It was asked for its load."""
        self.reported = load
        self._grapevine.on_report(load, self.open_streams, time.monotonic())

    def external_load(self, now_s: float) -> ExternalLoad:
        """What it has to do for others, by its own word; `now_s` is monotonic."""
        return self._grapevine.at(now_s)

    def unreported(self) -> int:
        """See `core.ports.Host`."""
        return self.open_streams

    @property
    def location(self) -> Mapping[str, str | int]:
        """See `core.relay.TextReplica`."""
        return self._location

    @property
    def weight(self) -> float:
        """See `core.ports.Host`."""
        return self.status.weight

    def on_change(self, listener: Callable[[], None]) -> None:
        """See `core.ports.Host`."""
        self.status.on_change(listener)

    def send(self, request: TextRequest) -> UpstreamCall:
        """See `core.relay.TextReplica`."""
        return UpstreamCall(self, request)

    # --- how it is reached ---

    @asynccontextmanager
    async def get(self, path: str) -> AsyncIterator[Response]:
        """Asks for a path, on a connection of its own: servers that fail here may close it without a word.

        Raises:
            ReplicaUnavailable: No connection can be made, or not one that is safe.
            ReplicaLost: It ended before a response began.
            Interrupted: From what the response reads.
        """
        try:
            response = await self.line.ask(self.head("GET", path) + b"connection: close\r\n\r\n", kept=False)
        except (ConnectFailed, ResponseBroken) as error:
            raise self.missed(error) from None
        try:
            yield response
        finally:
            response.close()

    def missed(self, error: ConnectFailed | ResponseBroken) -> ReplicaUnavailable | ReplicaLost:
        """What it means that no response has come; nobody is sent to a server that cannot be reached."""
        if isinstance(error, ResponseBroken):
            return broken(f"it gave no answer ({error})")
        self.status.on_unreachable(f"it cannot be reached ({error})")
        unavailable = ReplicaUnavailable(retry_after_s=self.config.probe_every_s)
        unavailable.add_note(self.status.reason)
        return unavailable

    def head(self, method: str, path: str) -> bytes:
        """Of a request for a path, without what that has for itself."""
        head = self._heads.get((method, path))
        if head is None:
            kinds = {"content-type": "application/json", "accept": "text/event-stream"} if method == "POST" else {}
            headers = {"host": self.address.host_and_port, **self._fixed_headers, **kinds}
            head = self._heads[method, path] = encode_head(method, self.address.target(path), headers)
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


log = logging.getLogger(__name__)

_MOST_ERROR_BYTES = 64 * 1024
_ERROR_BODY_S = 5.0
_EVENTS = b"text/event-stream"


@lru_cache(64)
def _media_type(content_type: bytes) -> bytes:
    """It, without what more is said of it."""
    return content_type.partition(b";")[0].strip().lower()
