"""Line between two network namespaces that delays each packet and loses some; a process of its own.

The kernel of a small machine may have no `netem`. So the line is a TUN device in each of the two namespaces, and this
process carries the packets from one to the other. SIGUSR1 cuts the line: packets vanish without a word, as on a line
that is dug up. SIGUSR2 heals it.

    python -m benchmarks.support.regions.delay_line NAMESPACE_A NAMESPACE_B DEVICE --delay-s 0.02 --loss 0.01
"""

import argparse
import fcntl
import heapq
import os
import random
import selectors
import signal
import struct
import sys
import time
from contextlib import suppress

from benchmarks.support.regions.namespaces import inside

TUNSETIFF = 0x400454CA
TUN_WITHOUT_HEADER = 0x1001
MTU = 1400
AT_ONCE = 64
LONGEST_WAIT_S = 0.5


def open_device(namespace: str, name: str) -> int:
    """Makes the device of one end."""
    with inside(namespace):
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH", name.encode(), TUN_WITHOUT_HEADER))
    return descriptor


class DelayLine:
    """The line between two devices.

    Args:
        ends: Descriptors of both devices.
        delay_s: One way.
        loss: Part of the packets that is lost.
    """

    def __init__(self, ends: tuple[int, int], delay_s: float, loss: float) -> None:
        self.is_cut = False
        self._delay_s, self._loss = delay_s, loss
        self._random = random.Random(1)
        self._selector = selectors.DefaultSelector()
        for end, other in (ends, ends[::-1]):
            self._selector.register(end, selectors.EVENT_READ, other)
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        self._flying: list[tuple[float, int, int, bytes]] = []
        self._count = 0

    def run(self) -> None:
        """Carries packets until the process is ended, or its parent is."""
        while True:
            self._deliver(time.monotonic())
            wait_s = self._flying[0][0] - time.monotonic() if self._flying else LONGEST_WAIT_S
            for key, _ in self._selector.select(max(0.0, wait_s)):
                if key.data is None:
                    return
                self._accept(key.fd, key.data)

    def _deliver(self, now_s: float) -> None:
        while self._flying and self._flying[0][0] <= now_s:
            _, _, end, packet = heapq.heappop(self._flying)
            if not self.is_cut:
                with suppress(OSError):
                    os.write(end, packet)

    def _accept(self, end: int, other: int) -> None:
        with suppress(BlockingIOError):
            for _ in range(AT_ONCE):
                packet = os.read(end, 2 * MTU)
                if not self.is_cut and self._random.random() >= self._loss:
                    self._count += 1
                    heapq.heappush(self._flying, (time.monotonic() + self._delay_s, self._count, other, packet))


def main() -> None:
    """Runs a line until SIGTERM, or until its parent closes its standard input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("namespaces", nargs=2)
    parser.add_argument("device")
    parser.add_argument("--delay-s", type=float, required=True)
    parser.add_argument("--loss", type=float, required=True)
    arguments = parser.parse_args()
    first, second = (open_device(namespace, arguments.device) for namespace in arguments.namespaces)
    line = DelayLine((first, second), arguments.delay_s, arguments.loss)
    signal.signal(signal.SIGUSR1, lambda *_: setattr(line, "is_cut", True))
    signal.signal(signal.SIGUSR2, lambda *_: setattr(line, "is_cut", False))
    print("up", flush=True)
    line.run()


if __name__ == "__main__":
    main()
