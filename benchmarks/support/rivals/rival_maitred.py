"""Our engine as a rival's worker: in process, as the others are."""

import gc

from maitred.engine.lean_torch import wait_briefly_at_barriers

wait_briefly_at_barriers()

from benchmarks.support.rivals.rival_worker import CONTEXT_TOKENS, STEP_TOKENS, THREADS, Asked, Loaded, serve  # noqa: E402 - torch comes after
from maitred.core.request import EngineRequest, SamplingParams  # noqa: E402
from maitred.engine.assembly import build  # noqa: E402
from maitred.engine.config import EngineConfig  # noqa: E402
from maitred.engine.models.source import find_model  # noqa: E402

SETTINGS: dict[str, dict[str, object]] = {
    "fp32": {},
    "int8": {"quantization": "int8", "kv_dtype": "int8"},
    "stored": {"quantization": "int8", "kv_dtype": "bf16"},
}
"""In int8, the cache too: so it is in the fastest of the others, OpenVINO. ``stored``: a GGUF file's own bits, with
rows in 8 bits and the cache in 16, as llama.cpp has them."""


def load(asked: Asked) -> Loaded:
    """Builds the engine as its process does, without the socket."""
    config = EngineConfig(
        device="cpu",
        dtype="fp32",
        threads=THREADS,
        context_tokens=CONTEXT_TOKENS,
        max_sequences=asked.sequences,
        step_tokens=STEP_TOKENS,
        kv_memory_bytes=1 << 30,
        **SETTINGS[asked.precision],  # type: ignore[arg-type]
    )
    engine, _ = build(find_model(asked.folder), config)
    gc.collect()
    gc.freeze()

    def answer(prompts: list[list[int]], output_tokens: int) -> list[int]:
        for number, prompt in enumerate(prompts):
            sampling = SamplingParams(max_tokens=output_tokens, seed=number, temperature=0.0, ignore_eos=True)
            engine.submit(None, EngineRequest(id=str(number), prompt=prompt, sampling=sampling))
        counts = [0] * len(prompts)
        while engine.busy:
            for outputs in engine.step().values():
                for output in outputs:
                    counts[int(output.request_id)] += len(output.delta.tokens)
        return counts

    return Loaded(answer, f"engine in process, {THREADS} threads")


if __name__ == "__main__":
    serve(load)
