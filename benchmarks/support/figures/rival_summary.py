"""The README's figures beside other engines: a row for each workload and precision that has been measured."""

import json
from statistics import median
from typing import Any

from benchmarks.support.report import RESULTS
from benchmarks.support.rivals.rival_results import NARROW, WIDE

_WORKLOADS = {
    "one": "one request, 128 tokens in, 128 out, 0.5B",
    "many": "32 at once, 128 in, 64 out, 0.5B",
    "shared": "32 that share 512 tokens, 32 out, 0.5B",
    "crowd": "128 at once, 64 in, 64 out, 33M",
}
_RIVALS = {"vllm": "vLLM", "openvino": "OpenVINO", "llamacpp": "llama.cpp", "transformers": "transformers"}


_PROCESSORS = {WIDE: "a processor with AVX-512", NARROW: "one without, which has AVX2"}


def render() -> str:
    """The tables, as Markdown."""
    lines = [
        "**Beside other engines** — `python -m benchmarks rivals`, in parts: each contestant in a process and an "
        "environment of its own, in turns in one run, random weights of real shapes. Output tokens per second of "
        "maitred's engine, and how many times as fast it is as others.",
        "",
    ]
    for name, processor in _PROCESSORS.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            lines += _table(json.loads(path.read_text()), processor)
    return "\n".join(lines)


def _table(result: dict[str, Any], processor: str) -> list[str]:
    figures = result["figures"]
    shown = [rival for rival in _RIVALS if rival in figures["how"]]
    versions = ", ".join(_version(figures["how"][rival]) for rival in shown)
    lines = [
        f"On {processor} ({result['machine']['cpu']}), over {versions}:",
        "",
        f"| workload | precision | maitred, tokens/s | {' | '.join(f'over {_RIVALS[rival]}' for rival in shown)} |",
        f"|---|---|--:|{'--:|' * len(shown)}",
    ]
    for workload, text in _WORKLOADS.items():
        for precision in ("fp32", "int8"):
            measured = figures["workloads"].get(f"{workload} {precision}", {"rivals": {}})["rivals"]
            if measured:
                ours = median(rate for rival in measured.values() for rate in rival["ours"])
                over = [_over(measured.get(rival)) for rival in shown]
                lines.append(f"| {text} | {precision} | {ours:,.1f} | {' | '.join(over)} |")
    return [*lines, ""]


def _version(how: dict[str, str]) -> str:
    """Name and release, with which what it says of itself begins."""
    return next(iter(how.values())).partition(",")[0].partition("-")[0]


def _over(measured: dict[str, Any] | None) -> str:
    return "–" if measured is None else f"{median(measured['ours_over']):.2f}×"
