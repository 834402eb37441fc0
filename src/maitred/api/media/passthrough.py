"""Routes of OpenAI's API that are passed on to upstream servers: embeddings, images, sound, moderations.

The body is read as far as its cost, its limits and its route depend on it. What else it says is the server's to judge.
"""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from maitred.api.dialect import OpenAIDialect
from maitred.api.exchange import HttpExchange
from maitred.api.headers import apply_request_headers
from maitred.api.media.form import FormBody, FormReader
from maitred.api.routes import Route
from maitred.core.errors import BodyTooSlow, InvalidRequest, MaitredError, UnsupportedBody
from maitred.core.inference import InferenceRequest
from maitred.core.request import SamplingParams
from maitred.core.service import PassthroughService
from maitred.core.tenancy import Scope
from maitred.core.text_replica import ModelMode, PassthroughBody, PassthroughRequest
from maitred.core.usage import UsageUnits
from maitred.text.estimate import IMAGE_TOKENS, estimate
from maitred.wire.openai.media import ImageForm, ImageRequest, ModerationRequest, SoundForm, SpeechRequest

_SOUND_TOKENS_PER_S = 10
_MAX_IMAGES = 100
_NOT_SENT = frozenset({"priority", "service_tier", "cache"})
"""Fields that the gateway heeds itself."""
_NO_SAMPLING = SamplingParams(max_tokens=0, seed=0)


class _PassthroughDialect(OpenAIDialect):
    """OpenAI's errors, without an event that ends a stream: the server's own events end it."""

    done = b""


class _FileDialect(_PassthroughDialect):
    """Dialect of a stream that is a file: it has no place for an error."""

    def error_event(self, error: MaitredError, request_id: str) -> bytes:
        """Returns nothing: the connection ends before the file does."""
        return b""


_EVENTS, _FILE = _PassthroughDialect(), _FileDialect()


class JsonBody:
    """Body of JSON. Implements `maitred.core.text_replica.PassthroughBody`."""

    content_type = "application/json"
    is_small = True

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def fields(self) -> Mapping[str, Any]:
        """Returns all members of the body."""
        return self._fields

    def encode(self, model: str, parameters: Mapping[str, Any]) -> tuple[int, Iterator[bytes]]:
        """Returns the body with the server's name of the model, and fields that it does not have."""
        sent = {name: value for name, value in self._fields.items() if name not in _NOT_SENT}
        body = msgspec.json.encode({**parameters, **sent, "model": model})
        return len(body), iter((body,))


class PassthroughRoutes:
    """Routes of images, sound and moderations.

    Args:
        service: Passes the requests on.
        max_upload_bytes: Largest form.
        upload_timeout_s: Longest time that reading a form may take.
    """

    def __init__(self, service: PassthroughService, max_upload_bytes: int, upload_timeout_s: float) -> None:
        self._service = service
        self._max_upload_bytes = max_upload_bytes
        self._upload_timeout_s = upload_timeout_s

    def routes(self) -> list[Route]:
        """Returns the routes of images, sound and moderations."""
        return [
            self._route("images/generations", "image_generation", "Make images from a text.", ImageRequest),
            self._route("images/edits", "image_generation", "Change an image.", ImageForm),
            self._route("images/variations", "image_generation", "Vary an image.", ImageForm),
            self._route("audio/speech", "audio_speech", "Turn a text into speech.", SpeechRequest, "audio/mpeg"),
            self._route("audio/transcriptions", "audio_transcription", "Turn speech into text.", SoundForm),
            self._route("audio/translations", "audio_transcription", "Turn speech into English text.", SoundForm),
            self._route("moderations", "moderation", "Judge texts and images.", ModerationRequest),
        ]

    def _route(
        self, path: str, mode: ModelMode, summary: str, reads: type[msgspec.Struct], content_type: str = ""
    ) -> Route:
        async def handle(exchange: HttpExchange) -> None:
            if reads in (ImageForm, SoundForm):
                await self._pass_form(exchange, path, mode)
            else:
                await self.pass_json(exchange, path, mode)

        return Route(
            "POST",
            f"/v1/{path}",
            handle,
            summary,
            reads=reads,
            content_type=content_type or "application/json",
            needs=Scope.INFERENCE,
            idempotent=reads in (ImageRequest, ModerationRequest),
            least_output=0,
            reads_form=reads in (ImageForm, SoundForm),
        )

    def runs_elsewhere(self, exchange: HttpExchange, model: str) -> bool:
        """Returns whether the requests for a model are passed on."""
        return self._service.runs_elsewhere(exchange.principal, model)

    async def pass_json(self, exchange: HttpExchange, path: str, mode: ModelMode) -> None:
        """Passes a request on whose body is JSON."""
        fields = await exchange.decode(decode_fields)
        await self._pass(exchange, path, mode, JsonBody(fields), _json_units(mode, fields))

    async def _pass_form(self, exchange: HttpExchange, path: str, mode: ModelMode) -> None:
        """Reads a form, and passes it on."""
        content_type = exchange.header(b"content-type") or ""
        if not content_type.lower().startswith("multipart/form-data"):
            raise UnsupportedBody(f"/v1/{path} takes a form with files: send it as multipart/form-data.")
        if exchange.parsed_head.content_encoding is not None:
            raise UnsupportedBody("A form with files is not compressed. Send it without Content-Encoding.")
        with FormReader(content_type, self._max_upload_bytes) as reader:
            try:
                async with asyncio.timeout(self._upload_timeout_s):
                    async for piece in exchange.body_pieces():
                        reader.feed(piece)
            except TimeoutError:
                raise BodyTooSlow from None
            body = reader.finish()
            await self._pass(exchange, path, mode, body, _form_units(mode, body))

    async def _pass(
        self, exchange: HttpExchange, path: str, mode: ModelMode, body: PassthroughBody, units: UsageUnits
    ) -> None:
        fields = body.fields()
        request = PassthroughRequest(
            path=path,
            mode=mode,
            inference_request=apply_request_headers(_ask_of(fields), exchange.header, retries=exchange.retries),
            body=body,
            prompt_tokens=_prompt_tokens(mode, fields, units),
            units=units,
        )
        async with self._service.respond(request, exchange.context) as response:
            content_type = response.content_type.encode("latin-1")
            if response.whole is not None:
                await exchange.respond(response.whole, content_type=content_type)
                return
            exchange.dialect = _EVENTS if content_type.startswith(b"text/event-stream") else _FILE
            exchange.stream_type = content_type
            async for piece in response:
                await exchange.stream(piece)
            await exchange.finish()


