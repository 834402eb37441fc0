"""Where a waiting request stands."""

import msgspec


class Place(msgspec.Struct, frozen=True):
    """Where a request stands in the queue, and what is predicted for it."""

    position: int
    """Requests that are expected to be released before it."""
    wait_s: float
    """From now until it is released to a replica."""
    ttft_s: float
    """From now until its first token."""
