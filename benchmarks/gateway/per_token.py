"""What the API process spends on one streamed token: detokenising, watching for stop strings, writing the event.

Single-threaded, in memory. At a thousand streams of fifty tokens a second, 10 µs a token are half a core. The library's
own incremental decoder runs beside ours on the same tokens, in turns, so the ratio holds on a busy machine.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import tokenizers
from tokenizers.decoders import DecodeStream

import maitred
from benchmarks.support.report import Report
from maitred.text.stop import StopWindow
from maitred.text.tokenizer import Detokenizer, Tokenizer
from maitred.wire.openai.decode import decode_chat
from maitred.wire.openai.responses import ChatChunk, ChatChunkChoice, ChatDelta, encode
from maitred.wire.sse import encode_event

SEED = 20260105
MODEL = Path(maitred.__file__).parent / "bundled" / "maitred-tiny"
TEXT = "The garden was quiet, and nobody had seen the fox since Tuesday — naïve, perhaps, but 世界 is wide 👋🏽. "
STOPS = ["\n\nUser:", "###", "<|im_end|>", "garden party"]
BODY = (
    b'{"model":"maitred-tiny","messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"'
    + b"Tell me of the fox. " * 50
    + b'"}],"temperature":0.7,"max_tokens":128,"stream":true,"stream_options":{"include_usage":true}}'
)


def main() -> int:
    """Runs the benchmark; the exit code says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds")
    arguments = parser.parse_args()
    rounds = 5 if arguments.quick else 50
    report = Report("per_token", seed=SEED, quick=arguments.quick)

    tokenizer = Tokenizer.load(MODEL)
    backend = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    text_tokens = tokenizer.encode(TEXT * 40, add_special_tokens=False)
    draw = random.Random(SEED)
    random_tokens = [draw.randrange(tokenizer.vocab_size) for _ in range(2000)]
    pieces = [tokenizer.token_text(token) for token in text_tokens]

    def ours(tokens: list[int]) -> Callable[[], None]:
        def run() -> None:
            push = Detokenizer(tokenizer).push
            for token in tokens:
                push([token])

        return run

    def library(tokens: list[int]) -> Callable[[], None]:
        def run() -> None:
            step = DecodeStream(skip_special_tokens=True).step
            for token in tokens:
                step(backend, token)

        return run

    def stop_window() -> None:
        push = StopWindow(STOPS).push
        for piece in pieces:
            push(piece)

    def chunks() -> None:
        for piece in pieces:
            choice = ChatChunkChoice(index=0, delta=ChatDelta(content=piece))
            encode_event(encode(ChatChunk(id="chatcmpl-1", created=1, model="tiny", choices=[choice], usage=None)))

    def bodies() -> None:
        for _ in range(200):
            decode_chat(BODY, strict=False)

    least_us = _least_us(
        {
            "detokenizer, text": (ours(text_tokens), len(text_tokens)),
            "library's decoder, text": (library(text_tokens), len(text_tokens)),
            "detokenizer, random tokens": (ours(random_tokens), len(random_tokens)),
            "library's decoder, random tokens": (library(random_tokens), len(random_tokens)),
            "stop window, 4 strings": (stop_window, len(pieces)),
            "chat chunk to SSE": (chunks, len(pieces)),
            "chat request of 1.2 kB": (bodies, 200),
        },
        rounds,
    )
    for name, value_us in least_us.items():
        print(f"{name:34} {value_us:7.2f} µs")
    report.figures = {"least_us": {name: round(value_us, 3) for name, value_us in least_us.items()}}
    report.require("detokenizer push µs", least_us["detokenizer, text"], at_most=10)
    report.require("chunk to SSE µs", least_us["chat chunk to SSE"], at_most=5)
    return report.finish()


def _least_us(subjects: dict[str, tuple[Callable[[], None], int]], rounds: int) -> dict[str, float]:
    """Least time per item over rounds in which all subjects take turns: what others do on the machine only adds."""
    least = dict.fromkeys(subjects, float("inf"))
    for _ in range(rounds):
        for name, (run, items) in subjects.items():
            started_s = time.perf_counter()
            run()
            least[name] = min(least[name], (time.perf_counter() - started_s) / items * 1e6)
    return least


if __name__ == "__main__":
    sys.exit(main())
