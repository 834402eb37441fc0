"""Imports torch for a process that compiles nothing.

Importing torch is most of an engine's start, and nearly a third of it brings what only torch's compilers use:
`torch.export`, and the shapes of results for tensors without data (`torch._meta_registrations`), with the
decompositions of operators that these are written in. An engine on a CPU runs kernels as they are. So these two have
empty stand-ins while torch is imported. They are taken away again afterwards: whoever asks for the modules later has
them imported then.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType

from maitred.engine.config import Device

_FOR_COMPILERS = ("torch._meta_registrations", "torch.export")
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Where there is one of these there may be a GPU: NVIDIA's driver, AMD's, and either inside of Windows."""


def import_torch_for(device: Device) -> None:
    """Imports torch, without its compilers where no GPU can be used.

    Raises:
        ImportError: It is not installed.
    """
    on_cpu = device == "cpu" or (device == "auto" and not any(Path(path).exists() for path in _GPU_DEVICES))
    if on_cpu and "torch" not in sys.modules:
        _import_eager()
    else:
        importlib.import_module("torch")


def _import_eager() -> None:
    sys.modules.update({name: ModuleType(name) for name in _FOR_COMPILERS})
    try:
        torch = importlib.import_module("torch")
    finally:
        for name in _FOR_COMPILERS:
            del sys.modules[name]
    for name in _FOR_COMPILERS:
        vars(torch).pop(name.removeprefix("torch."), None)
