"""The `engine` section: which device runs the model, and how large its batches and its KV cache are.

Imports nothing heavy: the gateway reads this section too, and it runs without torch.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct


class EngineConfig(Struct, frozen=True, kw_only=True):
    """Which device runs the model, and how large its batches and its KV cache are."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(description="`auto` takes the GPU if there is one, else the CPU."),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "fp32", "bf16"],
        Meta(description="Type of weights and KV cache. `auto` takes what is fast on the device."),
    ] = "auto"
    threads: Annotated[
        int,
        Meta(ge=0, le=4096, description="CPU threads of a step; 0 takes one per core, less one for the gateway."),
    ] = 0
    kv_memory_bytes: Annotated[
        Annotated[int, Meta(ge=1 << 20)] | None,
        Meta(
            description="Memory for the KV cache; null takes a share of what is free when the engine starts.",
            extra={"unit": "bytes"},
        ),
    ] = None
    block_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Tokens per KV block. Prefixes are shared in whole blocks: smaller ones share more and cost "
            "more bookkeeping.",
            extra={"unit": "tokens"},
        ),
    ] = 16
    max_sequences: Annotated[
        int,
        Meta(
            ge=1,
            le=65536,
            description="Sequences in one batch at most; further ones wait.",
            extra={"unit": "sequences"},
        ),
    ] = 128
    step_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=1_048_576,
            description="Tokens computed in one step at most, prefill and decode together. More finishes long prompts "
            "sooner; less keeps the time between two tokens of everybody else short. At least `max_sequences`.",
            extra={"unit": "tokens"},
        ),
    ] = 512
    context_tokens: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        Meta(
            description="Longest prompt and answer together; null takes what the model was made for.",
            extra={"unit": "tokens"},
        ),
    ] = None
    prefix_cache: Annotated[
        bool,
        Meta(description="Keep the KV of finished prompts and reuse it when another prompt starts the same way."),
    ] = True
