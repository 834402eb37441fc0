"""Guests: sequences that run although all places are taken, because others hold more places than their tenants do.

Who has a place keeps it to the end of its answer, which can be half a minute. A tenant that comes while others hold all
of them would wait for one of those ends, however little it was served. So it is let in as a *guest* where another
tenant holds so many places that with one fewer it would still have as much, per weight, as the newcomer with one more.
From then on more sequences decode than a step has rows, and in each step those tenants that have the most rows per
weight leave some of theirs out, each sequence in its turn.

Nothing is preempted for a guest, and nothing computed again: who is left out keeps its blocks and goes on a step later.
As soon as any sequence ends, the guest has a place like everybody.

Tenants are the first level of `Flow.path`. A class gives way to equally or more urgent ones only.
"""

from collections.abc import Iterable, Mapping

from maitred.engine.scheduler.sequence import Sequence
from maitred.fairness.vtc import yields_to

_NOBODY: frozenset[int] = frozenset()


class OvercommitSlots:
    """Slots beyond the batch, and who is left out of a step for them.

    Args:
        most: At one time.

    Attributes:
        count: How many there are.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0
        self._steps = 0

    @property
    def slots(self) -> int:
        """Slots for further overcommitted sequences."""
        return self.most - self.count

    def on_admit(self) -> None:
        """One has been admitted."""
        self.count += 1

    def on_running(self, running: int, places: int) -> None:
        """Notes how many sequences run on how many slots: an overcommitted one has each slot that came free."""
        self.count = max(0, min(self.count, running - places))

    def admits(self, newcomer: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether a sequence may be one."""
        if not self.slots:
            return False
        own = newcomer.account.flow.path[0]
        rank = newcomer.account.flow.priority.rank
        held = 0
        others: dict[str, tuple[int, float]] = {}
        for sequence in running:
            flow = sequence.account.flow
            share = flow.path[0]
            if share.id == own.id:
                held += 1
            elif flow.priority.rank >= rank:
                others[share.id] = (others.get(share.id, (0, 0.0))[0] + 1, share.weight)
        return any(yields_to(has, weight, held, own.weight) for has, weight in others.values())

    def excluded_keys(self, decoding: Mapping[int, Sequence], rows: int) -> frozenset[int] | set[int]:
        """The keys of those that do not decode in the next step. O(1) without guests, else O(decoding)."""
        excess = min(self.count, len(decoding) - rows)
        if excess <= 0:
            return _NOBODY
        last, self._steps = self._steps, self._steps + 1
        tenants: dict[str, list[Sequence]] = {}
        for sequence in decoding.values():
            tenants.setdefault(sequence.account.flow.path[0].id, []).append(sequence)
        for own in tenants.values():  # the last one is the first to be left out: the least urgent, but not all the time
            own.sort(key=lambda s: (s.excluded_at != last, s.account.flow.priority.rank, -s.excluded_at))
        out = set()
        for _ in range(excess):
            sequence = max(tenants.values(), key=_surplus).pop()
            sequence.excluded_at = self._steps
            out.add(sequence.key)
        return out


def _surplus(own: list[Sequence]) -> tuple[float, int]:
    """Returns the rows of a tenant beyond a single one, per weight; of equals, whose turn it is."""
    if not own:
        return (-1.0, 0)
    last = own[-1]
    return ((len(own) - 1) / last.account.flow.path[0].weight, -last.excluded_at)