def decode_fields(body: bytes) -> dict[str, Any]:
    """Returns the members of a body of JSON.

    Raises:
        InvalidRequest: It is no JSON object.
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise InvalidRequest('The body must be a JSON object, such as {"model": "…"}.')
    return fields


def _ask_of(fields: Mapping[str, Any]) -> InferenceRequest:
    """Returns what the fields ask of queue and routes."""
    model, priority, user = fields.get("model"), fields.get("priority"), fields.get("user")
    if not isinstance(model, str) or not model.strip():
        raise InvalidRequest("Name the model in the field `model`. GET /v1/models lists what is served.", param="model")
    if priority is not None and (type(priority) is not int or not 1 <= priority <= 10):
        raise InvalidRequest("priority must be a number from 1 to 10.", param="priority")
    return InferenceRequest(
        model.strip(), [], _NO_SAMPLING, priority=priority, user=user if isinstance(user, str) else None, whole=True
    )


def _json_units(mode: ModelMode, fields: Mapping[str, Any]) -> UsageUnits:
    if mode == "audio_speech":
        text = fields.get("input")
        if not isinstance(text, str) or not text:
            raise InvalidRequest("Give the text that is to be spoken, as `input`.", param="input")
        return UsageUnits(characters=len(text))
    return _image_units(fields) if mode == "image_generation" else UsageUnits()


def _form_units(mode: ModelMode, body: FormBody) -> UsageUnits:
    if mode == "image_generation":
        return _image_units(body.fields())
    audio_s, is_estimated = body.audio_s()
    return UsageUnits(audio_s=audio_s, estimated=is_estimated)


def _image_units(fields: Mapping[str, Any]) -> UsageUnits:
    """Returns the images that are asked for: `n`, 1 by default."""
    count = fields.get("n")
    if isinstance(count, str) and count.strip().isdecimal():
        count = int(count)
    if count is not None and (type(count) is not int or not 1 <= count <= _MAX_IMAGES):
        raise InvalidRequest(f"n must be a number of images from 1 to {_MAX_IMAGES}.", param="n")
    size, quality = (fields.get(name) for name in ("size", "quality"))
    return UsageUnits(
        images=count or 1,
        image_size=size if isinstance(size, str) else "",
        image_quality=quality if isinstance(quality, str) else "",
    )


def _prompt_tokens(mode: ModelMode, fields: Mapping[str, Any], units: UsageUnits) -> int:
    """Estimates the tokens of a request, for its place in the queue and for limits, until a server counts them."""
    tokens = _text_tokens(fields.get("input")) + _text_tokens(fields.get("prompt"))
    if mode == "audio_transcription":
        tokens += units.audio_s * _SOUND_TOKENS_PER_S
    elif mode == "image_generation":
        tokens += units.images * IMAGE_TOKENS
    return max(1, round(tokens))


def _text_tokens(value: object) -> float:
    """Estimates the tokens of a text, of token ids, or of several of both."""
    if isinstance(value, str):
        return estimate(value)
    if isinstance(value, dict):
        return sum(map(_text_tokens, value.values()))
    if isinstance(value, list):
        return sum(1.0 if isinstance(item, int) else _text_tokens(item) for item in value)
    return 0.0
