"""Figures of autoscaling for the page of benchmarks."""

from benchmarks.support.report import load_result


def render() -> str:
    """All of it, as Markdown."""
    result = load_result("autoscaling")
    figures = result["figures"]
    objectives = f"{figures['ttft_s']:g} s, or its tokens are more than {1e3 * figures['itl_s']:g} ms apart on average"
    lines = [
        "**Autoscaling** — `python -m benchmarks autoscaling`: traces of real services and planted waves in simulated "
        "time, request by request, with the autoscaler of production. A request misses if its first token takes more "
        f"than {objectives}; a replica costs from its order to the end of its drain. *Hindsight* is the cheapest plan "
        "without misses that knows the future. *Others* is the best of many settings of Knative, Ray Serve, HPA and "
        "KEDA, chosen for this trace and lead time afterwards, at as many misses as ours.",
        "",
        "| trace | lead time, s | misses | replica-hours | starts | of hindsight | of others | others' fewest misses |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, leads in figures["traces"].items():
        for lead, cell in leads.items():
            if not lead.startswith("lead ") or "ours" not in cell:
                continue
            ours = cell["ours"]
            lines.append(
                f"| {name} | {lead.split()[1]} | {ours['missed_percent']:.2f}% | {ours['replica_hours']:,.1f} "
                f"| {ours['starts']:,} | {cell['of_hindsight']:.2f}× | {cell['of_others']:.2f}× "
                f"| {cell['others_fewest_missed_percent']:.2f}% |"
            )
    single = figures["single_setting"]
    end = (
        f"With one setting for all traces and lead times of up to 30 s, the best of others ({single['setting']}) pays "
        f"{single['of_hindsight']:.2f} times hindsight's replica-hours and misses up to "
        f"{single['most_missed_percent']:.1f}%; ours pays {single['ours_of_hindsight']:.2f} times and misses up to "
        f"{single['ours_most_missed_percent']:.1f}%."
    )
    if days := figures["constant"]:
        end += f" Changes in a day of constant load: {max(day['changes'] for day in days)}."
    return "\n".join([*lines, "", end, ""])
