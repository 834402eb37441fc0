"""The README's figures of choosing among replicas."""

import json
from typing import Any

from benchmarks.report import RESULTS


def render() -> str:
    """The paragraph, as Markdown."""
    result: dict[str, Any] = json.loads((RESULTS / "prefix_balance.json").read_text())
    figures = result["figures"]
    aware = figures["by_policy"]["predicted_ttft"]
    replicas = "; ".join(
        f"{count} replicas {each['hit_rate_over_oracle']:.0%}" for count, each in figures["by_replicas"].items()
    )
    lines = [
        f"**Four replicas, one cache** — `{result['command']}`: {figures['requests']:,} requests of the Mooncake "
        "conversations in simulated time, through the queue, the choice of a replica and the schedulers that run in "
        f"production. One cache with all blocks finds {aware['oracle_hit_rate']:.1%} of all prompt tokens. *Own only* "
        "goes where a request's own first token comes soonest. Times in seconds.",
        "",
        "| policy | found | of one cache | max/mean load | time to first token, mean / p99 | mean over the first "
        "| requests per busy second |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for policy, each in figures["by_policy"].items():
        times, over = each["ttft_s"], figures["over_predicted_ttft"][policy]
        lines.append(
            f"| {policy} | {each['hit_rate']:.1%} | {each['hit_rate_over_oracle']:.0%} "
            f"| {each['max_over_mean_load']:.2f} | {times['mean']:.2f} / {times['p99']:.1f} "
            f"| {over['ttft_mean']:.2f}× | {each['requests_per_busy_s']:.2f} |"
        )
    part = f"Of the first {figures['part']:,} requests, at the same rate for each replica: {replicas} of one cache."
    return "\n".join([*lines, "", part, "", "![The same over load](benchmarks/results/prefix_balance.svg)", ""])
