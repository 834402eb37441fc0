"""Retry rules of the official SDKs: when a request is sent again, and after what delay.

Source: openai-python, ``_base_client.py`` (openai-node does the same): two retries, 0.5 s doubling to 8 s with up to a
quarter taken off at random; 408, 409, 429 and 5xx are retried unless ``x-should-retry`` says otherwise; a server's
``retry-after-ms`` or ``retry-after`` is obeyed up to a minute. A load must retry exactly as real clients do, because
other retries would cause another overload.
"""

import email.utils
import random
from collections.abc import Mapping

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 8.0
LONGEST_OBEYED_S = 60.0


def retries_status(status: int, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a request is sent again after a response with this status."""
    should_retry = headers.get(b"x-should-retry")
    if should_retry in (b"true", b"false"):
        return should_retry == b"true"
    return status in (408, 409, 429) or status >= 500


def delay_s(retry: int, headers: Mapping[bytes, bytes], rng: random.Random, *, wall_s: float) -> float:
    """Returns the seconds to wait before a retry, counted from 0.

    Args:
        retry: Number of retries before this one.
        headers: Headers of the response; empty if there was none.
        rng: Random generator for the jitter.
        wall_s: Current time in seconds since the Unix epoch, for a ``retry-after`` that is a date.
    """
    told_s = _told_s(headers, wall_s)
    if told_s is not None and 0 < told_s <= LONGEST_OBEYED_S:
        return told_s
    return min(FIRST_DELAY_S * 2.0**retry, LONGEST_DELAY_S) * (1 - 0.25 * rng.random())


def _told_s(headers: Mapping[bytes, bytes], wall_s: float) -> float | None:
    for name, unit_s in ((b"retry-after-ms", 1e-3), (b"retry-after", 1.0)):
        value = headers.get(name)
        if value is not None:
            try:
                return float(value) * unit_s
            except ValueError:
                continue
    date = headers.get(b"retry-after")
    if date is None:
        return None
    parsed = email.utils.parsedate_tz(date.decode("latin-1"))
    return None if parsed is None else email.utils.mktime_tz(parsed) - wall_s
