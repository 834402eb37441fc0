"""Upstream replica: one server of another operator, used as a replica over HTTP.

`UpstreamReplica` represents the server, and `UpstreamCall` one request to it.
"""

import asyncio
import dataclasses
import hashlib
import logging
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache, partial
from types import TracebackType
from typing import Any

import msgspec

from maitred import __version__
from maitred.core.errors import (
    AccountRefused,
    InvalidRequest,
    MaitredError,
    ReplicaBusy,
    ReplicaLost,
    ReplicaNotInTime,
    ReplicaUnavailable,
    Unsupported,
)
from maitred.core.inference import NativeApi, NativeRequest
from maitred.core.replica import ExternalLoad, LoadReport, ModelCard
from maitred.core.text_replica import PassthroughRequest, TextRequest
from maitred.replica.health.breaker import AttemptOutcome, BreakerAttempt
from maitred.replica.health.config import HealthConfig
from maitred.replica.http.connection import Response, ResponseBroken
from maitred.replica.http.pool import ConnectFailed, HttpConnectionPool, OpenConnections
from maitred.replica.http.proxy import proxy_for
from maitred.replica.http.request_head import encode_head, encode_header, encode_request
from maitred.replica.upstream.anthropic import (
    encode_count_body,
    encode_messages_body,
    encode_native_body,
    parse_count,
)
from maitred.replica.upstream.config import UpstreamConfig
from maitred.replica.upstream.dialects import ANTHROPIC_DIALECT, DIALECTS
from maitred.replica.upstream.errors import (
    failure_details,
    make_replica_lost,
    make_response_error,
    make_timeout_error,
    parse_error_body,
    parse_retry_after,
)
from maitred.replica.upstream.event_stream import EventStreamParser
from maitred.replica.upstream.external_load import ExternalLoadTracker, ScrapedLoad
from maitred.replica.upstream.openai_stream import OpenAIStreamParser
from maitred.replica.upstream.passthrough import UpstreamAnswer
from maitred.replica.upstream.request_body import encode_body
from maitred.replica.upstream.responses import MISSING_STATUSES, encode_responses_body, make_missing_error
from maitred.replica.upstream.secret_mask import SecretMask
from maitred.replica.upstream.status import UpstreamStatus
from maitred.replica.upstream.stream import StreamParser, UpstreamStream
from maitred.replica.upstream.url import UpstreamUrl
from maitred.wire.anthropic.answer import MessagesStreamParser
from maitred.wire.responses.answer import ResponsesStreamParser

FIRST_PART_TIMEOUT_S = 120.0
"""Default of `first_part_timeout_s` if nothing else can be asked, and..."""
FAILOVER_TIMEOUT_S = 30.0
"""...if something can."""
_ANSWER_TIMEOUT_S = 300.0
"""The same for requests that are passed on as they are: an image comes at once, after a minute or two."""
_NO_METHOD_STATUSES = (405, 501)
_NOT_FOUND = ("", "Not Found", "404 page not found")
"""Messages of servers about a path that they do not have."""
DEFAULT_CONTEXT_TOKENS = 1 << 20
"""Context length if the server does not report it and none is configured."""
_ASSUMED_MAX_SEQUENCES = 1 << 20
_ASSUMED_VOCABULARY_SIZE = 1 << 31
"""Servers do not report their batch size nor that of their vocabulary, so neither may limit a request here."""
_EMPTY_LOAD_REPORT = LoadReport()
_NOT_IN_ANSWERS = frozenset(
    {
        *("name", "api_key", "ca_file", "continues_answers", "max_answer_bytes", "probe_every_s", "probe_timeout_s"),
        *("connect_timeout_s", "first_part_timeout_s", "idle_timeout_s", "total_timeout_s"),
    }
)
"""Settings of a server that change how it is reached, and none of its answers."""


