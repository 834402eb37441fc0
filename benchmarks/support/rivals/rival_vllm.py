"""vLLM on the CPU as a rival's worker: `LLM.generate` in process, compiled, with its prefix cache.

Its int8 is W8A8: weights per output channel, activations per token as they come. The checkpoint is written here, in the
format of `compressed-tensors`; the vocabulary's projection stays as it is, as is usual there.
"""

import json
import os
import shutil
from pathlib import Path

from benchmarks.support.rivals.rival_worker import CONTEXT_TOKENS, STEP_TOKENS, THREADS, Asked, Loaded, serve

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{THREADS - 1}",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_AOT_COMPILE": "0",  # what it keeps of that, it cannot load again, and compiles for minutes at every start
}
_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def load(asked: Asked) -> Loaded:
    """Loads the model; its compiled form is kept in vLLM's own cache."""
    os.environ.update(SETTINGS)
    import vllm

    folder = asked.folder
    if asked.precision == "int8":
        folder = asked.converted
        if not (folder / "model.safetensors").exists():
            _quantise(asked.folder, folder)
    llm = vllm.LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=asked.sequences,
        max_num_batched_tokens=STEP_TOKENS,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )

    def answer(prompts: list[list[int]], output_tokens: int) -> list[int]:
        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=output_tokens, min_tokens=0, ignore_eos=True, detokenize=False
        )
        asking = [{"prompt_token_ids": prompt} for prompt in prompts]
        done = llm.generate(asking, sampling, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in done]

    return Loaded(answer, f"vLLM {vllm.__version__}, LLM.generate in process, compiled, {THREADS} threads bound")


def _quantise(source: Path, target: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    target.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if not any(f".{linear}.weight" in name for linear in _LINEARS):
            tensors[name] = weight
            continue
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        tensors[name] = (weight / scale).round().clamp(-128, 127).to(torch.int8)
        tensors[f"{name}_scale"] = scale
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": _SCHEME}, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, target)
    unfinished = target / "unfinished.safetensors"
    save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.rename(target / "model.safetensors")


if __name__ == "__main__":
    serve(load)
