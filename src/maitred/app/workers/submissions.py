"""When an engine has heard of what a worker has sent it, so that the controller need not count it any more."""

from collections import deque

from maitred.app.workers.hotline import Hotline
from maitred.core.ports import Replica
from maitred.wire.desk import Heard


class Submissions:
    """To one engine. Submissions are heard in the order in which they were sent.

    Args:
        replica: The engine.
        line: To the controller.
    """

    def __init__(self, replica: Replica, line: Hotline) -> None:
        self._replica = replica
        self._line = line
        self._sent: deque[int] = deque()
        replica.watch(self._look)

    def sent(self, number: int) -> None:
        """A prompt of the request of this number was sent."""
        self._sent.append(number)

    def _look(self) -> None:
        """The engine has reported."""
        while len(self._sent) > self._replica.unheard():
            self._line.tell(Heard(self._sent.popleft()))
