"""Worker process that validates answers against schemas: `python -m maitred.routing.escalation.worker`.

The worker writes that it is ready, and then answers one request after the other until its input ends, which also
happens when the gateway dies. A request is a length of four bytes and a MessagePack array of schema and text; a
response, and also the ready signal, is one byte.
"""

import resource
import sys

import msgspec

from maitred.routing.escalation.schema import SchemaResult, validate_text

READY = b"!"
LENGTH_BYTES = 4
_MAX_MEMORY_BYTES = 1 << 30


def main() -> None:
    """Answers requests until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    requests, responses = sys.stdin.buffer, sys.stdout.buffer
    response = READY
    while True:
        responses.write(response)
        responses.flush()
        length = requests.read(LENGTH_BYTES)
        if len(length) < LENGTH_BYTES:
            return
        response = _handle_request(requests.read(int.from_bytes(length)))


def _handle_request(request: bytes) -> bytes:
    try:
        schema, text = msgspec.msgpack.decode(request)
        return bytes(validate_text(schema, text).value)
    except MemoryError:
        return bytes(SchemaResult.UNKNOWN.value)


if __name__ == "__main__":
    main()
