"""The README's figures beside other gateways: a row for each that has been measured."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.support.report import RESULTS

_NAMES = {
    "workers": "maitred --workers 2, on both cores",
    "litellm": "LiteLLM",
    "portkey": "Portkey",
    "nginx": "nginx",
    "bare": "uvicorn and aiohttp alone",
}
_COLUMNS: Mapping[str, tuple[str, Callable[[Mapping[str, float]], str]]] = {
    "requests/s": ("whole", lambda one: f"{one['per_s']:,.0f}"),
    "CPU per request": ("whole", lambda one: f"{one['cpu_us'] / 1e3:.2f} ms"),
    "streams of 64/s": ("streams", lambda one: f"{one['per_s']:,.0f}"),
    "added, one caller": ("latency", lambda one: f"{one['c1_added_p50_ms']:.2f} / {one['c1_added_p99_ms']:.2f} ms"),
    "paced streams held": ("paced", lambda one: f"{one['held']:,.0f}"),
    "unknown keys/s": ("flood", lambda one: f"{one['rejects_per_s']:,.0f}"),
    "idle": ("idle", lambda one: f"{one['memory_mib']:.0f} MiB"),
}


def render() -> list[str]:
    """The table and the plot, as Markdown; nothing before all of them were measured once."""
    path = RESULTS / "gateways.json"
    if not path.exists():
        return []
    result = json.loads(path.read_text())
    figures = result["figures"]
    lines = [
        "**Beside other gateways** — `python -m benchmarks gateways`: each alone on one core (that with "
        "workers shares both with client and upstream), before one upstream that answers at once, in turns in one run "
        f"on two cores ({result['machine']['cpu']}); maitred with key, limits, budgets, prices and ledger on, the "
        "others with a key at most. Added time is p50 / p99 over asking the upstream directly; a paced stream brings "
        "20 tokens a second, and is held when none is lost and their p99 is at most 20 ms later than directly.",
        "",
        f"| gateway | {' | '.join(_COLUMNS)} |",
        f"|---|{'--:|' * len(_COLUMNS)}",
    ]
    for name in ("maitred", *_NAMES):
        if name in figures["how"]:
            cells = (_cell(figures["parts"], part, name, shown) for part, shown in _COLUMNS.values())
            lines.append(f"| {_label(name, figures['how'][name])} | {' | '.join(cells)} |")
    return [*lines, "", "![Gateways side by side](benchmarks/results/gateways.svg)", ""]


def _label(name: str, how: str) -> str:
    """With the release, which what it says of itself begins with."""
    if name not in _NAMES:
        return name
    release = next((word for word in how.partition(",")[0].split() if word[0].isdigit()), "")
    return f"{_NAMES[name]} {release}".strip()


def _cell(parts: Mapping[str, Any], part: str, name: str, shown: Callable[[Mapping[str, float]], str]) -> str:
    one = parts.get(part, {"gateways": {}})["gateways"].get(name)
    return shown(one) if one else "–"
