"""Matrix products with fixed weights, each in the form in which it is fastest."""

import torch
from torch import Tensor

from maitred.engine.config import Quantization
from maitred.engine.kernels.linear.form import Linear, PlainLinear, Unchanged
from maitred.engine.kernels.linear.packed import PackedLinear, agrees, can_pack
from maitred.engine.kernels.linear.quantised import QuantisedLinear
from maitred.engine.kernels.linear.torchao_linear import make_torchao_linear

__all__ = ["KINDS", "Linear", "PackedLinear", "PlainLinear", "QuantisedLinear", "Unchanged", "make_linear"]

KINDS: dict[str, type[Linear]] = {form.kind: form for form in (PlainLinear, PackedLinear, QuantisedLinear, Unchanged)}
"""Every form by its name: what was taken apart is put together with ``KINDS[kind].of(tensors)``."""


def make_linear(
    weight: Tensor, bias: Tensor | None = None, scheme: Quantization = "none", *, accelerated: bool = False
) -> Linear:
    """The fastest product for this weight ``[out, in]``, its type and its device.

    Args:
        weight: fp32 on a CPU if it is to be rounded there.
        bias: ``[out]``
        scheme: How the weight is rounded.
        accelerated: For an accelerator, see `maitred.engine.target.Target`.
    """
    if accelerated:
        return PlainLinear(weight, bias) if scheme == "none" else make_torchao_linear(weight, bias, scheme)
    if scheme != "none":
        return QuantisedLinear(weight, bias, bits=4 if scheme.startswith("int4") else 8, real="weight_only" in scheme)
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and can_pack():
        packed = PackedLinear(weight, bias)
        if agrees(packed, weight, bias):
            return packed
    return PlainLinear(weight, bias)
