"""Request ids: ours when the client sends none, the client's when it is safe to repeat.

An id is echoed in headers, logs and traces, so what a client may choose is narrow: 1 to 128 characters, each a
letter, a digit or one of ``-_.:``. Anything else is replaced, never echoed; so is what looks like an API key, which
somebody has put into the wrong header.
"""

import os
import random
import re
import time

_chance = random.Random()
_draw_bits = _chance.getrandbits
os.register_at_fork(after_in_child=_chance.seed)  # else a child would repeat its parent's ids
_SAFE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


def new_request_id() -> str:
    """A fresh id, such as ``req-019aa6f1c0e5b1f0c9e7d2a4``."""
    return new_object_id("req")


def new_object_id(prefix: str) -> str:
    """A fresh id of something that is kept or returned, such as ``chatcmpl-019aa6f1c0e5b1f0c9e7d2a4``.

    It begins with the time in milliseconds, so that ids made one after the other lie side by side in an index and a
    database writes few pages for many of them; 52 random bits follow. Ids are no secrets: they are not drawn from the
    operating system, which costs a call of it each time.
    """
    return f"{prefix}-{time.time_ns() // 1_000_000 << 52 | _draw_bits(52):024x}"


def id_like(prefix: str, other: str) -> str:
    """An id with another prefix, and the digits of one of ours."""
    return f"{prefix}-{other.rpartition('-')[2]}"


def new_trace_id() -> str:
    """Makes the id of a trace that begins here (W3C Trace Context): 32 hexadecimal digits, not all zero."""
    return f"{_draw_bits(128) or 1:032x}"


def new_span_id() -> str:
    """Makes the id of one span in a trace: 16 hexadecimal digits, not all zero."""
    return f"{_draw_bits(64) or 1:016x}"


def request_id_from(offered: str | None) -> str:
    """The client's id if it offered a safe one, else a fresh id."""
    if offered is not None and _SAFE_ID.fullmatch(offered) and not offered.startswith("sk-"):
        return offered
    return new_object_id("req")
