"""Network namespaces of this machine as regions, each with one address, and lines between them.

Everything is removed at the end, whatever happens: namespaces, devices and processes.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from benchmarks.support.requirements import RequirementMissing

_NETWORK = 0x40000000
_STOP_S = 10.0


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Moves this thread into a namespace for as long as the block lasts; sockets that it opens stay there.

    Raises:
        OSError: This process may not.
    """
    own = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY)
    try:
        _enter(f"/run/netns/{namespace}")
        try:
            yield
        finally:
            _enter_descriptor(own)
    finally:
        os.close(own)


def _enter(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _enter_descriptor(descriptor)
    finally:
        os.close(descriptor)


def _enter_descriptor(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _NETWORK) != 0:
        raise OSError(ctypes.get_errno(), "setns failed")


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


class Line:
    """Line between two regions, which can be cut and healed."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def cut(self) -> None:
        """Loses every packet from now on."""
        self._process.send_signal(signal.SIGUSR1)

    def heal(self) -> None:
        """Carries packets again."""
        self._process.send_signal(signal.SIGUSR2)


class RegionNetwork:
    """Namespaces with one address each.

    Attributes:
        regions: Region -> its namespace.
    """

    def __init__(self, regions: Sequence[str], stack: ExitStack) -> None:
        self._stack = stack
        self.regions = {region: f"maitred-{os.getpid()}-{region}" for region in regions}
        for region, namespace in self.regions.items():
            _run("ip", "netns", "add", namespace)
            stack.callback(subprocess.run, ["ip", "netns", "del", namespace], check=False, capture_output=True)
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
            _run("ip", "-n", namespace, "addr", "add", f"{self.address(region)}/32", "dev", "lo")

    def address(self, region: str) -> str:
        """Returns the address of a region, which no other machine sees."""
        return f"10.78.0.{1 + list(self.regions).index(region)}"

    def connect(self, first: str, second: str, *, round_trip_s: float, loss: float) -> Line:
        """Lays a line between two regions."""
        device = f"to-{first}-{second}"[:15]
        ends = [self.regions[first], self.regions[second]]
        command = [sys.executable, "-m", "benchmarks.support.regions.delay_line", *ends, device]
        process = subprocess.Popen(
            [*command, f"--delay-s={round_trip_s / 2}", f"--loss={loss}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(end_process, process)
        assert process.stdout is not None
        if process.stdout.readline().strip() != "up":
            raise RequirementMissing("No TUN device can be made here: it needs /dev/net/tun and root.")
        for here, there in ((first, second), (second, first)):
            place = ["-n", self.regions[here]]
            _run("ip", *place, "link", "set", device, "up", "mtu", "1400", "txqueuelen", "5000")
            _run("ip", *place, "route", "add", self.address(there), "dev", device, "src", self.address(here))
        return Line(process)

    def command(self, region: str, words: Sequence[str]) -> list[str]:
        """Returns the command that runs another one in a region."""
        return ["ip", "netns", "exec", self.regions[region], *words]


def end_process(process: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> None:
    """Ends a process, by force if it does not end by itself."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    process.kill()
    process.wait()


@contextmanager
def region_network(regions: Sequence[str]) -> Iterator[RegionNetwork]:
    """Makes the namespaces, and removes all of them at the end.

    Raises:
        RequirementMissing: This machine or this user has no namespaces.
    """
    if shutil.which("ip") is None or os.geteuid() != 0 or not Path("/dev/net/tun").exists():
        raise RequirementMissing(
            "Regions are network namespaces here: it needs root, `ip` (iproute2) and /dev/net/tun."
        )
    with ExitStack() as stack:
        try:
            network = RegionNetwork(regions, stack)
        except subprocess.CalledProcessError as error:
            raise RequirementMissing(f"No network namespace can be made here: {error.stderr.strip()}") from None
        yield network
