"""Framing: the bytes of HTTP/1.1 responses, and of the API's errors."""

import msgspec

END_OF_BODY = b"0\r\n\r\n"


def response(status: int, body: object, headers: dict[str, str] | None = None) -> bytes:
    """Makes a whole HTTP response with a JSON body."""
    data = msgspec.json.encode(body)
    return head(status, "application/json", {"content-length": str(len(data)), **(headers or {})}) + data


def error_object(message: str, status: int, param: str | None = None) -> dict[str, object]:
    """Makes an error in the API's format."""
    kind = "invalid_request_error" if status == 400 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def head(status: int, content_type: str, headers: dict[str, str]) -> bytes:
    """Makes the status line and headers of a response."""
    lines = [f"HTTP/1.1 {status} Scripted", "server: maitred-scripted", f"content-type: {content_type}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode()


def chunk(data: bytes) -> bytes:
    """Makes one chunk of a chunked body; an empty chunk would end it, so it is left out."""
    return b"%x\r\n%s\r\n" % (len(data), data) if data else b""
