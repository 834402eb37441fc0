"""Torch, imported without what an engine on a CPU never asks for: nearly half of what its import takes.

For tensors on the "meta" device, which have a shape and no data, torch has kernels that are written in Python: it
declares some hundreds of them each time that it is imported. Compiling and exporting models need them; computing with
numbers on a CPU does not. Nor does it need the exporter itself, or layers for training with quantised numbers, masked
tensors and distributions, which are Python on top of torch. So an engine puts empty modules in their places while it
imports torch, and calls `complete_torch` where they are wanted after all: on a GPU, and where a checkpoint is
converted. Torch's random generators come with the kernels for "meta" tensors, too.
"""

import importlib
import sys
from types import ModuleType

_LEFT_OUT = (
    "torch._meta_registrations",
    "torch.distributions",
    "torch.export",
    "torch.masked",
    "torch.nn.intrinsic",
    "torch.nn.qat",
    "torch.nn.quantizable",
    "torch.nn.quantized",
    "torch.quantization",
)


def import_lean_torch() -> None:
    """Imports torch without them, unless somebody has imported it."""
    if "torch" in sys.modules:
        return
    stand_ins = {name: ModuleType(name) for name in _LEFT_OUT}
    sys.modules.update(stand_ins)
    try:
        importlib.import_module("torch")
    finally:
        for name in stand_ins:
            del sys.modules[name]
    for name, stand_in in stand_ins.items():
        package, _, attribute = name.rpartition(".")
        if getattr(sys.modules[package], attribute, None) is stand_in:
            delattr(sys.modules[package], attribute)


def complete_torch() -> None:
    """Imports what is still missing of torch, if anything is."""
    for name in _LEFT_OUT:
        importlib.import_module(name)
