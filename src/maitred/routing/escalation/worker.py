"""The process in which answers are put to their schemas: `python -m maitred.routing.escalation.worker`.

It says that it is ready, then answers one question after the other until its input ends, as it does when whoever asks
is gone. A question is a length in four bytes and a MessagePack array of schema and text; an answer, and the word of
readiness, is one byte.
"""

import resource
import sys

import msgspec

from maitred.routing.escalation.schema import SchemaResult, check_schema

READY = b"!"
LENGTH_BYTES = 4
_MOST_MEMORY_BYTES = 1 << 30


def main() -> None:
    """Answers until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY_BYTES, _MOST_MEMORY_BYTES))
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    answer = READY
    while True:
        answers.write(answer)
        answers.flush()
        length = questions.read(LENGTH_BYTES)
        if len(length) < LENGTH_BYTES:
            return
        answer = _answer(questions.read(int.from_bytes(length)))


def _answer(question: bytes) -> bytes:
    try:
        schema, text = msgspec.msgpack.decode(question)
        return bytes(check_schema(schema, text).value)
    except MemoryError:
        return bytes(SchemaResult.UNKNOWN.value)


if __name__ == "__main__":
    main()
