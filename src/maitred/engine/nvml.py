"""How busy and how full a GPU is, asked of NVIDIA's management library (NVML) where the driver has brought it.

PyTorch knows the memory of its own process only, and nothing of how busy the device is. The four functions that are
called here have kept their signatures since the library's version 2; see NVIDIA's NVML API Reference Guide, chapters
"Initialization and Cleanup" and "Device Queries". A call takes some tens of microseconds, and some milliseconds on a
device that sleeps.
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
    """GPU as NVML knows it.

    Args:
        library: NVML.
        uuid: As the driver prints it, such as ``GPU-8f2c…``.

    Raises:
        OSError: The library knows no such device, or does not start.
    """

    def __init__(self, library: Any, uuid: str) -> None:  # noqa: ANN401 - functions of a C library
        self._library = library
        self._uuid = uuid
        self._device = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode("ascii"), ctypes.byref(self._device))

    def state(self) -> GpuState | None:
        """How it stands; None where the driver does not say, as on some virtual devices."""
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
    """The device of that UUID; None where there is no NVML, or it does not know it."""
    try:
        return Gpu(ctypes.CDLL(_LIBRARY), uuid)
    except OSError:
        return None
