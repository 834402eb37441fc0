"""What an engine's process says of itself, and of its GPU through a library with NVML's signatures."""

import ctypes

import psutil
import pytest

from maitred.core.replica import GpuState
from maitred.engine.nvml import Gpu, open_gpu
from maitred.engine.process_stats import ProcessStats
from tests.support.clock import FakeClock

UUID = "GPU-0123"


class Library:
    """Behaves as NVML does for one device: numbers for results, and structures filled through pointers."""

    def __init__(self, *, broken=False):
        self.broken = broken
        self.calls = 0

    def nvmlInit_v2(self):  # noqa: N802 - as the library has it
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, device):  # noqa: N802
        ctypes.cast(device, ctypes.POINTER(ctypes.c_void_p))[0] = 7
        return 0 if uuid == UUID.encode() else 6

    def nvmlDeviceGetUtilizationRates(self, device, rates):  # noqa: N802
        self.calls += 1
        assert device.value == 7
        numbers = ctypes.cast(rates, ctypes.POINTER(ctypes.c_uint))
        numbers[0], numbers[1] = 40, 10
        return 3 if self.broken else 0

    def nvmlDeviceGetMemoryInfo(self, device, memory):  # noqa: N802
        numbers = ctypes.cast(memory, ctypes.POINTER(ctypes.c_ulonglong))
        numbers[0], numbers[1], numbers[2] = 80 << 30, 30 << 30, 50 << 30
        return 0


def test_a_process_knows_what_it_takes():
    state = ProcessStats(FakeClock()).now()
    assert state.cpu_s == pytest.approx(sum(psutil.Process().cpu_times()[:2]), abs=1.0)
    assert state.resident_bytes > 1 << 20
    assert state.open_files > 0
    assert state.threads > 0
    assert state.gpu is None


def test_a_gpu_is_looked_at_once_a_second():
    library, clock = Library(), FakeClock()
    vitals = ProcessStats(clock, Gpu(library, UUID))
    assert vitals.now().gpu == GpuState(UUID, 0.4, 50 << 30, 80 << 30)
    clock.now_s += 0.9
    vitals.now()
    assert library.calls == 1
    clock.now_s += 0.2
    vitals.now()
    assert library.calls == 2


def test_what_the_driver_does_not_say_is_left_out():
    assert Gpu(Library(broken=True), UUID).state() is None
    with pytest.raises(OSError, match="nvmlDeviceGetHandleByUUID says 6"):
        Gpu(Library(), "GPU-of-somebody-else")


def test_where_there_is_no_driver_there_is_no_gpu():
    assert open_gpu("GPU-that-nobody-has") is None
