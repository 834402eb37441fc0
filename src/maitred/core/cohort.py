"""Requests that are under way together go through a stage together.

From its socket to a server and back, a request without obstacles runs some nine hundred functions. When it has come
through them, the processor's caches hold the last of them, and the next request finds the first ones gone: in place
each takes three to six times what it does in a loop. So who comes to the end of a stage halts for those who are in it,
and then all of them find the code and the tables of the next stage where the first of them has left them. This is
cohort scheduling (Larus and Parkes, USENIX 2002) on an event loop: a halt is one turn of it.

A turn costs about what half a stage does, so nobody halts for others who are not known to come.
"""

from collections.abc import Generator


class CohortStage:
    """Where requests halt on their way, in this order. Plain numbers: Python 3.11 calls a function to find a member."""

    COME = 0
    """It was read, and its task has not begun."""
    KNOWN = 1
    """Who asks is known."""
    READ = 2
    """So is what is asked."""
    ADMITTED = 3
    """It has its budget and its place in the queue."""
    RELEASED = 4
    """It has its turn at a server."""
    ANSWERED = 5
    """The server has said something, and the task has not heard it."""
    HEARD = 6
    """All of the answer is there."""
    SETTLED = 7
    """It is paid for."""
    SENT = 8
    """The client has it."""


class _YieldOnce:
    """Waits until the event loop has done all else that is due; what `asyncio.sleep(0)` waits for, by a frame less."""

    def __await__(self) -> Generator[None, None, None]:
        yield


_ONE_TURN = _YieldOnce()


class Cohort:
    """Requests that are under way together in one event loop."""

    __slots__ = ("_at",)

    def __init__(self) -> None:
        self._at = [0] * (CohortStage.SENT + 1)

    def expect(self, halt: int) -> None:
        """Announces that a request will arrive at a stage in this turn of the event loop, or the next."""
        self._at[halt] += 1

    def arrive(self, halt: int) -> None:
        """Notes that the announced requests have arrived."""
        self._at[halt] -= 1

    async def sync(self, halt: int) -> None:
        """Lets those catch up who are in the stage that ends there."""
        at = self._at
        if at[halt - 1] or at[halt]:
            at[halt] += 1
            try:
                await _ONE_TURN
            finally:
                at[halt] -= 1

    @property
    def empty(self) -> bool:
        """Whether nobody halts or is called."""
        return not any(self._at)


COHORT = Cohort()
"""Of this process's requests."""
