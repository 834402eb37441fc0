"""Transformers' continuous batching as a rival's worker: `generate_batch` in process, in fp32."""

from benchmarks.support.rivals.rival_worker import STEP_TOKENS, THREADS, Asked, Loaded, serve

_PAGE_TOKENS = 32


def load(asked: Asked) -> Loaded:
    """Loads the model with the paged form of torch's fused attention."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(
        asked.folder, dtype=torch.float32, attn_implementation="paged|sdpa"
    ).eval()

    def answer(prompts: list[list[int]], output_tokens: int) -> list[int]:
        needed_tokens = sum(len(prompt) + output_tokens + _PAGE_TOKENS for prompt in prompts)
        batching = ContinuousBatchingConfig(
            page_size=_PAGE_TOKENS,
            num_blocks=-(-needed_tokens // _PAGE_TOKENS),
            max_batch_tokens=STEP_TOKENS,
            max_requests_per_batch=asked.sequences,
        )
        greedy = GenerationConfig(max_new_tokens=output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        done = model.generate_batch(prompts, greedy, continuous_batching_config=batching)
        return [len(output.generated_tokens) for output in done.values()]

    version = transformers.__version__
    return Loaded(answer, f"Transformers {version}, generate_batch in process, {THREADS} threads")


if __name__ == "__main__":
    serve(load)
