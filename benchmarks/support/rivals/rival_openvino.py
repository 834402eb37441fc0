"""OpenVINO GenAI as a rival's worker: its continuous batching in process, on a model that optimum-intel has exported.

fp32 is fp32 throughout, cached keys and values included. int8 is its usual form: weights per channel (NNCF), the cache
in 8 bits, and activations rounded on the way in groups of 128. The default is 32, which is slower by a tenth or so;
asymmetric weights are as fast as symmetric ones.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.rivals.rival_worker import STEP_TOKENS, THREADS, Asked, Loaded, serve

_CACHE_GB = 2
_MODEL = "openvino_model.xml"
PROPERTIES: dict[str, dict[str, Any]] = {
    "fp32": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
    "int8": {
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "u8",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 128,
    },
}


def load(asked: Asked) -> Loaded:
    """Exports the model, once, and compiles it."""
    exported = asked.converted.with_name(f"{asked.folder.name}-fp32")
    if not (exported / _MODEL).exists():
        _export(asked.folder, exported)
    if asked.precision == "int8" and not (asked.converted / _MODEL).exists():
        _round(exported, asked.converted)
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = _CACHE_GB
    scheduler.max_num_seqs = asked.sequences
    scheduler.max_num_batched_tokens = STEP_TOKENS
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
        return [len(output.m_generation_ids[0]) for output in done]

    version = openvino_genai.__version__
    return Loaded(answer, f"OpenVINO GenAI {version}, ContinuousBatchingPipeline in process, {THREADS} threads")


def _export(source: Path, target: Path) -> None:
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    unfinished = _beside(target)
    main_export(
        str(source),
        output=unfinished,
        task="text-generation-with-past",
        ov_config=OVConfig(dtype="fp32"),
        stateful=True,
    )
    unfinished.rename(target)


def _round(source: Path, target: Path) -> None:
    """Rounds the weights of an exported model; the exporter ignores its options for rounding."""
    import nncf
    import openvino

    unfinished = _beside(target)
    shutil.copytree(source, unfinished, ignore=shutil.ignore_patterns("openvino_model.*"))
    model = openvino.Core().read_model(source / _MODEL)
    model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
    openvino.save_model(model, unfinished / _MODEL, compress_to_fp16=False)
    unfinished.rename(target)


def _beside(target: Path) -> Path:
    """Where a folder is made that is not there until it is whole."""
    unfinished = target.with_name(f"{target.name}-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    return unfinished


if __name__ == "__main__":
    serve(load)
