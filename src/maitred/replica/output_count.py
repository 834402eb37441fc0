"""How many tokens an engine has generated since this gateway first met it, over all its lives."""

from maitred.core.replica import LoadReport
from maitred.wire.frames import EngineHello


class LifetimeTokenCount:
    """Adds up what the engine's reports count, each life of the engine from its own start.

    A life is told by its epoch and not by its counts: a new one may have counted more than the last before anybody
    looks. What a life counted after its last report went with it, and nobody has seen it.
    """

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._earlier = 0
        """Of the lives before this one."""
        self._base = 0
        """What this life had counted when it was met first: not for this gateway."""

    def met(self, hello: EngineHello, last: LoadReport) -> None:
        """There is a new connection.

        Args:
            hello: How it began. An engine may be met again in the same life; it has gone on counting meanwhile.
            last: The last report of the connection before.
        """
        if hello.epoch == self._epoch:
            return
        if self._epoch is not None:
            self._earlier = self.total(last)
        self._epoch, self._base = hello.epoch, hello.load.output_tokens

    def total(self, load: LoadReport) -> int:
        """The count.

        Args:
            load: The last report of the connection that was met last.
        """
        return 0 if self._epoch is None else self._earlier + load.output_tokens - self._base
