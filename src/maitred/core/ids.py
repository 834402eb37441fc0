"""Request ids: the client's id if it is safe to echo, else a generated id.

An id is echoed in headers, logs and traces, so a client's id must have 1 to 128 characters, each a letter, a digit or
one of ``-_.:``. Any other value is replaced and never echoed, and so is a value that looks like an API key, because a
client may have put its key into the wrong header.
"""

import os
import random
import re
import time

_chance = random.Random()
_draw_bits = _chance.getrandbits
os.register_at_fork(after_in_child=_chance.seed)  # otherwise a child process would generate the same ids as its parent
_SAFE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


def new_request_id() -> str:
    """Returns a new request id, such as ``req-019aa6f1c0e5b1f0c9e7d2a4``."""
    return new_object_id("req")


def new_object_id(prefix: str) -> str:
    """Returns a new object id, such as ``chatcmpl-019aa6f1c0e5b1f0c9e7d2a4``.

    The id starts with the time in milliseconds, so consecutive ids are neighbours in an index and a database writes few
    pages for them; 52 random bits follow. Ids are public, so the random bits come from a generator in the process,
    which avoids one system call per id.
    """
    return f"{prefix}-{time.time_ns() // 1_000_000 << 52 | _draw_bits(52):024x}"


def id_like(prefix: str, other: str) -> str:
    """Returns an id with another prefix and the digits of one of our ids."""
    return f"{prefix}-{other.rpartition('-')[2]}"


def new_trace_id() -> str:
    """Makes the id of a trace that begins here (W3C Trace Context): 32 hexadecimal digits, not all zero."""
    return f"{_draw_bits(128) or 1:032x}"


def new_span_id() -> str:
    """Makes the id of one span in a trace: 16 hexadecimal digits, not all zero."""
    return f"{_draw_bits(64) or 1:016x}"


def request_id_from(offered: str | None) -> str:
    """Returns the client's id if it is safe, else a new id."""
    if offered is not None and _SAFE_ID.fullmatch(offered) and not offered.startswith("sk-"):
        return offered
    return new_object_id("req")
