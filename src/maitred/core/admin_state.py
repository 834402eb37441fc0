"""State that an operator has put a replica into: serving, draining, maintenance.

::

    serving --drain--> draining --nothing runs any more--> maintenance --serve--> serving
       |  ^               |                                           ^
       |  `-----serve-----'                                           |
       `--------------------------maintain----------------------------'   (from draining, too)

Draining takes nothing new and finishes what runs. In maintenance nothing is sent, whatever the replica says of itself,
and nothing is learnt from how it behaves.
"""

from enum import StrEnum


class AdminStatus(StrEnum):
    """Status that an operator gives a replica."""

    SERVING = "serving"
    DRAINING = "draining"
    MAINTENANCE = "maintenance"


class AdminState:
    """The state, and what runs.

    Attributes:
        state: See the module.
        running: Attempts that have begun and not ended.
        serving_since_s: Since when it serves again; minus infinity if it has never ceased to.
    """

    def __init__(self) -> None:
        self.state = AdminStatus.SERVING
        self.running = 0
        self.serving_since_s = float("-inf")

    @property
    def serving(self) -> bool:
        """Whether it takes anything new."""
        return self.state is AdminStatus.SERVING

    def drain(self) -> None:
        """Takes nothing new. Changes nothing in maintenance."""
        if self.state is AdminStatus.SERVING:
            self.state = AdminStatus.DRAINING
            self._rest()

    def maintain(self) -> None:
        """Is away from now on; what runs there is its owner's to end."""
        self.state = AdminStatus.MAINTENANCE

    def serve(self, now_s: float) -> None:
        """Takes requests again. Whoever never had ceased to goes on as before."""
        if self.state is not AdminStatus.SERVING:
            self.state = AdminStatus.SERVING
            self.serving_since_s = now_s

    def on_begin(self) -> None:
        """Notes that an attempt runs at the replica."""
        self.running += 1

    def on_end(self) -> None:
        """Notes that an attempt has ended."""
        self.running -= 1
        self._rest()

    def _rest(self) -> None:
        if self.state is AdminStatus.DRAINING and not self.running:
            self.state = AdminStatus.MAINTENANCE