class UpstreamCall:
    """Context manager of one request: entering sends it and returns the stream; leaving closes the stream.

    ::

        request -> POST -> head within the time -> parts, each within its time -> [DONE]

    Every wait has a deadline, and a response that does not end with its terminator is a failure. If the response is
    incomplete, leaving the context closes the connection, which makes the server cancel the request.

    Args:
        upstream: The upstream to which the request is sent.
        request: The request.
    """

    __slots__ = ("_attempt", "_body", "_parser", "_request", "_stream", "_upstream")

    _attempt: BreakerAttempt
    _body: bytes
    """Body of the request, to tell the caller's words from the server's."""
    _parser: StreamParser
    _stream: UpstreamStream

    def __init__(self, upstream: "UpstreamReplica", request: TextRequest) -> None:
        self._upstream = upstream
        self._request = request

    async def __aenter__(self) -> UpstreamStream:
        upstream, config = self._upstream, self._upstream.config
        attempt = self._attempt = upstream.status.start_attempt()
        upstream.open_streams += 1
        try:
            path, body, ignored_fields = self._prepare()
            now_s = asyncio.get_running_loop().time()
            deadline_s = now_s + config.total_timeout_s
            first_part_timeout_s = config.first_part_timeout_s
            if first_part_timeout_s is None:
                first_part_timeout_s = FAILOVER_TIMEOUT_S if self._request.has_other_target else FIRST_PART_TIMEOUT_S
            first_token_deadline_s = min(now_s + first_part_timeout_s, deadline_s)
            self._body = body
            response = await self._send(path, body, first_token_deadline_s)
            if not 200 <= response.status < 300:
                raise await self._make_error(response)
            self._stream = UpstreamStream(
                response,
                self._parser,
                first_token_deadline_s=first_token_deadline_s,
                idle_timeout_s=config.idle_timeout_s,
                deadline_s=deadline_s,
                max_bytes=config.max_answer_bytes,
                mask=upstream.secret_mask,
                on_first_token=partial(upstream.status.on_first_token, attempt),
                ignored_fields=ignored_fields,
                is_passthrough=self._native is not None,
            )
        except BaseException as error:
            self._record_outcome(error)
            raise
        return self._stream

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
        self._record_outcome(error)

    def _record_outcome(self, error: BaseException | None) -> None:
        """Records the outcome of the attempt, from the error and the completeness of the response."""
        is_complete = error is None and self._parser.is_complete
        self._upstream.end_attempt(self._attempt, error, is_complete=is_complete)

    def _prepare(self) -> tuple[str, bytes, list[str]]:
        """Returns the path, the body, and the fields that it leaves out; creates the parser of the response."""
        upstream, request = self._upstream, self._request
        parameters, model = upstream.config.parameters, request.model or upstream.server_model
        native = self._native
        if native is None and request.native is not None and request.native.beyond_chat is not None:
            raise request.native.beyond_chat
        if upstream.config.kind == "anthropic":
            continues_answers = upstream.config.continues_answers
            encode = encode_messages_body if native is None else encode_native_body
            body, ignored = encode(request, model, parameters, continues_answers=continues_answers)
            self._parser = EventStreamParser(upstream.name, MessagesStreamParser(), body)
            return "messages", body, ignored
        if native is not None:
            body, ignored = encode_responses_body(
                *(request, model, parameters),
                model=upstream.model,
                reads_thoughts=bool(upstream.dialect.thought_fields),
                reasons=upstream.reasons,
            )
            answer_parser = ResponsesStreamParser(upstream.model, upstream.on_reasoning)
            self._parser = EventStreamParser(upstream.name, answer_parser, body)
            return "responses", body, ignored
        body, ignored = encode_body(request, upstream.dialect, model, parameters, upstream.config.request_fields)
        choices_per_prompt = int(request.fields.get("n") or 1)
        self._parser = OpenAIStreamParser(
            upstream.name, request.choices, upstream.dialect, choices_per_prompt, request_body=body
        )
        return "chat/completions" if request.chat else "completions", body, [*request.left_out, *ignored]

    @property
    def _native(self) -> NativeRequest | None:
        """The request in the API that its client and the server both speak; None: they speak different ones."""
        native = self._request.native
        return native if native is not None and native.api == self._upstream.native_api else None

    async def _send(self, path: str, body: bytes, first_token_deadline_s: float) -> Response:
        """Sends the request, waits for the response head and returns the response."""
        upstream, request = self._upstream, self._request
        header_lines = [encode_header("x-request-id", request.id)]
        if (native := self._native) is not None:
            header_lines += [encode_header(name, value) for name, value in native.headers.items()]
        if request.trace is not None:
            header_lines += [encode_header(name, value) for name, value in request.trace.headers().items()]
        try:
            return await upstream.connection_pool.send(
                encode_request(upstream.request_head("POST", path), header_lines, body),
                deadline_s=first_token_deadline_s,
            )
        except TimeoutError:
            raise make_timeout_error("it gave no answer in time") from None
        except (ConnectFailed, ResponseBroken) as error:
            raise upstream.make_no_response_error(error) from None

    async def _make_error(self, response: Response) -> MaitredError:
        """Makes the exception for a response whose status is no success."""
        body = await _read_error(self._upstream, response)
        name = self._upstream.name
        retry_after_s = self._upstream.retry_after_s(response)
        status, error = response.status, parse_error_body(body)
        if status in MISSING_STATUSES and (native := self._native) is not None and native.api == "responses":
            if (missing := make_missing_error(name, status, error)) is not None:
                return missing
            status = 400
        return make_response_error(name, status, error, retry_after_s, self._body)


