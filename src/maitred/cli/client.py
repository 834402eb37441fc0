"""The client side of the command line: one server, spoken to in OpenAI's API, with a sentence for every failure.

An answer counts as whole only if the server said ``[DONE]``. A connection that ends sooner raises, however clean its
end looks: the reader must not take half an answer for the whole.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Literal, Self

import aiohttp
import msgspec

from maitred.core.errors import CallerError, InvalidRequest, MaitredError, Refused, Unauthenticated, Unavailable
from maitred.wire.sse import SSEDecoder

CONNECT_TIMEOUT_S = 10.0
_CLOSED = (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, aiohttp.ClientOSError, ConnectionResetError)
_LONGEST_QUOTE = 300
_OPENAI = "does not speak OpenAI's API"


class ConversationTurn(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class ChatOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling options that the caller chose; the server decides the rest."""

    temperature: float | None = None
    max_tokens: int | None = None


class ReplyDelta(msgspec.Struct, frozen=True):
    """Delta of a reply; the last one says why the reply ended."""

    text: str
    finish_reason: str | None = None


class ListedModel(msgspec.Struct, frozen=True):
    """An entry of ``/v1/models``."""

    id: str
    owned_by: str = ""
    max_model_len: int | None = None


class _ModelList(msgspec.Struct, frozen=True):
    data: list[ListedModel]


class _ErrorBody(msgspec.Struct, frozen=True):
    message: str = ""
    code: str | int | None = None
    param: str | None = None


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta = _Delta()
    text: str | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct, frozen=True):
    """A chunk of a chat (`delta`) or of a completion (`text`), or the error that ends either."""

    choices: list[_Choice] = []
    error: _ErrorBody | None = None


class _Failure(msgspec.Struct, frozen=True):
    error: _ErrorBody


