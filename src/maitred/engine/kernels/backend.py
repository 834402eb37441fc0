"""What the decoder leaves to a backend: everything of attention between the fused projection and the output one."""

from typing import Generic, Protocol, TypeVar

from torch import Tensor

from maitred.engine.models.batch import ForwardBatch
from maitred.engine.models.kv_cache import KVCache

PlanT = TypeVar("PlanT")


class AttentionBackend(Protocol, Generic[PlanT]):
    """Rotates, writes the cache and attends, for one model on one device.

    What depends on the batch alone (masks, gather indices) is worked out once per step in `plan` and used by every
    layer.
    """

    graphable: bool
    """Whether steps of decodes can be recorded and replayed: planned and computed on the device, from the tensors of
    the batch and their shapes alone."""

    def plan(self, batch: ForwardBatch, cache: KVCache) -> PlanT:
        """Prepares a step."""
        ...

    def attend(self, layer: int, qkv: Tensor, cache: KVCache, plan: PlanT) -> Tensor:
        """One layer's attention.

        All keys and values of the step are in the cache before the first row attends.

        Args:
            layer: Which layer of the cache.
            qkv: ``[T, (heads + 2 * kv_heads) * head_dim]``, not rotated yet; may be overwritten.
            cache: Written at the step's slots, then read.
            plan: Of this step.

        Returns:
            ``[T, heads * head_dim]``
        """
        ...
