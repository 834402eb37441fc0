"""Time that stands still."""


class FakeClock:
    """Moves only when a test sets it."""

    def __init__(self, now_s=1_000_000.0):
        self.now_s = now_s

    def monotonic_s(self):
        return self.now_s

    def wall_s(self):
        return self.now_s