class PassthroughCall:
    """Context manager of one request: entering sends it and returns the answer; leaving ends it.

    Args:
        upstream: The upstream to which the request is sent.
        request: The request.
    """

    _attempt: BreakerAttempt
    """Attempt that the server's circuit breaker counts."""
    _answer: UpstreamAnswer

    def __init__(self, upstream: "UpstreamReplica", request: PassthroughRequest) -> None:
        self._upstream = upstream
        self._request = request

    async def __aenter__(self) -> UpstreamAnswer:
        upstream = self._upstream
        self._attempt = upstream.status.start_attempt()
        upstream.open_streams += 1
        try:
            now_s = asyncio.get_running_loop().time()
            deadline_s = now_s + upstream.config.total_timeout_s
            timeout_s = upstream.config.first_part_timeout_s or _ANSWER_TIMEOUT_S
            response = await self._send(min(now_s + timeout_s, deadline_s))
            if not 200 <= response.status < 300:
                raise await self._make_error(response)
            upstream.status.on_first_token(self._attempt)
            try:
                self._answer = UpstreamAnswer(
                    response, upstream.config, upstream.name, mask=upstream.secret_mask, deadline_s=deadline_s
                )
            except MaitredError:
                response.close()
                raise
        except BaseException as error:
            upstream.end_attempt(self._attempt, error, is_complete=False)
            raise
        return self._answer

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._answer.close()
        self._upstream.end_attempt(self._attempt, error, is_complete=self._answer.is_complete)

    async def _send(self, head_deadline_s: float) -> Response:
        """Sends the request and waits for the head of the response."""
        upstream, request = self._upstream, self._request
        model = request.server_model or upstream.server_model
        size, pieces = request.body.encode(model, upstream.config.parameters)
        head = upstream.passthrough_head(request.path, request.body.content_type)
        lines = [encode_header("x-request-id", request.id)]
        if request.trace is not None:
            lines += [encode_header(name, value) for name, value in request.trace.headers().items()]
        try:
            if request.body.is_small:
                body = encode_request(head, lines, b"".join(pieces))
                return await upstream.connection_pool.send(body, deadline_s=head_deadline_s)
            lines += [b"connection: close", b"content-length: %d" % size]
            return await upstream.connection_pool.send_streamed(
                b"%b%b\r\n\r\n" % (head, b"\r\n".join(lines)), pieces, deadline_s=head_deadline_s
            )
        except TimeoutError:
            raise make_timeout_error("it gave no answer in time") from None
        except (ConnectFailed, ResponseBroken) as error:
            raise upstream.make_no_response_error(error) from None

    async def _make_error(self, response: Response) -> MaitredError:
        """Makes the exception for a response whose status is no success."""
        error = parse_error_body(await _read_error(self._upstream, response))
        status, path = response.status, self._request.path
        if status in _NO_METHOD_STATUSES or (status == 404 and error.message.strip() in _NOT_FOUND):
            log.error("The upstream %s has no path %s: it answered %d.", self._upstream.name, path, status)
            return Unsupported(
                f"The server that runs this model has no /{path}. Its operator must look at the upstream's URL, or "
                "name another server.",
                param="model",
            )
        sent = msgspec.json.encode(dict(self._request.body.fields()))
        retry_after_s = self._upstream.retry_after_s(response)
        return make_response_error(self._upstream.name, status, error, retry_after_s=retry_after_s, request_body=sent)


