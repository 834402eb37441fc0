"""OpenVINO GenAI as a rival's worker: its continuous batching in process, on a model that optimum-intel has exported.

fp32 is fp32 throughout, cached keys and values included. int8 is its usual form: weights per channel, activations
quantised on the way, and the cache in 8 bits.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rival_worker import THREADS, Asked, Loaded, serve

_CACHE_GB = 2
PROPERTIES: dict[str, dict[str, Any]] = {
    "fp32": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
    "int8": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "u8"},
}


def load(asked: Asked) -> Loaded:
    """Exports the model, once, and compiles it."""
    if not (asked.converted / "openvino_model.xml").exists():
        _export(asked.folder, asked.converted, asked.precision)
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = _CACHE_GB
    scheduler.max_num_seqs = asked.sequences
    scheduler.max_num_batched_tokens = 2048
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    properties = {"INFERENCE_NUM_THREADS": THREADS, **PROPERTIES[asked.precision]}
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(asked.converted), scheduler, "CPU", properties)

    def answer(prompts: list[list[int]], output_tokens: int) -> list[int]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = output_tokens
        config.ignore_eos = True
        config.do_sample = False
        asking = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        done = pipeline.generate(asking, [config] * len(prompts))
        return [len(one.m_generation_ids[0]) for one in done]

    version = openvino_genai.__version__
    return Loaded(answer, f"OpenVINO GenAI {version}, ContinuousBatchingPipeline in process, {THREADS} threads")


def _export(source: Path, target: Path, precision: str) -> None:
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig, OVWeightQuantizationConfig

    weights = OVWeightQuantizationConfig(bits=8, sym=False) if precision == "int8" else None
    config = OVConfig(quantization_config=weights) if weights else OVConfig(dtype="fp32")
    unfinished = target.with_name(f"{target.name}-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    main_export(str(source), output=unfinished, task="text-generation-with-past", ov_config=config, stateful=True)
    unfinished.rename(target)


if __name__ == "__main__":
    serve(load)
