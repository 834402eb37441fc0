"""Protocol of attention backends, which compute everything between the fused and the output projection."""

from typing import Generic, Protocol, TypeVar

from torch import Tensor

from maitred.engine.models.batch import ForwardBatch
from maitred.engine.models.kv_cache import KVCache

PlanT = TypeVar("PlanT")


class AttentionBackend(Protocol, Generic[PlanT]):
    """Attention backend of one model on one device: rotates, writes the KV cache and attends.

    Data that depends on the batch alone (masks, gather indices) is computed once per step in `plan` and used by every
    layer.
    """

    graphable: bool
    """Whether steps of decodes can be recorded and replayed.

    Such a step is planned and computed on the device, from the tensors of the batch and their shapes alone.
    """

    def plan(self, batch: ForwardBatch, cache: KVCache) -> PlanT:
        """Computes what all layers of a step share."""
        ...

    def attend(self, layer: int, qkv: Tensor, cache: KVCache, plan: PlanT) -> Tensor:
        """Computes the attention of one layer.

        All keys and values of the step are in the cache before the first row attends.

        Args:
            layer: Index of the layer in the cache.
            qkv: ``[T, (heads + 2 * kv_heads) * head_dim]``, not rotated yet; may be overwritten.
            cache: Cache that is written at the step's slots, then read.
            plan: Plan of this step.

        Returns:
            ``[T, heads * head_dim]``
        """
        ...