class UpstreamReplica:
    """Replica over OpenAI's or Anthropic's HTTP API. Implements `core.text_replica.TextReplica`.

    Args:
        config: Settings of the server.
        model: Name of the model in this gateway; it is sent to the server unless `config.model` is set.
        context_tokens: Configured context length; None: the server's report is used.
        max_choices: Maximum of `n`.
        connections: Set of open connections, to which the connection pool adds its own.
        health: Settings of the replica's health.
        previous: Replica of the same server before a change of the configuration; its status is kept.

    Attributes:
        name: Name of the server in the ledger and in log messages.
        model: Name of the model in this gateway.
        server_model: Name of the model at the server.
        native_api: API in which the server gets requests as their clients wrote them; None: it speaks chat completions
            only.
        reasons: Whether the model has been seen to reason in an answer of the Responses API.
        url: URL of the server's API.
        status: Status of the server: probe results, health and operator's state.
        reported_context_tokens: Context length that the server has reported; None: it has not reported any.
        scraped_load: Load as of the last scrape of the server's metrics.
        open_streams: Number of open `generate` contexts. It is 0 when no request is running.
        trace_attributes: Attributes of the server for traces.
        answer_identity: Digest of everything here that its answers depend on.
        secret_mask: Masks the server's credential in what it sends.
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
        previous: "UpstreamReplica | None" = None,
    ) -> None:
        self.config = config
        self.url = UpstreamUrl(config.url)
        self.name = config.name or self.url.host_and_port
        self.dialect = ANTHROPIC_DIALECT if config.kind == "anthropic" else DIALECTS[config.dialect]
        if config.continues_answers and self.dialect.continuation_fields is None:
            self.dialect = dataclasses.replace(self.dialect, continuation_fields={})
        previous_status = None if previous is None else previous.status
        self.status: UpstreamStatus = previous_status or UpstreamStatus(self.name, config.probe_every_s, health)
        self.reported_context_tokens: int | None = None if previous is None else previous.reported_context_tokens
        self.scraped_load = ScrapedLoad()
        self._load_tracker = ExternalLoadTracker(config.probe_every_s)
        self.open_streams = 0
        self.model = model
        self.server_model = config.model or model
        self.native_api = _native_api(config, self.url)
        self.reasons = False
        provider = config.kind if config.kind == "anthropic" else config.dialect
        self.trace_attributes: Mapping[str, str | int] = {
            "provider": provider,
            "host": self.url.host,
            "port": self.url.port,
            "model": self.server_model,
        }
        settings = [getattr(config, name) for name in config.__struct_fields__ if name not in _NOT_IN_ANSWERS]
        self.answer_identity = hashlib.blake2b(
            msgspec.msgpack.encode([model, settings], order="deterministic"), digest_size=16
        ).digest()
        self._proxy = proxy_for(self.url.host, self.url.port, os.environ, uses_tls=self.url.uses_tls)
        self._static_headers = self._make_static_headers()
        self.secret_mask = SecretMask([] if config.api_key is None else [config.api_key.reveal()])
        self._request_heads: dict[tuple[str, str], bytes] = {}
        """Encoded shared heads by method and path; see `encode_head`."""
        self._configured_context_tokens = context_tokens
        self._card: ModelCard | None = None
        self._max_choices = max_choices
        tls = None
        if self.url.uses_tls:
            tls = (
                _system_tls_context
                if config.ca_file is None
                else partial(_return_context, _make_tls_context(config.ca_file))
            )
        self.connection_pool = HttpConnectionPool(
            connections, self.url.host, self.url.port, config.connect_timeout_s, tls=tls, proxy=self._proxy
        )

    def is_same_server(self, config: UpstreamConfig) -> bool:
        """Returns whether these settings have the same URL, name, kind and dialect as this replica."""
        own_config = self.config
        return (own_config.url, own_config.name, own_config.kind, own_config.dialect) == (
            config.url,
            config.name,
            config.kind,
            config.dialect,
        )

    def has_settings(self, config: UpstreamConfig, context_tokens: int | None, max_choices: int) -> bool:
        """Returns whether the replica was made with exactly these settings."""
        own_settings = (self.config, self._configured_context_tokens, self._max_choices)
        return own_settings == (config, context_tokens, max_choices)

    def on_reasoning(self) -> None:
        """Notes that the model reasons."""
        self.reasons = True

    @property
    def can_continue(self) -> bool:
        """Whether the server goes on with an answer that another server has begun."""
        return self.dialect.continuation_fields is not None

    # --- replica interface ---

    def card(self) -> ModelCard:
        """Returns the model card. Implements `core.replica.HasModelCard`."""
        self.status.raise_if_unavailable()
        context_tokens = self._configured_context_tokens or self.reported_context_tokens or DEFAULT_CONTEXT_TOKENS
        if self._card is None or self._card.context_tokens != context_tokens:
            self._card = self._make_card(context_tokens)
        return self._card

    def _make_card(self, context_tokens: int) -> ModelCard:
        return ModelCard(
            name=self.server_model,
            context_tokens=context_tokens,
            vocab_size=_ASSUMED_VOCABULARY_SIZE,
            eos_token_ids=(),
            max_sequences=_ASSUMED_MAX_SEQUENCES,
            kv_capacity_tokens=context_tokens,
            max_choices=self._max_choices,
            dtype="",
            device=self.name,
        )

    def load(self) -> LoadReport:
        """Returns an empty report. What the server's metrics say, some seconds late, is in `external_load`.

        Implements `core.replica.ReplicaBase`.
        """
        return _EMPTY_LOAD_REPORT

    def on_load_scraped(self, load: ScrapedLoad) -> None:
        """Records the load that was read from the server's metrics."""
        self.scraped_load = load
        self._load_tracker.on_report(load, self.open_streams, time.monotonic())

    def external_load(self, now_s: float) -> ExternalLoad:
        """Returns the load of other callers, from the server's metrics; `now_s` is monotonic time."""
        return self._load_tracker.estimate(now_s)

    def count_unreported(self) -> int:
        """Returns the number of open requests. Implements `core.replica.ReplicaBase`."""
        return self.open_streams

    @property
    def weight(self) -> float:
        """Weight among the replica's peers, above 0 and up to 1. Implements `core.replica.ReplicaBase`."""
        return self.status.weight

    def is_refusing(self) -> bool:
        """Returns whether the next request begins elsewhere, if it can. Implements `core.text_replica.TextReplica`."""
        return self.status.is_refusing()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every change of the server's status. Implements `core.replica.ReplicaBase`."""
        self.status.on_change(listener)

    def generate(self, request: TextRequest) -> UpstreamCall:
        """Returns the context manager of one request; entering it sends the request.

        Implements `core.text_replica.TextReplica`.
        """
        return UpstreamCall(self, request)

    async def count_tokens(self, request: NativeRequest, model: str | None) -> Mapping[str, Any] | None:
        """Asks the server for the tokens of a prompt. Implements `core.text_replica.TextReplica`."""
        if self.native_api != request.api or request.api != "messages" or not self.status.is_up:
            return None
        body = encode_count_body(request.fields, model or self.server_model)
        headers = [encode_header(name, value) for name, value in request.headers.items()]
        try:
            response = await self.connection_pool.send(
                encode_request(self.request_head("POST", "messages/count_tokens"), headers, body),
                deadline_s=asyncio.get_running_loop().time() + _COUNT_TIMEOUT_S,
            )
            async with asyncio.timeout(_COUNT_TIMEOUT_S):
                written = self.secret_mask.apply(await response.read_body(_MAX_ERROR_BYTES))
        except (TimeoutError, ConnectFailed, ResponseBroken) as error:
            log.warning("The upstream %s does not count tokens: %s.", self.name, error)
            return None
        response.close()
        if 200 <= response.status < 300:
            return parse_count(written)
        refusal = make_response_error(self.name, response.status, parse_error_body(written), None, body)
        if isinstance(refusal, InvalidRequest):
            raise refusal
        log.warning("The upstream %s does not count tokens: %s.", self.name, failure_details(refusal))
        return None

    def pass_through(self, request: PassthroughRequest) -> PassthroughCall:
        """Returns the context manager of a request that is sent as it is; entering it sends the request.

        Implements `core.text_replica.PassthroughReplica`.
        """
        return PassthroughCall(self, request)

    def end_attempt(self, attempt: BreakerAttempt, error: BaseException | None, *, is_complete: bool) -> None:
        """Records the outcome of a request, from its error and from whether its answer is complete."""
        outcome = AttemptOutcome.NEUTRAL
        if error is None:
            if is_complete:
                outcome = AttemptOutcome.SUCCESS
        elif isinstance(error, ReplicaLost):
            outcome = AttemptOutcome.FAILURE
            log.warning("An answer of the upstream %s failed: %s.", self.name, failure_details(error))
        elif isinstance(error, AccountRefused):
            outcome = AttemptOutcome.ACCOUNT_REFUSED
        elif isinstance(error, ReplicaUnavailable):
            if isinstance(error, ReplicaNotInTime):
                log.warning("The upstream %s gave no answer: %s.", self.name, failure_details(error))
            outcome = AttemptOutcome.BUSY if isinstance(error, ReplicaBusy) else AttemptOutcome.FAILURE
        self.open_streams -= 1
        retry_after_s = error.retry_after_s if isinstance(error, ReplicaBusy) else None
        self.status.on_end(attempt, outcome, retry_after_s=retry_after_s)

    # --- HTTP requests ---

    def retry_after_s(self, response: Response) -> float | None:
        """Returns the time that a response asks to wait before a retry; None: it names none."""
        after_ms, after, date = (
            response.headers.get(header, b"").decode("latin-1")
            for header in (b"retry-after-ms", b"retry-after", b"date")
        )
        return parse_retry_after(after_ms, after, date, time.time())

    def passthrough_head(self, path: str, content_type: str) -> bytes:
        """Returns the shared head of a request that is sent as it is, with the content type of its body."""
        headers = {"host": self.url.host_and_port, **self._static_headers, "content-type": content_type}
        return encode_head("POST", self._target(path), headers | {"accept": "*/*"})

    def _target(self, path: str) -> str:
        """Returns the target of a request: the whole URL for a proxy that passes requests on (RFC 9112, 3.2.2)."""
        target = self.url.target(path)
        return target if self._proxy is None or self.url.uses_tls else f"http://{self.url.host_and_port}{target}"

    @asynccontextmanager
    async def get(self, path: str) -> AsyncIterator[Response]:
        """Sends a GET request on a new connection, so that no error is caused by a stale connection.

        Raises:
            ReplicaUnavailable: The connection or its TLS handshake failed.
            ReplicaLost: The connection ended before the response head.
            ResponseBroken: The body is incomplete; raised inside the context while it is read.
        """
        try:
            response = await self.connection_pool.send(
                self.request_head("GET", path) + b"connection: close\r\n\r\n", reuse=False
            )
        except (ConnectFailed, ResponseBroken) as error:
            raise self.make_no_response_error(error) from None
        try:
            yield response
        finally:
            response.close()

    def make_no_response_error(self, error: ConnectFailed | ResponseBroken) -> ReplicaUnavailable | ReplicaLost:
        """Makes the exception for a request without a response; marks an unreachable server as down."""
        if isinstance(error, ResponseBroken):
            return make_replica_lost(f"it gave no answer ({error})")
        was_up = self.status.is_up
        self.status.mark_down(f"it cannot be reached ({error})")
        if was_up:
            log.error("The upstream %s is away: %s.", self.name, self.status.reason)
        unavailable = ReplicaUnavailable(retry_after_s=self.config.probe_every_s)
        unavailable.add_note(self.status.reason)
        return unavailable

    def request_head(self, method: str, path: str) -> bytes:
        """Returns the shared head of all requests for a path, encoded once; see `encode_head`."""
        head = self._request_heads.get((method, path))
        if head is None:
            body_headers = (
                {"content-type": "application/json", "accept": "text/event-stream"} if method == "POST" else {}
            )
            headers = {"host": self.url.host_and_port, **self._static_headers, **body_headers}
            head = self._request_heads[method, path] = encode_head(method, self._target(path), headers)
        return head

    def _make_static_headers(self) -> dict[str, str]:
        config = self.config
        headers = {"user-agent": f"maitred/{__version__}", **self.dialect.headers, **config.headers}
        headers["accept-encoding"] = "identity"
        if config.api_key is not None:
            key = config.api_key.reveal()
            header = self.dialect.api_key_header
            headers[header] = f"Bearer {key}" if header == "Authorization" else key
        if self._proxy is not None and self._proxy.authorization and not self.url.uses_tls:
            headers["proxy-authorization"] = self._proxy.authorization
        return headers


