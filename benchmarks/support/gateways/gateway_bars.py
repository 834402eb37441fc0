"""What was promised of maitred beside other gateways, held against everything that a result file has."""

from typing import Any

from benchmarks.support.report import Report

OURS = "maitred"
WORKERS = "workers"
REQUESTS_OVER = {"litellm": 20.0, "portkey": 4.0}
STREAMS_OVER = {"litellm": 40.0}


def hold(report: Report) -> None:
    """Adds the bars of all parts that have been measured."""
    parts = {name: part["gateways"] for name, part in report.figures["parts"].items()}
    ours = {name: gateways[OURS] for name, gateways in parts.items() if OURS in gateways}
    for part in ("whole", "streams"):
        several = parts.get(part, {}).get(WORKERS)
        if several and part in ours and ours[part]["per_s"]:
            ratio = round(several["per_s"] / ours[part]["per_s"], 2)
            report.figures.setdefault("workers_over_one_process", {})[part] = ratio
            print(f"{part}: two workers over one process {ratio}")
    if "whole" in ours:
        report.require("CPU per request, µs", ours["whole"]["cpu_us"], at_most=600)
        report.require("requests/s on one core", ours["whole"]["per_s"], at_least=1_600)
        _over(report, "requests/s", parts["whole"], REQUESTS_OVER)
    if "streams" in ours:
        report.require("streams of 64 tokens/s", ours["streams"]["per_s"], at_least=700)
        report.require("tokens lost", ours["streams"]["lost_tokens"], at_most=0)
        _over(report, "streams/s", parts["streams"], STREAMS_OVER)
    if "latency" in ours:
        report.require("added p50, ms", ours["latency"]["c1_added_p50_ms"], at_most=1)
        report.require("added p99, ms", ours["latency"]["c1_added_p99_ms"], at_most=3)
    if "paced" in ours and not report.quick:
        most = max(parts["paced"][name]["held"] for name in (OURS, WORKERS) if name in parts["paced"])
        report.require("paced streams held", most, at_least=3_000)
    if "idle" in ours:
        report.require("idle, MiB", ours["idle"]["memory_mib"], at_most=120)
    for part, figures in ours.items():
        if "failures" in figures:
            report.require(f"{part}: failures", figures["failures"], at_most=0)
    if "flood" in ours:
        report.require("unknown keys let in", ours["flood"]["let_in"], at_most=0)


def _over(report: Report, what: str, gateways: dict[str, Any], bounds: dict[str, float]) -> None:
    for name, bound in bounds.items():
        if gateways.get(name, {}).get("per_s"):
            ratio = gateways[OURS]["per_s"] / gateways[name]["per_s"]
            report.require(f"{what} over {name}", ratio, at_least=bound)
