"""The `engine` section: which device runs the model, and how large its batches and its KV cache are.

Imports nothing heavy: the gateway reads this section too, and it runs without torch.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta, Struct

from maitred.core.flow import PriorityClass
from maitred.engine.weights_cache.config import WeightsCacheConfig
from maitred.fairness.config import QueueOrderConfig

__all__ = ["AttentionKernels", "Device", "EngineConfig", "GPUConfig", "PoolingMode", "Quantization"]

_MOST_GRAPH_SEQUENCES = 256

Device = Annotated[
    Literal["auto", "cpu", "cuda"], Meta(description="`auto` takes the GPU if there is one, else the CPU.")
]

Quantization = Annotated[
    Literal["none", "int8", "int8_weight_only", "int4", "int4_weight_only", "fp8", "fp8_weight_only"],
    Meta(
        description="Rounds the weights when the model is loaded. `int8`, `int4` and `fp8` also round what they are "
        "multiplied with to 8 bits, each token by itself; `…_weight_only` do not, which is slower with many tokens in "
        "a step. See [quantization](quantization.md) for speed and accuracy. On a CPU `int8` and `int4`; on a GPU "
        "`int8` and `fp8`, by torchao (see [GPUs](gpu.md))."
    ),
]
"""Number formats of the weights and of the activations that are multiplied with them."""

ProductFormat = Quantization | Literal["bf16"]
"""Number format of matrix products: quantised, or bf16 on a CPU that multiplies it while all else is fp32."""

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
"""Method that pools the rows of a text to one vector; the names are those of sentence-transformers."""


class KVShareConfig(Struct, frozen=True, kw_only=True):
    """Minimum (`floor`) and maximum (`ceiling`) share of the KV cache for a tenant."""

    floor: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Part of the KV cache that others leave to the tenant while it has requests waiting. What they "
            "took before, they give back as their requests end. The floors of all tenants together are at most 1; "
            "those of an organisation and of a team in it count twice.",
        ),
    ] = 0.0
    ceiling: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Part of the KV cache that the tenant's running requests hold at most, even if the rest is "
            "idle. Requests that could not run in it alone are refused.",
        ),
    ] = 1.0


SimilarQuestionsLimit = Annotated[
    int,
    Meta(
        ge=0,
        le=50_000,
        description="Cached questions in which an encoder looks for similar ones, for `cache.mode: semantic`; the one "
        "that was added or served longest ago goes first. A question takes about 12 KB with an encoder of 384 "
        "dimensions, and at most 22 KB on average, in proportion to the dimensions; so 10,000 take 120 MB. 0: none, "
        "and no similar question is found.",
        extra={"unit": "questions"},
    ),
]


class SpeculationConfig(Struct, frozen=True, kw_only=True):
    """Speculative decoding: draft tokens let one step compute several tokens of an answer.

    The answers stay identical, token by token.
    """

    method: Annotated[
        Literal["none", "ngram", "draft_model", "auto"],
        Meta(
            description="Who guesses. `ngram` looks up what followed the last time when the text read like this, which "
            "pays where answers repeat what stands in their prompts or in themselves. `draft_model` has a smaller "
            "model write ahead. `auto` takes, answer by answer, what of both is expected to bring more. Guesses are "
            "made only while they are measured to pay, so never in a full batch."
        ),
    ] = "none"
    draft_model: Annotated[
        str | None,
        Meta(
            description="The smaller model: a folder, or a model on Hugging Face's hub, as in `model.path`. It must "
            "have the same vocabulary. It runs in the same types of numbers and with the same quantization as the "
            "model, and its keys and values are part of `kv_memory_bytes`. For the methods `draft_model` and `auto`."
        ),
    ] = None
    most_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Guessed tokens of one sequence in one step at most. They take no KV blocks, so there are also "
            "never more than fit behind the sequence's last token in the blocks that it has.",
            extra={"unit": "tokens"},
        ),
    ] = 12


class PinsConfig(Struct, frozen=True, kw_only=True):
    """Maximum share of the KV cache that pinned prefixes may hold while no request uses them."""

    share: Annotated[
        float, Meta(ge=0, le=0.9, description="Part of the KV cache that all pins together may hold; 0: none.")
    ] = 0.25
    share_each: Annotated[
        float, Meta(ge=0, le=0.9, description="Part of it that the pins of one organisation may hold.")
    ] = 0.1


class BatchLineConfig(QueueOrderConfig, frozen=True, kw_only=True):
    """Order in which requests get the next free slot of the batch.

    The gateway sends few requests beyond the engine's capacity, so `dispatch.line` has more influence than this
    section. This section matters where several gateways share an engine.
    """


AttentionKernels = Literal["auto", "flashinfer", "triton", "torch"]
"""Implementation of the attention kernels."""


class GPUConfig(Struct, frozen=True, kw_only=True):
    """Settings of an engine on a GPU, which have no effect on a CPU. See [GPUs](gpu.md)."""

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
            "`max_sequences`, but no more than 256. With `quantization: int8` none can be recorded.",
            extra={"unit": "sequences"},
        ),
    ] = None


class EngineConfig(Struct, frozen=True, kw_only=True):
    """Settings of the device, of the batch size and of the KV cache."""

    device: Device = "auto"
    dtype: Annotated[
        Literal["auto", "fp32", "bf16"],
        Meta(description="Type of weights and of what is computed. `auto` takes what is fast on the device."),
    ] = "auto"
    quantization: Quantization = "none"
    kv_dtype: Annotated[
        Literal["auto", "fp32", "bf16", "int8"],
        Meta(
            description="Type of the KV cache; `auto` takes that of what is computed. Smaller ones hold more tokens in "
            "the same memory and are read faster, and round what a model remembers. `int8` works on a CPU and has a "
            "scale for every token and head."
        ),
    ] = "auto"
    threads: Annotated[
        int,
        Meta(ge=0, le=4096, description="CPU threads of a step; 0 takes one per core, less one for the gateway."),
    ] = 0
    drain_grace_s: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="Time for the running answers of an engine that is told to end (SIGTERM), unless whoever has "
            "started it ends it before.",
            extra={"unit": "seconds"},
        ),
    ] = 30.0
    machine_share: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Part of the cores and of the free memory that the engine takes where `threads` and "
            "`kv_memory_bytes` do not say how much. `maitred serve` divides it among the replicas that it starts.",
        ),
    ] = 1.0
    kv_memory_bytes: Annotated[
        Annotated[int, Meta(ge=1 << 20)] | None,
        Meta(
            description="Memory for the KV cache; null takes a share of what is free when the engine starts.",
            extra={"unit": "bytes"},
        ),
    ] = None
    swap_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Memory of the host for KV blocks of preempted sequences. They are copied there when others "
            "need their room, and back when the sequence goes on, where that is measured to be faster than computing "
            "them again. 0: they are computed again. Meant for GPUs, whose memory is apart from the host's.",
            extra={"unit": "bytes"},
        ),
    ] = 0
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
    guests: Annotated[
        Annotated[int, Meta(ge=0, le=65536)] | None,
        Meta(
            description="Sequences that may run beyond `max_sequences` when all places are taken, of tenants that hold "
            "fewer places than others; these then leave sequences out of a step in turn. Null: half of "
            "`max_sequences` if the line is fair, otherwise none.",
            extra={"unit": "sequences"},
        ),
    ] = None
    step_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=1_048_576,
            description="Tokens computed in one step at most, prefill and decode together. More finishes long prompts "
            "sooner; less keeps the time between two tokens of everybody else short. At least `max_sequences`.",
            extra={"unit": "tokens"},
        ),
    ] = 384
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
    line: BatchLineConfig = BatchLineConfig()
    itl_objective_s: Annotated[
        Annotated[float, Meta(gt=0, le=60)] | None,
        Meta(
            description="The time between two tokens that 95 % of an answer's tokens should keep. Prompts are then "
            "computed in pieces that fit into it, and the number of running sequences adapts, between `min_sequences` "
            "and `max_sequences`. Null: steps are as large as `step_tokens` allows.",
            extra={"unit": "seconds"},
        ),
    ] = None
    min_sequences: Annotated[
        int,
        Meta(
            ge=1,
            le=65536,
            description="Sequences that may always run together, however slow the steps are. At most `max_sequences`; "
            "without `itl_objective_s` it has no effect.",
            extra={"unit": "sequences"},
        ),
    ] = 1
    kv_shares: Annotated[
        dict[str, KVShareConfig],
        Meta(
            description="Tenant (the id of an organisation, a team or a key) -> how much of the KV cache it can count "
            "on and can have. Others compete for what is left, as usual."
        ),
    ] = {}
    batching_window_s: Annotated[
        dict[PriorityClass, Annotated[float, Meta(ge=0, le=60)]],
        Meta(
            description="Priority class (`interactive`, `standard`, `batch`, `background`) -> how long a request may "
            "be held back while nothing runs, so that others can join its batch. A class that is not named is never "
            "held back.",
            extra={"unit": "seconds"},
        ),
    ] = {}
    pins: PinsConfig = PinsConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    bake_off: Annotated[
        Literal["auto", "off"],
        Meta(
            description="`auto`: when a model is started here for the first time, some made-up steps are computed and "
            "timed, for about a second, so that the first requests can be told how long they take. What was measured "
            "is kept beside the weights (`weights_cache`), for this model, these settings and this processor. `off`: "
            "it is learnt from the first requests."
        ),
    ] = "auto"
    pooling: Annotated[
        Literal[PoolingMode, "auto"] | None,
        Meta(
            description="Compute embeddings with a model that generates: its last rows are pooled in this way. `auto` "
            "does as the model's files say (`1_Pooling/config.json`), or takes the last token. Null: models that were "
            "made for embeddings compute them, and the others generate."
        ),
    ] = None
    similar_questions: SimilarQuestionsLimit = 10_000
    batching_window_requests: Annotated[
        int,
        Meta(
            ge=2,
            le=65536,
            description="So many sequences that wait end every batching window.",
            extra={"unit": "sequences"},
        ),
    ] = 8
    weights_cache: WeightsCacheConfig = WeightsCacheConfig()
    gpu: GPUConfig = GPUConfig()

    @property
    def most_graph_sequences(self) -> int:
        """Returns `gpu.graph_sequences`, or the default if it is null."""
        if self.gpu.graph_sequences is not None:
            return self.gpu.graph_sequences
        return min(self.max_sequences, _MOST_GRAPH_SEQUENCES)

    @property
    def most_overcommit_slots(self) -> int:
        """Returns `guests`, or the default if it is null."""
        if self.guests is not None:
            return self.guests
        return self.max_sequences // 2 if self.line.policy == "fair" else 0


def engine_faults(config: EngineConfig) -> Iterator[tuple[str, str]]:
    """Yields the dotted key and the message of each fault in the section."""
    if config.min_sequences > config.max_sequences:
        yield (
            "engine.min_sequences",
            f"{config.min_sequences} is more than engine.max_sequences, {config.max_sequences}. Lower min_sequences or "
            "raise max_sequences.",
        )
    for tenant, share in config.kv_shares.items():
        if share.floor > share.ceiling:
            yield (
                f"engine.kv_shares.{tenant}.floor",
                f"{share.floor:g} is more than the tenant's ceiling, {share.ceiling:g}: it could never have what "
                "others leave to it. Lower the floor or raise the ceiling.",
            )
    total = sum(share.floor for share in config.kv_shares.values())
    if total > 1 + 1e-9:
        yield (
            "engine.kv_shares",
            f"The floors add up to {total:g} of the KV cache, and there is only one. Lower some of them until they "
            "add up to at most 1.",
        )
    yield from speculation_faults(config.speculation)


def speculation_faults(speculation: SpeculationConfig) -> Iterator[tuple[str, str]]:
    """Returns the faults of the section `speculation`."""
    written = speculation.method in ("draft_model", "auto")
    if written and speculation.draft_model is None:
        yield (
            "engine.speculation.method",
            f"It is {speculation.method}, but no draft model is named. Set engine.speculation.draft_model to the "
            "folder of a smaller model with the same vocabulary, or the method to ngram.",
        )
    if not written and speculation.draft_model is not None:
        yield (
            "engine.speculation.draft_model",
            f"It is set, but engine.speculation.method is {speculation.method}, which does not use it. Set the method "
            "to draft_model or auto, or draft_model to null.",
        )
