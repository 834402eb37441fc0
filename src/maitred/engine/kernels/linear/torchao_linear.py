"""Linear with quantised weights on a GPU, computed by torchao if it is installed.

Torchao stores a weight as a tensor subclass that implements the product: int8 with a scale for each output, or fp8
(e4m3). With `int8` and `fp8` the rows are rounded too, each with its own scale, and multiplied in 8 bits; with
`…_weight_only` the weight is converted back for the product.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from maitred.core.errors import Bug, ConfigInvalid
from maitred.engine.config import Quantization

_FP8_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs that multiply fp8: Ada and Hopper."""


class TorchaoLinear:
    """Linear with torchao's tensor as its weight.

    Args:
        weight: Weight that torchao has quantised.
        bias: ``[out]``
    """

    __slots__ = ("_bias", "_weight")
    kind: ClassVar[str] = "torchao"
    alignment: ClassVar[int] = 64

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        """Maps ``[T, in]`` to ``[T, out]``."""
        return functional.linear(rows, self._weight, self._bias)

    def tensors(self) -> dict[str, Tensor]:
        """Raises `Bug`: weights of accelerators are not stored in files."""
        raise Bug("Weights that torchao has rounded are not taken apart.")

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Raises `Bug`: weights of accelerators are not stored in files."""
        raise Bug("Weights that torchao has rounded are not put together.")


def make_torchao_linear(weight: Tensor, bias: Tensor | None, scheme: Quantization) -> TorchaoLinear:
    """Quantises a weight ``[out, in]`` with one of the schemes that `check_torchao` accepts."""
    from torchao.quantization import quantize_

    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype)
    module.weight = nn.Parameter(weight, requires_grad=False)
    quantize_(module, _config(scheme))
    return TorchaoLinear(module.weight.detach(), bias)


def check_torchao(scheme: Quantization, device: torch.device) -> None:
    """Checks that torchao can quantise weights by a scheme, before any weights are read.

    Raises:
        ConfigInvalid: Torchao is not installed, does not support the scheme, or the device has no kernel for it.
    """
    if scheme not in _SCHEMES:
        raise ConfigInvalid(
            f"engine.quantization is {scheme}, which works on a CPU. On a GPU set it to one of "
            f"{', '.join(_SCHEMES)} or none."
        )
    if find_spec("torchao") is None:
        raise ConfigInvalid(
            f"engine.quantization is {scheme}, which on a GPU is torchao's work, and torchao is not installed. Install "
            "it (pip install torchao), or set engine.quantization to none."
        )
    if scheme == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        raise ConfigInvalid(
            f"engine.quantization is fp8, which takes an Ada or Hopper GPU, but {torch.cuda.get_device_name(device)} "
            "is older. Set it to int8 or fp8_weight_only."
        )


def _config(scheme: Quantization) -> Any:  # noqa: ANN401 - torchao has no common type
    from torchao import quantization

    return getattr(quantization, _SCHEMES[scheme])(set_inductor_config=False)


_SCHEMES: dict[Quantization, str] = {
    "int8": "Int8DynamicActivationInt8WeightConfig",
    "int8_weight_only": "Int8WeightOnlyConfig",
    "fp8": "Float8DynamicActivationFloat8WeightConfig",
    "fp8_weight_only": "Float8WeightOnlyConfig",
}
"""Scheme -> torchao's name for it."""
