"""Whether a server is there, as far as we know: what the probe saw last, and what requests met since.

This is the seam for anything that judges better: whoever wants to take a server out of service for its errors or its
slowness is told of every outcome here, and is asked here.
"""

from collections.abc import Callable

from maitred.core.errors import ReplicaUnavailable


class Standing:
    """Of one server. Down until the first look.

    Args:
        server: Its name.
        retry_after_s: When the next look comes.
    """

    def __init__(self, server: str, retry_after_s: float) -> None:
        self.up = False
        self.reason = "nobody has looked yet"
        self._server = server
        self._retry_after_s = retry_after_s
        self._listeners: list[Callable[[], None]] = []

    def watch(self, listener: Callable[[], None]) -> None:
        """Calls `listener` whenever it changes. For good."""
        self._listeners.append(listener)

    def check(self) -> None:
        """Raises ReplicaUnavailable while the server is down."""
        if not self.up:
            raise ReplicaUnavailable(retry_after_s=self._retry_after_s)

    def found(self) -> None:
        """A look found it ready."""
        self._set(up=True, reason="")

    def missed(self, reason: str) -> None:
        """A look did not find it ready, or a request could not even connect."""
        self._set(up=False, reason=reason)

    def _set(self, *, up: bool, reason: str) -> None:
        changed = up != self.up
        self.up, self.reason = up, reason
        if changed:
            for listener in self._listeners:
                listener()
