"""Torch, imported without what only tensors without data need: a third of what its import takes.

For tensors on the "meta" device, which have a shape and no data, torch has kernels that are written in Python: it
declares some hundreds of them each time that it is imported. Compiling and exporting models need them; computing with
numbers on a CPU does not. So an engine puts an empty module in their place while it imports torch, and calls
`complete_torch` where they are wanted after all: on a GPU, and where a checkpoint is converted. Torch's random
generators come with them, too.
"""

import importlib
import sys
from types import ModuleType

_META_KERNELS = "torch._meta_registrations"


def import_lean_torch() -> None:
    """Imports torch without them, unless somebody has imported it."""
    if "torch" in sys.modules:
        return
    stand_in = sys.modules[_META_KERNELS] = ModuleType(_META_KERNELS)
    try:
        torch = importlib.import_module("torch")
    finally:
        del sys.modules[_META_KERNELS]
    if getattr(torch, "_meta_registrations", None) is stand_in:
        del torch._meta_registrations


def complete_torch() -> None:
    """Imports what is still missing of torch, if anything is."""
    importlib.import_module(_META_KERNELS)
