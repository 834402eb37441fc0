"""llama.cpp as a rival's worker: its own server, in this process, asked through HTTP with token ids.

Its library has no batching of its own; that is the server's. fp32 is its F32, int8 its Q8_0; a GGUF
file is taken as it is.
"""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gguf
import xllamacpp

from benchmarks.support.rivals.external_llamacpp import convert
from benchmarks.support.rivals.rival_worker import CONTEXT_TOKENS, STEP_TOKENS, THREADS, Asked, Loaded, serve

KINDS = {"fp32": gguf.GGMLQuantizationType.F32, "int8": gguf.GGMLQuantizationType.Q8_0}


def load(asked: Asked) -> Loaded:
    """Writes the model as GGUF, once, and starts the server on it."""
    path = asked.converted.with_name(f"{asked.converted.name}.gguf")
    if asked.folder.suffix == ".gguf":
        path = asked.folder
    elif not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        convert(asked.folder, unfinished, KINDS[asked.precision])
        unfinished.rename(path)
    params: Any = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_parallel = asked.sequences
    params.n_ctx = asked.sequences * CONTEXT_TOKENS
    params.n_batch = STEP_TOKENS
    params.kv_unified = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    params.n_threads_http = asked.sequences + 2
    params.fit_params = False
    params.warmup = False
    server: Any = xllamacpp.Server(params)
    callers = ThreadPoolExecutor(asked.sequences)

    def ask(prompt: list[int], output_tokens: int) -> int:
        body = {
            "prompt": prompt,
            "n_predict": output_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "cache_prompt": True,
            "return_tokens": True,
        }
        request = urllib.request.Request(
            f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            return int(json.load(response)["tokens_predicted"])

    def answer(prompts: list[list[int]], output_tokens: int) -> list[int]:
        return list(callers.map(ask, prompts, [output_tokens] * len(prompts)))

    version = xllamacpp.__version__
    return Loaded(answer, f"llama.cpp (xllamacpp {version}), its server over HTTP without streaming, {THREADS} threads")


if __name__ == "__main__":
    serve(load)
