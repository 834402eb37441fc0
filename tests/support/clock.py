"""Time that stands still, and time that can be let pass."""

from maitred.core.clock import SystemClock


class FakeClock:
    """Moves only when a test sets it."""

    def __init__(self, now_s=1_000_000.0):
        self.now_s = now_s

    def monotonic_s(self):
        return self.now_s

    def wall_s(self):
        return self.now_s


class LaterClock(SystemClock):
    """The machine's clock, of which a test may say that time has passed."""

    def __init__(self):
        self.passed_s = 0.0

    def monotonic_s(self):
        return super().monotonic_s() + self.passed_s
