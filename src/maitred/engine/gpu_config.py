"""The settings of `engine.gpu`. Imports nothing heavy: gateways read them too."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

AttentionKernels = Literal["auto", "flashinfer", "triton", "torch"]
"""Whose kernels compute attention."""


class GPUConfig(Struct, frozen=True, kw_only=True):
    """What an engine on a GPU does there; on a CPU none of it has an effect. See [GPUs](gpu.md)."""

    attention: Annotated[
        AttentionKernels,
        Meta(
            description="Whose kernels compute attention. `triton`: maitred's own. `flashinfer`: FlashInfer's for "
            "prompts, and maitred's own for everything else. `torch`: torch's, which run everywhere, are not recorded "
            "in graphs, and are slow with long contexts. `auto` takes FlashInfer if it is installed, else Triton if it "
            "is, else torch."
        ),
    ] = "auto"
    memory_fraction: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Part of the GPU's memory that the engine takes, weights and all, where `kv_memory_bytes` does "
            "not say how large the KV cache is. What the largest step needs is measured, and is part of it too.",
        ),
    ] = 0.9
    graph_sequences: Annotated[
        Annotated[int, Meta(ge=0, le=4096)] | None,
        Meta(
            description="Steps in which so many sequences or fewer each get one token are recorded as CUDA graphs at "
            "the start and replayed, which spares the host launching every kernel. 0 records none; null records up to "
            "`max_sequences`, but no more than 256.",
            extra={"unit": "sequences"},
        ),
    ] = None
