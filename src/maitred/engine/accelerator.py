"""Startup of an accelerator: measures the memory of the largest step and captures CUDA graphs."""

import logging
import time

import torch

from maitred.core.request import SamplingParams
from maitred.engine.config import EngineConfig
from maitred.engine.device import ComputeDevice, kv_bytes_on_cpu, kv_bytes_on_gpu
from maitred.engine.graphs.decoder import GraphedDecoder, graph_sizes
from maitred.engine.graphs.graph import CudaGraph
from maitred.engine.models.batch import BatchChunk, ForwardBatch
from maitred.engine.models.decoder import Decoder
from maitred.engine.models.kv_cache import KVCache
from maitred.engine.models.token_major import make_cache
from maitred.engine.sampling.sampler import Sampler

logger = logging.getLogger("maitred.engine")


def free_bytes_beside(
    decoder: Decoder, sampler: Sampler, config: EngineConfig, kv_dtype: torch.dtype, target: ComputeDevice
) -> int:
    """Returns the bytes that are free for the KV cache, after it has run the largest step once.

    Args:
        decoder: The model.
        sampler: Sampler without sequences.
        config: The `engine` section, which limits the size of a step.
        kv_dtype: Type of the numbers in the future KV cache.
        target: Device of the future KV cache.
    """
    if not target.on_gpu:
        _largest_step(decoder, sampler, config, kv_dtype, target)
        return kv_bytes_on_cpu()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _largest_step(decoder, sampler, config, kv_dtype, target)
    peak = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    logger.info("The largest step takes %.2f GiB beside the weights and the KV cache", peak / (1 << 30))
    return kv_bytes_on_gpu(free=free, total=total, peak=peak, fraction=config.gpu.memory_fraction)


def make_graphed_decoder(
    decoder: Decoder, cache: KVCache, config: EngineConfig, context_tokens: int, target: ComputeDevice
) -> GraphedDecoder:
    """Returns the decoder with CUDA graphs of its decode steps, where settings and kernels allow them."""
    start_s = time.perf_counter()
    # torchao's int8 products wait for the host on every call, which no graph can record.
    records = target.on_gpu and decoder.graphable and config.quantization != "int8"
    sizes = graph_sizes(config.most_graph_sequences) if records else []
    pool = torch.cuda.graph_pool_handle() if sizes else None
    made = GraphedDecoder(
        decoder,
        cache,
        sizes=sizes,
        table_width=-(-context_tokens // cache.block_tokens),
        make_graph=lambda: CudaGraph(pool),
    )
    if sizes:
        logger.info("Recorded %d graphs of decode steps in %.1f s", len(sizes), time.perf_counter() - start_s)
    return made


def _largest_step(
    decoder: Decoder, sampler: Sampler, config: EngineConfig, kv_dtype: torch.dtype, target: ComputeDevice
) -> None:
    """Runs a prefill step of maximum size and samples from it in the way that takes the most memory.

    Its prompts overwrite each other in a temporary cache, so the results have no meaning.
    """
    tokens, device = config.step_tokens, decoder.device
    longest = min(tokens, decoder.config.context_tokens)
    blocks = -(-longest // config.block_tokens)
    cache = make_cache(*(decoder.config, blocks, config.block_tokens, kv_dtype, device), accelerated=target.accelerated)
    rows = torch.arange(tokens, device=device)
    sampled = min(config.max_sequences, tokens)
    logits = decoder.forward(
        ForwardBatch(
            token_ids=torch.zeros_like(rows),
            positions=rows % longest,
            slots=rows % longest,
            logit_rows=rows[:sampled],
            chunks=[
                BatchChunk(start, min(longest, tokens - start), 0, list(range(blocks)))
                for start in range(0, tokens, longest)
            ],
        ),
        cache,
    )
    params = SamplingParams(max_tokens=1, seed=0, temperature=1.0, top_p=0.9)
    keys = list(range(sampled))
    for key in keys:
        sampler.add(key, params, 0, prompt=[0])
    sampler.sample(logits, keys, [0] * sampled)
    for key in keys:
        sampler.remove(key)
