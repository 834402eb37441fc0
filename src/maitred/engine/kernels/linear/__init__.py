"""Matrix products with fixed weights (linear layers), each in its fastest form."""

import torch
from torch import Tensor

from maitred.engine.config import ProductFormat
from maitred.engine.kernels.linear.form import Linear, PlainLinear, Unchanged
from maitred.engine.kernels.linear.packed import PackedLinear, agrees, can_pack, keeps_rows_apart
from maitred.engine.kernels.linear.panels import GroupedWeight
from maitred.engine.kernels.linear.quantised import QuantisedLinear
from maitred.engine.kernels.linear.screened import ScreenedLinear, searchable
from maitred.engine.kernels.linear.tiled import TiledLinear
from maitred.engine.kernels.linear.torchao_linear import make_torchao_linear

__all__ = [
    "KINDS", "GroupedWeight", "Linear", "PackedLinear", "PlainLinear", "QuantisedLinear", "ScreenedLinear",
    "TiledLinear", "Unchanged", "make_head", "make_linear",
]  # fmt: skip

_FORMS: tuple[type[Linear], ...] = (
    *(PlainLinear, PackedLinear, QuantisedLinear, ScreenedLinear, TiledLinear, Unchanged),
)
KINDS: dict[str, type[Linear]] = {form.kind: form for form in _FORMS}
"""Kind -> class; ``KINDS[kind].from_tensors(tensors)`` makes a linear again that was taken apart."""


def make_linear(
    weight: Tensor | GroupedWeight,
    bias: Tensor | None = None,
    scheme: ProductFormat = "none",
    *,
    accelerated: bool = False,
) -> Linear:
    """Makes the fastest product for this weight ``[out, in]``, its type and its device.

    On a CPU, only products are chosen whose result for a row does not depend on the rows beside it. Otherwise an answer
    that is continued, on this engine or another, would differ. The choice depends on the processor alone, so engines on
    equal processors choose alike.

    Args:
        weight: Weight ``[out, in]``; fp32 on a CPU if it is to be quantised there. A grouped one is for fp32 on a CPU,
            and stays as it is unless it has 8 bits and the scheme 4.
        bias: ``[out]``
        scheme: How the weight is quantised.
        accelerated: Whether an accelerator computes the product; see `maitred.engine.device.ComputeDevice`.
    """
    if isinstance(weight, GroupedWeight):
        if not accelerated and (weight.bits == 4 or not scheme.startswith("int4")):
            return QuantisedLinear(weight, bias, bits=weight.bits, real=scheme not in ("int8", "int4"))
        weight = weight.plain()
    if scheme == "bf16":
        return PlainLinear(weight, bias) if accelerated else QuantisedLinear(weight, bias, bits=16, real=False)
    if accelerated:
        return PlainLinear(weight, bias) if scheme == "none" else make_torchao_linear(weight, bias, scheme)
    if scheme != "none":
        return QuantisedLinear(weight, bias, bits=4 if scheme.startswith("int4") else 8, real="weight_only" in scheme)
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return PlainLinear(weight, bias)
    if can_pack():
        packed = PackedLinear(weight, bias)
        for product in (packed, packed.without_strips()):
            if keeps_rows_apart(product, *weight.shape) and agrees(product, weight, bias):
                return product
    return TiledLinear(weight, bias)


def make_head(weight: Tensor | GroupedWeight, scheme: ProductFormat = "none", *, accelerated: bool = False) -> Linear:
    """Makes the fastest product for logits; a large head can be searched for the largest logit.

    Without a scheme, a grouped weight is unpacked, since a search reads no more of it than it takes grouped.
    """
    if isinstance(weight, GroupedWeight):
        if scheme != "none":
            return make_linear(weight, None, scheme, accelerated=accelerated)
        weight = weight.plain()
    product = make_linear(weight, None, scheme, accelerated=accelerated)
    return searchable(product, weight) or product
