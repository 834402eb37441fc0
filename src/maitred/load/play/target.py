"""Target of a load: its models, the fields that it accepts, and the bytes of a request to it."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from maitred import __version__
from maitred.core.errors import InvalidRequest, Unavailable
from maitred.load.measure.record import RequestRecord, UserOutcome
from maitred.load.play.client.answer import StreamTotals, error_message
from maitred.load.play.client.caller import LoadClient
from maitred.load.play.client.connection import ConnectionFailed
from maitred.load.play.client.origin import Origin
from maitred.load.play.client.pool import ConnectionPool
from maitred.load.spec import LoadTarget
from maitred.load.workload import prompts
from maitred.text.tokenizer import Tokenizer

Message = dict[str, str]

PROBE_WORDS = (40, 240)
PROBE_TIMEOUT_S = 120.0


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True)
class TargetDialect:
    """Dialect of a target: the fields of the API that it accepts.

    Attributes:
        ignore_eos: Whether the target accepts ``ignore_eos``, which keeps answers from ending early.
        limit_field: Name of the field for the longest answer.
    """

    ignore_eos: bool
    limit_field: str = "max_tokens"


class RequestEncoder:
    """Encoder of requests to one target."""

    def __init__(self, target: LoadTarget, origin: Origin, model: str, dialect: TargetDialect) -> None:
        self._target = target
        self._origin = origin
        self._path = "/v1/chat/completions" if target.endpoint == "chat" else "/v1/completions"
        self._heads: dict[str | None, bytes] = {}
        self._fields: dict[str, Any] = {"model": model}
        if target.stream:
            self._fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if dialect.ignore_eos:
            self._fields["ignore_eos"] = True
        self._limit_field = dialect.limit_field
        self._more = extra_fields(target)

    def encode(
        self, messages: Sequence[Message], output_tokens: int, *, key: str | None = None, user: str | None = None
    ) -> bytes:
        """Encodes one request to the target.

        Args:
            messages: Conversation; for the completions API, the contents are joined.
            output_tokens: Length of the longest answer.
            key: API key, which is sent as a bearer token.
            user: Value of the field ``user``.
        """
        fields = dict(self._fields)
        if self._target.endpoint == "chat":
            fields["messages"] = messages
        else:
            fields["prompt"] = "\n".join(message["content"] for message in messages)
        fields[self._limit_field] = output_tokens
        if user is not None:
            fields["user"] = user
        fields |= self._more
        body = msgspec.json.encode({name: value for name, value in fields.items() if value is not None})
        head = self._heads.get(key)
        if head is None:
            head = self._heads[key] = self._head(key)
        return b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body)

    def _head(self, key: str | None) -> bytes:
        headers = {
            "Content-Type": "application/json",
            "Accept": "text/event-stream" if self._target.stream else "application/json",
            "User-Agent": f"maitred-load/{__version__}",
        }
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        return self._origin.head("POST", self._path, headers)


@dataclass(frozen=True, slots=True)
class TargetCalibration:
    """Calibration of the target before the load.

    Attributes:
        model: Model that requests name.
        server: Description of the target by itself.
        dialect: Fields that it accepts.
        tokens_per_word: Tokens per word of the tester's vocabulary, by the server's tokenizer.
        template_tokens: Tokens that the server adds to a message.
        tokenizer: Tokenizer that the spec named, if any; lengths are then exact.
    """

    model: str
    server: str
    dialect: TargetDialect
    tokens_per_word: float
    template_tokens: float
    tokenizer: Tokenizer | None = field(default=None, repr=False)


def extra_fields(target: LoadTarget) -> dict[str, Any]:
    """Returns the fields that the spec adds to every request; a null value removes a field.

    Raises:
        InvalidRequest: The text is not a JSON object.
    """
    try:
        return msgspec.json.decode(target.body, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise InvalidRequest(
            f'target.body must be a JSON object such as {{"temperature": 0}}, not {target.body!r}.'
        ) from error


def load_tokenizer(name: str | None) -> Tokenizer | None:
    """Loads the tokenizer from a folder or file.

    Raises:
        InvalidRequest: There is no tokenizer.
    """
    if name is None:
        return None
    path = Path(name)
    folder = path.parent if path.is_file() else path
    if not (folder / "tokenizer.json").is_file():
        raise InvalidRequest(f"target.tokenizer: there is no tokenizer.json at {name!r}.")
    return Tokenizer.load(folder)


async def calibrate(target: LoadTarget, pool: ConnectionPool) -> TargetCalibration:
    """Finds out which models and fields the server accepts, and how it counts the tester's words.

    The probes are two short requests for one token (a few more if the server refuses a field). So the tokenizer of the
    model need not be known.

    Raises:
        InvalidRequest: The server refuses the probes, for example because it does not have the model.
        Unavailable: The server cannot be reached, or lists no model.
    """
    key = target.api_key.reveal() if target.api_key else None
    model, server = await _ask_models(target, pool, key)
    tokenizer = load_tokenizer(target.tokenizer)
    dialects = [TargetDialect(True), TargetDialect(False), TargetDialect(False, "max_completion_tokens")]
    if target.exact_output == "never":
        dialects.pop(0)
    elif target.exact_output == "always":
        del dialects[1:]
    fixed = msgspec.structs.replace(target, stream=False)
    caller = LoadClient(
        pool, now_s=time.monotonic, retries=2, timeout_s=PROBE_TIMEOUT_S, rng=random.Random(0), traffic=StreamTotals()
    )
    for dialect in dialects:
        requests = RequestEncoder(fixed, pool.origin, model, dialect)
        counts: list[int] = []
        for words in PROBE_WORDS:
            record = RequestRecord(session=0, turn=0, tenant="", intended_s=0.0, asked_tokens=1)
            probe = requests.encode([{"role": "user", "content": prompts.probe(words)}], 1, key=key)
            await caller.ask(record, probe)
            if record.outcome is not UserOutcome.COMPLETE:
                break
            counts.append(record.prompt_tokens)
        else:
            if 0 in counts:
                # The server reports no usage; most vocabularies have one token for each of the tester's words.
                return TargetCalibration(
                    model=model,
                    server=server,
                    dialect=dialect,
                    tokens_per_word=1.0,
                    template_tokens=0.0,
                    tokenizer=tokenizer,
                )
            per_word, template = prompts.fit(PROBE_WORDS[0], counts[0], PROBE_WORDS[1], counts[1])
            return TargetCalibration(
                model=model,
                server=server,
                dialect=dialect,
                tokens_per_word=per_word,
                template_tokens=template,
                tokenizer=tokenizer,
            )
        if record.status not in (400, 422):
            break
    if record.status == 0 or record.status >= 500:
        raise Unavailable(f"The server does not answer a first small request. {record.error}")
    raise InvalidRequest(f"The server refuses a first small request. {record.error}")


async def _ask_models(target: LoadTarget, pool: ConnectionPool, key: str | None) -> tuple[str, str]:
    """Returns the model to name in requests, and the server's own name."""
    reader = _WholeReader()
    headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        connection = await pool.take()
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await connection.request(pool.origin.head("GET", "/v1/models", headers) + b"\r\n", reader)
        finally:
            pool.release(connection)
    except (ConnectionFailed, TimeoutError) as error:
        address = target.unix_socket or target.url
        raise Unavailable(f"{address} does not answer: {error or 'no response in time.'}") from error
    server = reader.headers.get(b"server", b"").decode("latin-1")
    if target.model is not None:
        return target.model, server
    if reader.status in (401, 403):
        raise InvalidRequest(
            f"{target.url} wants a key: {error_message(bytes(reader.data))} Name one with --api-key-env."
        )
    try:
        models = msgspec.json.decode(reader.data, type=_Models).data
    except msgspec.MsgspecError as error:
        raise Unavailable(
            f"{target.url} lists no models (HTTP {reader.status}), so it may not speak OpenAI's API. "
            "Name one with --model."
        ) from error
    if not models:
        raise Unavailable(f"{target.url} serves no model yet. Try again shortly, or name one with --model.")
    return models[0].id, server


class _WholeReader:
    """Reader that keeps a whole response."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.data = bytearray()

    def head(self, status: int, headers: dict[bytes, bytes], now_s: float) -> None:
        """Takes the head of the response; implements `ResponseReader.head`."""
        self.status, self.headers = status, headers

    def body(self, data: bytes, now_s: float) -> None:
        """Takes bytes of the body; implements `ResponseReader.body`."""
        self.data += data
