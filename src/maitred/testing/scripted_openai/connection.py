"""Connection of a client, and a request on it with its answer."""

import socket
from array import array
from collections import deque
from typing import Any, Protocol

import httptools

from maitred.testing.scripted_openai.answers import AnswerSchedule
from maitred.testing.scripted_openai.truth import RequestTruth


class Handler(Protocol):
    """Handler that answers requests."""

    def on_request(self, connection: "ScriptedConnection", method: str, path: str, body: bytes) -> None:
        """Called once a request has been read whole."""
        ...


class ScriptedExchange:
    """Exchange of a request and its answer in progress."""

    __slots__ = ("answer", "at", "blocked", "connection", "due_s", "gaps_s", "send", "sends", "times_s", "truth")

    def __init__(self, connection: "ScriptedConnection", truth: RequestTruth, answer: AnswerSchedule) -> None:
        self.connection = connection
        self.send = connection.socket.send
        self.truth = truth
        self.answer = answer
        self.sends = answer.sends
        self.gaps_s = answer.gaps_s
        self.at = 0
        """Of the next send, which is due at `due_s`."""
        self.due_s = 0.0
        self.times_s: array[float] = array("d")
        """When each send was due and when it was done, in turns; NaN: not yet."""
        self.blocked: deque[tuple[bytes, int]] | None = None
        """While the client does not read: what it is to have, each with the place in `times_s` to note when it has."""


class ScriptedConnection:
    """Connection of a client, with the callbacks of its parser.

    Args:
        server: Handler that receives every complete request.
        accepted: Accepted socket.
    """

    def __init__(self, server: Handler, accepted: socket.socket) -> None:
        self.server = server
        self.socket = accepted
        self.parser: Any = httptools.HttpRequestParser(self)
        self.exchange: ScriptedExchange | None = None
        self.keep_alive = True
        self._url = b""
        self._expects = False
        self._body: list[bytes] = []

    def on_message_begin(self) -> None:
        """Prepares for a new request."""
        self._url, self._expects, self._body = b"", False, []

    def on_url(self, url: bytes) -> None:
        """Receives a part of the request's address."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Notes one header of the request."""
        if name.lower() == b"expect" and value.lower() == b"100-continue":
            self._expects = True

    def on_headers_complete(self) -> None:
        """Requests the body, if the client waits for that."""
        if self._expects:
            self.socket.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """Receives a part of the request's body."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Passes the complete request to the server."""
        self.keep_alive = self.parser.should_keep_alive()
        method = self.parser.get_method().decode()
        path = self._url.decode("latin-1").partition("?")[0]
        body, self._body = b"".join(self._body), []
        self.server.on_request(self, method, path, body)
