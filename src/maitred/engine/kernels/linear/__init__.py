"""Matrix products with fixed weights, each in the form in which it is fastest."""

import torch
from torch import Tensor

from maitred.engine.kernels.linear.form import Linear, PlainLinear, Unchanged
from maitred.engine.kernels.linear.packed import PackedLinear, agrees, can_pack

__all__ = ["KINDS", "Linear", "PackedLinear", "PlainLinear", "Unchanged", "make_linear"]

KINDS: dict[str, type[Linear]] = {form.kind: form for form in (PlainLinear, PackedLinear, Unchanged)}
"""Every form by its name: what was taken apart is put together with ``KINDS[kind].of(tensors)``."""


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest exact product for this weight ``[out, in]``, its type and its device."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and can_pack():
        packed = PackedLinear(weight, bias)
        if agrees(packed, weight, bias):
            return packed
    return PlainLinear(weight, bias)
