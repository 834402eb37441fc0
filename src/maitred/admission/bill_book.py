"""Bills that the callers of one coalesced answer share.

When the answer is complete, its tokens are divided among the caller for whom it was computed and all who share it at
that moment. The shares are whole tokens, and the first caller has what is left, so that all lines together have what
was computed. Who has left before has no share.
"""

from collections.abc import Callable

from maitred.core.request import Usage

TakeShare = Callable[[Usage, Usage], None]
"""Takes the share of one request, of the usage of the whole answer; called once at most."""


class BillBook:
    """Book of all bills that requests share, by the digest of their answer.

    Where an answer is computed twice at a time, those who share it pay for the one that is complete first.
    """

    def __init__(self) -> None:
        self._sharers: dict[bytes, dict[TakeShare, None]] = {}

    def __len__(self) -> int:
        """Returns the number of answers with a shared bill."""
        return len(self._sharers)

    def add(self, digest: bytes, take_share: TakeShare) -> None:
        """Adds a request for which the answer is not computed."""
        self._sharers.setdefault(digest, {})[take_share] = None

    def remove(self, digest: bytes, take_share: TakeShare) -> None:
        """Removes a request that has ended or has its share; does nothing if it was removed before."""
        sharers = self._sharers.get(digest, {})
        sharers.pop(take_share, None)
        if not sharers:
            self._sharers.pop(digest, None)

    def rest_of(self, digest: bytes, usage: Usage) -> Usage:
        """Returns what is left for the first caller of the tokens of an answer that is complete now."""
        return usage.split(1 + len(self._sharers.get(digest, ())))[1]

    def divide(self, digest: bytes, usage: Usage) -> None:
        """Gives their shares to all others."""
        sharers = self._sharers.pop(digest, {})
        share, _ = usage.split(1 + len(sharers))
        for take_share in sharers:
            take_share(share, usage)
