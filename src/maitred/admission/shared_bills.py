"""Bills that the callers of one coalesced answer share.

When the answer is complete, its tokens are divided among the caller for whom it was computed and all who share it at
that moment. The shares are whole tokens, and the first caller has what is left, so that all lines together have what
was computed. Who has left before has no share.
"""

from typing import Protocol

from maitred.core.request import Usage


class BillSharer(Protocol):
    """Request that shares the bill of an answer which is computed for another one."""

    def take_share(self, share: Usage, whole: Usage) -> None:
        """Takes its share of the tokens of the whole answer; called once at most."""
        ...


class SharedBills:
    """All bills that are shared among requests, by the digest of their answer.

    Where an answer is computed twice at a time, those who share it pay for the one that is complete first.
    """

    def __init__(self) -> None:
        self._sharers: dict[bytes, dict[BillSharer, None]] = {}

    def __len__(self) -> int:
        """Returns the number of answers with a shared bill."""
        return len(self._sharers)

    def add(self, digest: bytes, sharer: BillSharer) -> None:
        """Adds a request for which the answer is not computed."""
        self._sharers.setdefault(digest, {})[sharer] = None

    def remove(self, digest: bytes, sharer: BillSharer) -> None:
        """Removes a request that has ended or has its share; does nothing if it was removed before."""
        sharers = self._sharers.get(digest, {})
        sharers.pop(sharer, None)
        if not sharers:
            self._sharers.pop(digest, None)

    def rest_of(self, digest: bytes, usage: Usage) -> Usage:
        """Returns what is left for the first caller of the tokens of an answer that is complete now."""
        return usage.split(1 + len(self._sharers.get(digest, ())))[1]

    def divide(self, digest: bytes, usage: Usage) -> None:
        """Gives their shares to all others."""
        sharers = self._sharers.pop(digest, {})
        share, _ = usage.split(1 + len(sharers))
        for sharer in sharers:
            sharer.take_share(share, usage)
