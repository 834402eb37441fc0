"""The README's figures of choosing: among replicas, versions and models."""

from benchmarks.support.report import load_result


def render() -> str:
    """All of it, as Markdown."""
    return "\n".join([_replicas(), _canaries(), _hedging(), _swapping()])


def _replicas() -> str:
    result = load_result("prefix_balance")
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


def _canaries() -> str:
    simulated, live = load_result("canary"), load_result("canary_live")
    figures, seen = simulated["figures"], live["figures"]
    sound, decisions = figures["sound"], figures["sound"]["decisions"]
    planted = ", ".join(name for name in figures if name != "sound")
    after = ", ".join(f"{name} after {seen[name]['canary_requests']}" for name in ("slow", "failing", "wrong"))
    return (
        f"**New versions** — `{simulated['command']}`: canaries with a fault ({planted}) are aborted in all trials; "
        f"of {sound['trials']} that are no different {decisions.get('abort', 0)} are, and {decisions['promote']} are "
        f"promoted. `{live['command']}`, a real gateway: the planted ones are aborted ({after} requests), the sound "
        f"one is promoted after {seen['sound']['canary_requests']}.\n"
    )


def _hedging() -> str:
    result = load_result("hedging")
    figures = result["figures"]
    off, on = (figures["sides"][side]["ttft_s"] for side in ("off", "on"))
    return (
        f"**A second replica for who is late** — `{result['command']}`: two servers of which each is silent for "
        f"{figures['pause_s']:g} s before one answer in thirty. Time to first token p99 {off['p99'] * 1e3:.0f} → "
        f"{on['p99'] * 1e3:.0f} ms, p50 {off['p50'] * 1e3:.0f} → {on['p50'] * 1e3:.0f} ms, for "
        f"{figures['sides']['on']['extra_calls_share']:.1%} more calls.\n"
    )


def _swapping() -> str:
    result = load_result("model_swapping")
    figures = result["figures"]
    parts = [
        f"{name} traffic: {figures[name]['loads']:.0f} loads where order of arrival would take "
        f"{figures[name]['loads_in_order_of_arrival']}, at most {figures[name]['most_mib']:.0f} MiB"
        for name in ("alternating", "skewed")
    ]
    errors = {bar["name"]: bar["measured"] for bar in result["bars"] if bar["name"].startswith("waits")}
    median, most = errors.values()
    return (
        f"**Three models, room for two** — `{result['command']}`: {'; '.join(parts)}. Every answer is that of the "
        f"undisturbed run; predicted waits for a load are within {median:.0%} (p50) and {most:.0%} (p90).\n"
    )
