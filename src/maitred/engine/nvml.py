"""Utilisation and memory use of a GPU, read from NVIDIA's management library (NVML) if installed.

PyTorch reports only the memory of its own process, and no utilisation of the device. The four functions used here have
kept their signatures since version 2 of the library; see NVIDIA's NVML API Reference Guide, chapters "Initialization
and Cleanup" and "Device Queries". A call takes some tens of microseconds, or some milliseconds on a device in a
power-saving state.
"""

import ctypes
from typing import Any

from maitred.core.replica import GpuState

_LIBRARY = "libnvidia-ml.so.1"


class _Utilisation(ctypes.Structure):
    _fields_ = (("gpu_percent", ctypes.c_uint), ("memory_percent", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Gpu:
    """Handle of one GPU in NVML.

    Args:
        library: NVML.
        uuid: UUID of the GPU as the driver prints it, such as ``GPU-8f2c…``.

    Raises:
        OSError: The library has no device with this UUID, or does not initialise.
    """

    def __init__(self, library: Any, uuid: str) -> None:  # noqa: ANN401 - functions of a C library
        self._library = library
        self._uuid = uuid
        self._device = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode("ascii"), ctypes.byref(self._device))

    def state(self) -> GpuState | None:
        """Returns the GPU's state; None where the driver does not report it, as on some virtual devices."""
        busy, memory = _Utilisation(), _Memory()
        try:
            self._call("nvmlDeviceGetUtilizationRates", self._device, ctypes.byref(busy))
            self._call("nvmlDeviceGetMemoryInfo", self._device, ctypes.byref(memory))
        except OSError:
            return None
        return GpuState(self._uuid, busy.gpu_percent / 100, memory.used, memory.total)

    def _call(self, function: str, *arguments: object) -> None:
        code = getattr(self._library, function)(*arguments)
        if code != 0:
            raise OSError(f"{function} says {code}")


def open_gpu(uuid: str) -> Gpu | None:
    """Opens the GPU with this UUID; returns None without NVML, or if NVML has no such device."""
    try:
        return Gpu(ctypes.CDLL(_LIBRARY), uuid)
    except OSError:
        return None
