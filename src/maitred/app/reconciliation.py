"""The ledger against the engine: what was charged must be what was computed."""

from maitred.core.ports import LoadReport
from maitred.core.request import Usage


class Reconciliation:
    """Compares one engine's count of output tokens with the ledger's, from when `begin` was called.

    Engines count from their own start. A count that falls back is a new engine; what the old one had counted by then,
    as far as it was reported, stays in the sum.
    """

    def __init__(self) -> None:
        self._counted = 0
        self._last: LoadReport | None = None

    def begin(self, load: LoadReport) -> None:
        """Counts from here; what the engine has counted before is not this gateway's."""
        self._last = load

    def drift_tokens(self, load: LoadReport, recorded: Usage) -> int:
        """Output tokens that the engine has counted and the ledger has not.

        Args:
            load: The engine's last report.
            recorded: What the ledger has of its model since this gateway started.
        """
        if self._last is None:
            return 0
        again = load.steps < self._last.steps
        self._counted += load.output_tokens - (0 if again else self._last.output_tokens)
        self._last = load
        return self._counted - recorded.completion_tokens