async def _read_error(upstream: UpstreamReplica, response: Response) -> bytes:
    """Reads the body of a response whose status is no success, without secrets; empty if it does not come soon."""
    try:
        async with asyncio.timeout(_ERROR_BODY_TIMEOUT_S):
            body = await response.read_body(_MAX_ERROR_BYTES)
    except (TimeoutError, ResponseBroken):
        body = b""
    finally:
        response.close()
    return upstream.secret_mask.apply(body)


def _native_api(config: UpstreamConfig, url: UpstreamUrl) -> NativeApi | None:
    """Returns the API in which a server gets requests as their clients wrote them; None: there is none."""
    if config.kind == "anthropic":
        return "messages"
    speaks_responses = config.responses
    if speaks_responses is None:
        speaks_responses = config.dialect == "openai" and f".{url.host}".endswith(_OPENAI_HOST)
    return "responses" if speaks_responses else None


@cache
def _system_tls_context() -> ssl.SSLContext:
    """Returns a TLS context with the system's certificate authorities."""
    return _make_tls_context(None)


def _make_tls_context(ca_file: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca_file)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _return_context(context: ssl.SSLContext) -> ssl.SSLContext:
    return context


log = logging.getLogger(__name__)

_OPENAI_HOST = ".api.openai.com"
"""End of OpenAI's own hosts; those of its regions have a name before it."""
_MAX_ERROR_BYTES = 64 * 1024
_ERROR_BODY_TIMEOUT_S = 5.0
_COUNT_TIMEOUT_S = 10.0
