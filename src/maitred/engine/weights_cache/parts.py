"""Conversion of weights to named tensors with a plan, and back.

Weights are dataclasses of tensors, linears and further dataclasses. Their *plan* is a tree in JSON that describes
everything except the tensors' contents.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, cast

from torch import Tensor

from maitred.engine.kernels.linear import KINDS, Linear
from maitred.engine.weights_cache.tensor_file import AlignedTensor

_TENSOR_ALIGNMENT = 64
"""Cache line of the processor: the alignment of torch's own allocator."""

Plan = Any
"""Plan of weights: ``null``, a tensor's name, a list of plans, or an object with a `struct` or a `linear`."""


@dataclass
class WeightParts:
    """Weights taken apart into a plan and named tensors.

    Attributes:
        plan: Plan by which the weights are assembled.
        tensors: Tensors by their names in the plan. A tensor that occurs twice is stored once.
    """

    plan: Plan = None
    tensors: dict[str, AlignedTensor] = field(default_factory=dict)
    _name_of: dict[tuple[int, int, str], str] = field(default_factory=dict)

    @classmethod
    def of(cls, weights: object) -> "WeightParts":
        """Takes weights apart, without copies."""
        parts = cls()
        parts.plan = parts._take(weights, "")
        return parts

    def _take(self, value: object, name: str) -> Plan:
        if value is None:
            return None
        if isinstance(value, Tensor):
            return self._keep(value, name, _TENSOR_ALIGNMENT)
        if isinstance(value, list):
            return [self._take(entry, f"{name}.{index}") for index, entry in enumerate(value)]
        if is_dataclass(value):
            own = {part.name: self._take(getattr(value, part.name), f"{name}.{part.name}") for part in fields(value)}
            return {"struct": type(value).__name__, "fields": own}
        linear = cast(Linear, value)
        own = {key: self._keep(t, f"{name}.{key}", linear.alignment) for key, t in linear.tensors().items()}
        return {"linear": linear.kind, "tensors": own}

    def _keep(self, tensor: Tensor, name: str, alignment: int) -> str:
        same = (tensor.data_ptr(), alignment, f"{tensor.dtype}{tensor.shape}{tensor.stride()}")
        if same not in self._name_of or not tensor.nbytes:
            self._name_of[same] = name
            self.tensors[name] = AlignedTensor(tensor, alignment)
        return self._name_of[same]


def put_together(plan: Plan, tensors: Mapping[str, Tensor], structs: Mapping[str, type]) -> Any:  # noqa: ANN401
    """Assembles weights from their plan and tensors.

    Args:
        plan: Plan from `WeightParts`.
        tensors: Tensors by name.
        structs: Dataclasses that occur in the plan, by name.

    Raises:
        LookupError, TypeError: The plan refers to something unknown: another version has made it.
    """
    if plan is None:
        return None
    if isinstance(plan, str):
        return tensors[plan]
    if isinstance(plan, list):
        return [put_together(entry, tensors, structs) for entry in plan]
    if "linear" in plan:
        return KINDS[plan["linear"]].of({key: tensors[name] for key, name in plan["tensors"].items()})
    struct = structs[plan["struct"]]
    return struct(**{name: put_together(part, tensors, structs) for name, part in plan["fields"].items()})
