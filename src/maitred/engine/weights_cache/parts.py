"""Takes weights apart into named tensors, and puts them together again.

Weights are dataclasses of tensors, of linears and of further ones. What they were, but for the tensors' contents, is
their *plan*: a tree that JSON can say.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, cast

from torch import Tensor

from maitred.engine.kernels.linear import KINDS, Linear
from maitred.engine.weights_cache.tensor_file import AlignedTensor

_TENSOR_ALIGNMENT = 64
"""A line of the processor's cache: what torch's own allocator gives."""

Plan = Any
"""``null``, ``"name of a tensor"``, a list of plans, or an object with a `struct` or a `linear`."""


@dataclass
class WeightParts:
    """What weights consist of.

    Attributes:
        plan: How they are put together.
        tensors: By the names that the plan uses. One that occurs twice is there once.
    """

    plan: Plan = None
    tensors: dict[str, AlignedTensor] = field(default_factory=dict)
    _name_of: dict[tuple[int, int, str], str] = field(default_factory=dict)

    @classmethod
    def of(cls, weights: object) -> "WeightParts":
        """Takes weights apart; nothing is copied."""
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
    """The weights that a plan is of.

    Args:
        plan: From `WeightParts`.
        tensors: By their names.
        structs: The dataclasses that occur in it, by their names.

    Raises:
        LookupError, TypeError: The plan names what is not there: another version has made it.
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
