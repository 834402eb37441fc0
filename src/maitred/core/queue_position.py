"""Where a waiting request stands."""

import msgspec


class QueuePosition(msgspec.Struct, frozen=True):
    """Where a request stands in the queue, and what is predicted for it."""

    position: int
    """Requests that are expected to be released before it."""
    wait_s: float
    """From now until it is released to a replica."""
    ttft_s: float
    """From now until its first token."""

    @property
    def facts(self) -> dict[str, float]:
        """For stories."""
        return {
            "position": self.position,
            "predicted_wait_s": round(self.wait_s, 6),
            "predicted_ttft_s": round(self.ttft_s, 6),
        }
