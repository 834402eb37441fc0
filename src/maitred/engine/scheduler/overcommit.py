"""Overcommitted sequences (*guests*): they run although all slots are used by tenants with more slots.

A sequence keeps its slot to the end of its answer, which can take half a minute. A tenant that comes while others hold
all slots would have to wait for one of these ends, even if it got little service. So its sequence is admitted as a
*guest* if another tenant holds enough slots: with one slot fewer, that tenant must still have as many slots per weight
as the new tenant has with one more. Then more sequences decode than a step has rows. In each step, the tenants with the
most rows per weight leave out some of their sequences, in turn.

A guest causes no preemption and no recomputation: an excluded sequence keeps its blocks and continues a step later. As
soon as any sequence ends, a guest gets its slot.

Tenants are the first level of `Flow.path`; `OvercommitSlots.admits` also compares the levels below. A sequence is
excluded only for guests of an equally or more urgent class.
"""

from collections.abc import Iterable, Mapping

from maitred.engine.scheduler.sequence import Sequence
from maitred.fairness.vtc import yields_to

_NOBODY: frozenset[int] = frozenset()


class OvercommitSlots:
    """Slots for overcommitted sequences, and the choice of the sequences that a step excludes for them.

    Args:
        most: Maximum number of overcommitted sequences.

    Attributes:
        count: Current number of overcommitted sequences.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0
        self._steps = 0

    @property
    def slots(self) -> int:
        """Number of free slots for overcommitted sequences."""
        return self.most - self.count

    def on_admit(self) -> None:
        """Notes that an overcommitted sequence was admitted."""
        self.count += 1

    def on_running(self, running: int, places: int) -> None:
        """Updates the count: each free slot goes to an overcommitted sequence."""
        self.count = max(0, min(self.count, running - places))

    def admits(self, newcomer: Sequence, running: Iterable[Sequence]) -> bool:
        """Returns whether a sequence may be admitted as an overcommitted one.

        Flows are compared where their paths part: organisations with each other, and the teams and keys of one
        organisation among themselves. For the latter, half of the slots is never used.
        """
        if not self.slots:
            return False
        flow = newcomer.account.flow
        path, rank = flow.path, flow.priority.rank
        levels = len(path) if self.slots > self.most // 2 else 1
        held = [0] * len(path)
        others: list[dict[str, tuple[int, float]]] = [{} for _ in path]
        for sequence in running:
            other = sequence.account.flow
            for level, own in enumerate(path):
                if level >= len(other.path):
                    break
                share = other.path[level]
                if share.id != own.id:
                    if other.priority.rank >= rank:
                        others[level][share.id] = (others[level].get(share.id, (0, 0.0))[0] + 1, share.weight)
                    break
                held[level] += 1
        return any(
            yields_to(has, weight, held[level], path[level].weight)
            for level in range(levels)
            for has, weight in others[level].values()
        )

    def excluded_keys(self, decoding: Mapping[int, Sequence], rows: int) -> frozenset[int] | set[int]:
        """Returns the keys of the sequences that the next step excludes.

        It costs O(1) without overcommitted sequences, else O(decoding).
        """
        excess = min(self.count, len(decoding) - rows)
        if excess <= 0:
            return _NOBODY
        last, self._steps = self._steps, self._steps + 1
        tenants: dict[str, list[Sequence]] = {}
        for sequence in decoding.values():
            tenants.setdefault(sequence.account.flow.path[0].id, []).append(sequence)
        for own in tenants.values():  # the last sequence is excluded first: the least urgent one, but not in every step
            own.sort(key=lambda s: (s.excluded_at != last, s.account.flow.priority.rank, -s.excluded_at))
        out = set()
        for _ in range(excess):
            sequence = max(tenants.values(), key=_surplus).pop()
            sequence.excluded_at = self._steps
            out.add(sequence.key)
        return out


def _surplus(own: list[Sequence]) -> tuple[float, int]:
    """Returns a tenant's rows beyond the first per weight, and the turn of its next sequence as tie-break."""
    if not own:
        return (-1.0, 0)
    last = own[-1]
    return ((len(own) - 1) / last.account.flow.path[0].weight, -last.excluded_at)
