"""Cohort scheduling: concurrent requests pass through each stage as a group.

A request that meets no obstacle calls about nine hundred functions between its socket, a server and back. After these
calls the processor caches hold only the last functions, and the next request misses the cache for the first ones: each
function takes three to six times as long as in a loop. Therefore a request waits at the end of a stage until the other
requests in that stage have finished it; then all of them run the next stage while its code and data are in the
processor caches. This is cohort scheduling (Larus and Parkes, USENIX 2002) on an event loop: each wait is one iteration
of the loop.

One iteration costs about half as much as a stage, so a request waits only for requests that have been announced.
"""

import types
from collections.abc import Generator


class CohortStage:
    """Points at which requests wait for each other. Integers, because Python 3.11 Enum access is slow."""

    COME = 0
    """The request was read, and its task has not started."""
    KNOWN = 1
    """The caller is authenticated."""
    READ = 2
    """The body of the request is parsed."""
    ADMITTED = 3
    """The request has its reservation and its entry in the queue."""
    DISPATCHED = 4
    """The request was dispatched to a replica."""
    ANSWERED = 5
    """The server has sent data that the task has not read yet."""
    HEARD = 6
    """The answer is complete."""
    SETTLED = 7
    """The usage of the request is settled."""
    SENT = 8
    """The answer was sent to the client."""


class Cohort:
    """The concurrent requests of one event loop."""

    __slots__ = ("_at",)

    def __init__(self) -> None:
        self._at = [0] * (CohortStage.SENT + 1)

    def expect(self, halt: int) -> None:
        """Announces a request that reaches a stage in this iteration of the event loop or the next."""
        self._at[halt] += 1

    def arrive(self, halt: int) -> None:
        """Notes that one announced request has arrived at a stage."""
        self._at[halt] -= 1

    @types.coroutine
    def sync(self, halt: int) -> Generator[None, None, None]:
        """Waits for one iteration of the event loop if other requests are in the stage that ends here.

        It is a generator, as `asyncio.sleep(0)` is inside, so that each wait has one frame less.
        """
        at = self._at
        if at[halt - 1] or at[halt]:
            at[halt] += 1
            try:
                yield
            finally:
                at[halt] -= 1

    @property
    def empty(self) -> bool:
        """Whether no request waits and none is announced."""
        return not any(self._at)


COHORT = Cohort()
"""Cohort of all requests of this process."""
