"""Scripted server of OpenAI's embeddings, images, sound and moderations, on a real socket.

It answers each path as OpenAI's API does, with made-up content, unless its script has replies for the next requests::

    async with ScriptedMedia([MediaReply(status=503)]) as server:
        ...  # ask server.url
        assert server.asked[0].form["model"] == "whisper-1"

``python -m maitred.testing.scripted_media`` runs it as a process, which writes its URL to the standard output.
"""

import asyncio
import hashlib
import json
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from maitred.testing.scripted_socket_server import ScriptedSocketServer

SPEECH = bytes(range(256)) * 512
"""A spoken answer: no sound, but so many bytes."""
_PATHS = (
    *("embeddings", "images/generations", "images/edits", "images/variations"),
    *("audio/speech", "audio/transcriptions", "audio/translations", "moderations"),
)
TRANSCRIPT = "The kitchen closes at ten."


@dataclass(frozen=True)
class MediaReply:
    """Reply to one request in place of the usual one.

    Attributes:
        status: Status of the response; all but 200 send an error, unless there is a body.
        body: Body; None: the usual one.
        content_type: Content type of the body.
        headers: Additional headers.
        cut: Whether the connection closes in the middle of the body.
        stall: Whether nothing is answered, while the connection stays open.
        refuse_body: Whether it answers without reading the request's body.
    """

    status: int = 200
    body: bytes | None = None
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: bool = False
    stall: bool = False
    refuse_body: bool = False


@dataclass(frozen=True)
class MediaRequest:
    """Request that a scripted server has received.

    Attributes:
        path: Path below ``/v1``.
        headers: Headers by lower-case name.
        fields: Members of a JSON body, or fields of a form that are no files.
        files: Name of a field -> the SHA-256 of its file.
        size: Bytes of the body.
    """

    path: str
    headers: Mapping[str, str]
    fields: Mapping[str, Any]
    files: Mapping[str, str]
    size: int


class ScriptedMedia(ScriptedSocketServer):
    """Scripted server of media that runs while its context is open.

    Args:
        replies: Replies to the next requests, in order; later ones get the usual replies.
        tls: Makes it speak TLS; None: it does not.

    Attributes:
        asked: Requests that it has received.
        left: Number of clients that closed their connections before they had an answer.
        begun: Set when a request's head has come.
    """

    def __init__(self, replies: Sequence[MediaReply] = (), tls: ssl.SSLContext | None = None) -> None:
        super().__init__(tls)
        self.asked: list[MediaRequest] = []
        self.left = 0
        self.begun = asyncio.Event()
        self._replies = list(replies)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answers one request, and returns whether the connection can carry another."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.splitlines()
        method, target, _ = first.split(" ")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        path = next((known for known in _PATHS if target.partition("?")[0].endswith("/" + known)), target)
        if method == "GET":
            await _send(writer, MediaReply(body=b'{"object": "list", "data": [{"id": "scripted", "object": "model"}]}'))
            return headers.get("connection") != "close"
        self.begun.set()
        reply = self._replies.pop(0) if self._replies else MediaReply()
        if not reply.refuse_body:
            self.asked.append(await _read(reader, path, headers))
        if reply.stall:
            await reader.read()
            self.left += 1
            return False
        if reply.status != 200 and reply.body is None:
            error = {"message": "The script wants it so.", "type": "server_error"}
            reply = MediaReply(reply.status, json.dumps({"error": error}).encode(), headers=reply.headers)
        elif reply.body is None:
            content_type, body = usual_reply(self.asked[-1])
            reply = MediaReply(200, body, content_type, headers=reply.headers, cut=reply.cut)
        await _send(writer, reply)
        return not reply.cut and not reply.refuse_body and headers.get("connection") != "close"


def usual_reply(asked: MediaRequest) -> tuple[str, bytes]:
    """Returns content type and body of the usual reply to a request."""
    fields, model = asked.fields, asked.fields.get("model")
    if asked.path == "embeddings":
        texts = fields["input"] if isinstance(fields["input"], list) else [fields["input"]]
        data = [{"object": "embedding", "index": n, "embedding": [0.5, -0.25, n]} for n, _ in enumerate(texts)]
        usage = {"prompt_tokens": 7 * len(texts), "total_tokens": 7 * len(texts)}
        return _json({"object": "list", "data": data, "model": model, "usage": usage})
    if asked.path.startswith("images/"):
        images: dict[str, Any] = {"created": 1, "data": [{"b64_json": "aW1hZ2U="}] * int(fields.get("n") or 1)}
        if model == "gpt-image-1":
            images["usage"] = {"input_tokens": 50, "output_tokens": 4160, "total_tokens": 4210}
        return _json(images)
    if asked.path == "audio/speech":
        return "audio/mpeg", SPEECH
    if asked.path.startswith("audio/"):
        if fields.get("response_format") in ("text", "srt", "vtt"):
            return "text/plain; charset=utf-8", TRANSCRIPT.encode()
        if fields.get("stream") in (True, "true"):
            events = [
                {"type": "transcript.text.delta", "delta": TRANSCRIPT},
                {"type": "transcript.text.done", "text": TRANSCRIPT, "usage": _SPOKEN},
            ]
            return "text/event-stream", b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events)
        if model == "whisper-1":
            return _json({"text": TRANSCRIPT, "usage": {"type": "duration", "seconds": 9}})
        return _json({"text": TRANSCRIPT, "usage": _SPOKEN})
    if asked.path == "moderations":
        return _json({"id": "modr-1", "model": model, "results": [{"flagged": False, "categories": {}}]})
    return _json({"object": "unknown"})


_SPOKEN = {"type": "tokens", "input_tokens": 90, "output_tokens": 8, "total_tokens": 98}


def _json(value: object) -> tuple[str, bytes]:
    return "application/json", json.dumps(value).encode()


async def _read(reader: asyncio.StreamReader, path: str, headers: Mapping[str, str]) -> MediaRequest:
    """Reads the body of a request."""
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    content_type = headers.get("content-type", "")
    if "multipart/form-data" not in content_type:
        return MediaRequest(path, headers, fields=json.loads(body), files={}, size=len(body))
    found = re.search('boundary="?([^";]+)', content_type)
    assert found is not None
    fields: dict[str, Any] = {}
    files: dict[str, str] = {}
    for part in body.split(b"--" + found.group(1).encode())[1:-1]:
        head, _, value = part.partition(b"\r\n\r\n")
        name = re.search(b'[; ]name="([^"]*)"', head)
        assert name is not None
        value = value[:-2]
        if b"filename" in head:
            files[name.group(1).decode()] = hashlib.sha256(value).hexdigest()
        else:
            fields[name.group(1).decode()] = value.decode()
    return MediaRequest(path, headers, fields=fields, files=files, size=len(body))


async def _send(writer: asyncio.StreamWriter, reply: MediaReply) -> None:
    body = reply.body or b""
    headers = {"content-type": reply.content_type, "content-length": str(len(body)), **reply.headers}
    lines = [f"HTTP/1.1 {reply.status} Scripted", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    writer.write("\r\n".join(lines).encode("latin-1") + (body[: len(body) // 2] if reply.cut else body))
    await writer.drain()


async def _run() -> None:
    async with ScriptedMedia() as server:
        print(server.url, flush=True)  # noqa: T201 - what its parent reads
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_run())
