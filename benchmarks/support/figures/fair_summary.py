"""The README's figures of fair dispatch and overload: a paragraph for each benchmark that has been run."""

import json
from typing import Any

from benchmarks.support.report import RESULTS


def render() -> list[str]:
    """The paragraphs, as Markdown."""
    parts = {
        "flood": _flood,
        "overload": _overload,
        "long_short": _long_short,
        "starvation": _starvation,
        "cancellation": _cancellation,
        "stalled": _stalled,
    }
    paths = {name: RESULTS / f"{name}.json" for name in parts}
    return [parts[name](json.loads(path.read_text())) for name, path in paths.items() if path.exists()]


def _flood(result: dict[str, Any]) -> str:
    lines = [
        f"**A flood** — `{result['command']}`: ten tenants with equal shares; nine send 40 % of theirs, the tenth what "
        "fills the server to 90 % (*polite*), or 20 times its share (*flood*). What the nine wait for the first token, "
        "p50 / p95 / p99 in milliseconds, and output tokens per second of all.",
        "",
        "| model | situation | requests of the nine | time to first token | p99 over polite | output tokens/s |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for model, figures in result["figures"].items():
        polite = figures["situations"]["polite"]["light_ttft_s"]["p99"]
        for situation, values in figures["situations"].items():
            times = values["light_ttft_s"]
            lines.append(
                f"| {model} | {situation} | {values['light_requests']} | {_times(times)} "
                f"| {times['p99'] / polite:.2f}× | {values['tokens_per_s']:,.0f} |"
            )
    weighted = result["figures"].get("bundled", {}).get("weighted")
    if weighted:
        lines += [
            "",
            "Four tenants with weights 1 to 4 and requests waiting all the time: Jain's index of service over weight "
            f"{weighted['fair']['jain']:.3f}, under FIFO {weighted['fifo']['jain']:.3f}.",
        ]
    return "\n".join([*lines, "", "![The same as curves](benchmarks/results/flood.svg)", ""])


def _overload(result: dict[str, Any]) -> str:
    figures = result["figures"]
    peak = max(values["goodput_per_s"] for values in figures["maitred"].values())
    lines = [
        f"**Overload** — `{result['command']}`: callers at random moments who want their first token within "
        f"{figures['objective_s']:g} s and do not come back; capacity is {figures['capacity_per_s']:.1f} requests per "
        f"second ({result['machine']['cpu']}). Good answers are whole and began in time. *FIFO* turns nobody away.",
        "",
        "| load | good answers/s | of the peak | time to first token | wasted tokens | FIFO: good answers/s |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for load, values in figures["maitred"].items():
        naive = figures["naive"].get(load)
        lines.append(
            f"| {load}× | {values['goodput_per_s']:.1f} | {values['goodput_per_s'] / peak:.0%} "
            f"| {_times(values['ttft_s'])} | {values['wasted_share']:.1%} "
            f"| {format(naive['goodput_per_s'], '.1f') if naive else '–'} |"
        )
    refusal, error = figures["refusal_s"].get("p99"), figures["prediction"].get("error_p90")
    words = []
    if refusal is not None:
        words.append(f"Who is refused knows after {refusal * 1e3:.0f} ms (p99).")
    if error is not None:
        words.append(f"The predicted time to first token is within {error:.0%} of what came for nine of ten.")
    return "\n".join([*lines, "", *words, "", "![The same as a plot](benchmarks/results/overload.svg)", ""])


def _long_short(result: dict[str, Any]) -> str:
    figures = result["figures"]
    lines = [
        f"**Long and short answers** — `{result['command']}`: nine of ten requests want 50 tokens, one of ten, of "
        "another tenant, 2,000; together 1.2 times what there is. *Pace* is the time between two tokens of a long "
        "answer over that of one alone.",
        "",
        "| situation | short: time to first token | short: end to end | long: first token, p50 | long: pace |",
        "|---|--:|--:|--:|--:|",
    ]
    for situation, values in figures["situations"].items():
        first, pace = values["long_ttft_s"].get("p50"), values["long_pace_over_alone"]
        lines.append(
            f"| {situation} | {_times(values['short_ttft_s'])} | {_times(values['short_e2e_s'])} "
            f"| {'–' if first is None else f'{first * 1e3:,.0f}'} | {'–' if pace is None else f'{pace:.1f}×'} |"
        )
    return "\n".join([*lines, ""])


def _starvation(result: dict[str, Any]) -> str:
    figures = result["figures"]
    cases = "; ".join(
        f"{name}: slowest {values['background_s']['most']:.1f} s, bound {values['bound_s']:.1f} s"
        for name, values in figures.items()
        if isinstance(values, dict)
    )
    return (
        f"**Nobody starves** — `{result['command']}`: {figures['interactive_users']} interactive users keep "
        f"{figures['slots']} places busy; background requests, which age a class every {figures['ageing_s']:g} s, come "
        f"to their end all the same. {cases}.\n"
    )


def _cancellation(result: dict[str, Any]) -> str:
    figures = result["figures"]
    steps = figures["freed_after_steps"]
    left = sum(figures["at the end"].values()) + sum(figures["after the crowd"].values())
    return (
        f"**Cancellation** — `{result['command']}`: {figures['left_before_the_end']} callers of chats and completions, "
        f"streamed and whole, with one answer and with three, hung up, {figures['left_before_any_text']} of them "
        f"before any text; {left:g} blocks, sequences, places, credits, leases and requests were left. Whole steps "
        f"until a place was free: p95 {steps['p95']:g}, most {steps['most']:g}; "
        f"{figures['freed_after_s']['p95'] * 1e3:.0f} ms (p95) after the hang-up.\n"
    )


def _stalled(result: dict[str, Any]) -> str:
    figures = result["figures"]
    growth = figures["memory_growth_mib"]
    return (
        f"**Stalled readers** — `{result['command']}`: {figures['stalled']} readers of streams stop reading. The "
        f"gateway grows by {growth['gateway']:.0f} MiB, the engine by {growth['engine']:.0f} MiB (its KV blocks among "
        f"them); the time between two tokens of {figures['patient']} others is {figures['itl_p99_ratio']:.2f} times "
        "what it was (p99).\n"
    )


def _times(seconds: dict[str, float]) -> str:
    """p50 / p95 / p99 in milliseconds."""
    ranks = ("p50", "p95", "p99")
    return " / ".join(f"{seconds[rank] * 1e3:,.0f}" for rank in ranks) if seconds else "–"
