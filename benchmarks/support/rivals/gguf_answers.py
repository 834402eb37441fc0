"""llama.cpp's sampled answers with its likeliest tokens at each place: runs in the environment of llama.cpp.

    python -m benchmarks.support.rivals.gguf_answers FILE ANSWERS TOKENS TARGET [exact]

``exact``: keys and values in fp32, and attention without the kernel that rounds them; for a file in F32 nothing is
rounded then. Writes ``[{"prompt": [1, …], "places": [{"token": 5, "likeliest": [[5, -0.1], …]}, …]}, …]``.
"""

import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xllamacpp

THREADS, PLACES, CONTEXT_TOKENS, LIKELIEST = 2, 16, 8192, 10
QUESTIONS = (
    "What is the capital of France?",
    "Write a short story about a fox.",
    "Explain how rain forms.",
    "List five animals that live in the sea.",
    "What is 12 plus 30?",
    "Tell me about the Roman empire.",
    "Write a poem about winter.",
    "How do I bake bread?",
    "Who was Isaac Newton?",
    "Give me advice for a job interview.",
    "Describe a sunset.",
    "What is a prime number?",
    "Write Python code that sorts a list.",
    "Why is the sky blue?",
    "Summarise the plot of Hamlet.",
    "What do bees do?",
)


def server(file: Path, *, exact: bool) -> Any:  # noqa: ANN401 - the library has no types
    """Starts its server in this process."""
    params: Any = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.n_ctx, params.n_parallel, params.n_threads_http = CONTEXT_TOKENS, PLACES, PLACES + 2
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    params.cpuparams.poll = params.cpuparams_batch.poll = 0  # nothing is timed here, and others may need the cores
    params.fit_params = params.warmup = False
    if exact:
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(params)


def answers(url: str, count: int, tokens: int) -> list[dict[str, Any]]:
    """Samples answers to the questions; each has its own seed."""

    def ask(path: str, body: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON
        request = urllib.request.Request(
            f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    def answer(number: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}]
        text = ask("/apply-template", {"messages": messages})["prompt"]
        prompt = ask("/tokenize", {"content": text, "add_special": False, "parse_special": True})["tokens"]
        sampling = {"n_predict": tokens, "temperature": 0.8, "seed": number, "ignore_eos": True, "cache_prompt": False}
        found = ask("/completion", {"prompt": prompt, "n_probs": LIKELIEST, **sampling})["completion_probabilities"]
        return {
            "prompt": prompt,
            "places": [
                {"token": place["id"], "likeliest": [[one["id"], one["logprob"]] for one in place["top_logprobs"]]}
                for place in found
            ],
        }

    with ThreadPoolExecutor(PLACES) as callers:
        return list(callers.map(answer, range(count)))


if __name__ == "__main__":
    running = server(Path(sys.argv[1]), exact="exact" in sys.argv[5:])
    written = answers(running.listening_address, int(sys.argv[2]), int(sys.argv[3]))
    Path(sys.argv[4]).write_text(json.dumps(written))