class GatewayClient:
    """Talks to one server; an async context manager that owns the connections.

    Args:
        url: Where the server is, with or without the ``/v1`` at the end.
        key: The API key, where the server asks for one.

    Raises:
        InvalidRequest: That is not an HTTP address, or no key.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self._url = server_root(url)
        self._headers = bearer(key, "MAITRED_API_KEY") if key else {}
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        # An answer may take as long as it takes; only connecting has a limit.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        self._session = aiohttp.ClientSession(timeout=timeout, headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._session.close()

    async def models(self) -> list[ListedModel]:
        """Lists the models that the server serves.

        Raises:
            MaitredError: It cannot be reached, or does not speak OpenAI's API.
        """
        with open_client(self._url, _OPENAI):
            async with self._session.get(f"{self._url}/v1/models") as response:
                body = await response.read()
                if response.status != 200:
                    raise self._refusal(response.status, body)
            return msgspec.json.decode(body, type=_ModelList).data

    async def first_model(self) -> str:
        """The model to talk to when none was named.

        Raises:
            Unavailable: The server lists none.
        """
        models = await self.models()
        if not models:
            raise Unavailable(f"{self._url} serves no model yet. Try again shortly.")
        return models[0].id

    def chat(self, model: str, messages: Sequence[ConversationTurn], options: ChatOptions) -> AsyncIterator[ReplyDelta]:
        """Streams the next turn of a conversation."""
        return self._stream("/v1/chat/completions", {"model": model, "messages": messages}, options)

    def complete(self, model: str, prompt: str, options: ChatOptions) -> AsyncIterator[ReplyDelta]:
        """Streams how a text goes on."""
        return self._stream("/v1/completions", {"model": model, "prompt": prompt}, options)

    async def _stream(
        self, path: str, request: Mapping[str, object], options: ChatOptions
    ) -> AsyncIterator[ReplyDelta]:
        try:
            body = msgspec.json.encode({**request, **msgspec.to_builtins(options), "stream": True})
        except UnicodeEncodeError as error:  # what Python makes of arguments, and of some pipes, that are not UTF-8
            raise not_text() from error
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        with open_client(self._url, _OPENAI):
            response = await self._session.post(self._url + path, data=body, headers=headers)
        async with response:
            if response.status != 200:
                raise self._refusal(response.status, await response.content.read(1 << 20))
            if response.content_type != "text/event-stream":
                raise unknown_server(self._url, _OPENAI)
            decoder = SSEDecoder()
            try:
                async for data in response.content.iter_any():
                    for event in decoder.feed(data):
                        if event.data == "[DONE]":
                            return
                        for piece in _pieces(event.data):
                            yield piece
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise _make_cut_error() from error
        raise _make_cut_error()

    def _refusal(self, status: int, body: bytes) -> MaitredError:
        if status == 401 and not self._headers:
            return Unauthenticated("The server asks for an API key. Set MAITRED_API_KEY, or pass --key.")
        return refusal(status, body)


def server_root(url: str) -> str:
    """The address of a server, without the ``/v1`` that OpenAI's clients have at its end.

    Raises:
        InvalidRequest: That is not an HTTP address.
    """
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"{url!r} is not an address of a server. Write it as http://host:port.")
    return url.rstrip("/").removesuffix("/v1")


def bearer(key: str, variable: str) -> dict[str, str]:
    """The header that shows a key.

    Args:
        key: As the caller gave it.
        variable: Where it usually comes from, for the message.

    Raises:
        InvalidRequest: No header can hold that.
    """
    if not key.isascii() or not key.isprintable() or " " in key:
        raise InvalidRequest(f"The key has characters that no key has. Check what {variable} holds.")
    return {"Authorization": f"Bearer {key}"}


@contextmanager
def open_client(url: str, fault: str) -> Iterator[None]:
    """Says in a sentence what went wrong between us and a server.

    Args:
        url: Where it is.
        fault: What is the matter with it if it is not maitred, such as "has no administration".

    Raises:
        InvalidRequest: That is no address.
        Unavailable: Nothing answers, or no server of maitred's.
    """
    try:
        yield
    except msgspec.MsgspecError as error:
        raise unknown_server(url, fault) from error
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise _unreachable(url, error) or unknown_server(url, fault) from error


def unknown_server(url: str, fault: str) -> Unavailable:
    """Makes the error for a server that is not maitred, as its fault shows."""
    return Unavailable(f"What answers at {url} {fault}. Pass --url of a maitred server.")


def _unreachable(url: str, error: Exception) -> MaitredError | None:
    """Returns the error for a request that got no answer; None if an answer came that is not HTTP."""
    # An error of a certificate is a ValueError, too.
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return Unavailable(
            f"The certificate of {url} is not accepted: {error.certificate_error}. Have SSL_CERT_FILE name a file with "
            "the authority that signed it, or pass another --url."
        )
    if isinstance(error, aiohttp.ClientSSLError):
        return Unavailable(f"What answers at {url} does not speak TLS. Pass --url with http://.")
    if isinstance(error, aiohttp.InvalidURL | ValueError):
        return InvalidRequest(f"{url!r} is not an address of a server. Write it as http://host:port.")
    if isinstance(error, _CLOSED) and not isinstance(error, aiohttp.ClientConnectorError):
        scheme = ", or pass --url with https:// if it speaks TLS" if url.startswith("http://") else ""
        return Unavailable(f"{url} closed the connection without an answer. See the server's log{scheme}.")
    if isinstance(error, asyncio.TimeoutError | aiohttp.ClientConnectionError | OSError):
        return Unavailable(f"Nothing answers at {url}. Start a server with `maitred serve`, or pass --url.")
    return None


def not_text() -> InvalidRequest:
    """For bytes where a text should be."""
    return InvalidRequest("The input is not UTF-8 text. Convert it first, for example with iconv.")


def _pieces(data: str) -> list[ReplyDelta]:
    """The text in one event.

    Raises:
        Unavailable: The event is the error that ends the answer, or nothing that we know.
    """
    try:
        chunk = msgspec.json.decode(data, type=_Chunk)
    except msgspec.MsgspecError as error:
        raise Unavailable("The answer was cut: the server sent something that is no part of one.") from error
    if chunk.error is not None:
        raise Unavailable(f"The answer was cut: {quote(chunk.error.message) or 'the server failed.'}")
    return [ReplyDelta(choice.text or choice.delta.content or "", choice.finish_reason) for choice in chunk.choices]


def _make_cut_error() -> Unavailable:
    return Unavailable("The answer was cut: the connection ended before the server had finished. Send it again.")


def refusal(status: int, body: bytes) -> MaitredError:
    """Returns the error for a response that is not 200, in the server's own words if it has some."""
    try:
        failure = msgspec.json.decode(body, type=_Failure)
    except msgspec.MsgspecError:
        message, field = f"The server answered HTTP {status} without saying why.", None
    else:
        code = f"HTTP {status}, {failure.error.code}" if failure.error.code else f"HTTP {status}"
        message = f"{quote(failure.error.message) or 'The server refused.'} ({code})"
        field = failure.error.param
    if status == 429:
        return Refused(message)
    return CallerError(message, param=field) if 400 <= status < 500 else Unavailable(message)


def quote(text: str) -> str:
    """A server's words, on one line and without control characters that a terminal would obey."""
    line = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    return line if len(line) <= _LONGEST_QUOTE else line[:_LONGEST_QUOTE] + "…"
