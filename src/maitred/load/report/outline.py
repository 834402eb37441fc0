"""Outline of the report of a run: its content and order, and its figures."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from maitred.load.measure.record import UserOutcome
from maitred.load.measure.result import LoadResult
from maitred.load.measure.summary import Quantiles
from maitred.load.report import canvas, over_time, spread
from maitred.load.report.document import (
    Block,
    CodeBlock,
    Document,
    KeyFigure,
    KeyFigures,
    Paragraph,
    Plot,
    Section,
    Table,
)
from maitred.load.report.judgement import has_objectives, notes, verdict
from maitred.load.report.quantity import NONE, count, duration, exact, rate, share, significant, size
from maitred.load.spec import LoadSpec

EXAMPLES = 3
"""Largest number of different errors that are quoted for one outcome."""

DEFINITIONS = Table(
    ["Term", "What it means here"],
    [
        ["TTFT", "Time to first token: from when the request was due to its first piece of text."],
        ["ITL", "Inter-token latency: the time between one piece of text and the next, of all requests."],
        ["TPOT", "Time per output token after the first: (last − first piece) / (tokens − 1), of each request."],
        ["End to end", "From when the request was due to its last piece of text; complete answers only."],
        ["Due", "Latencies start when the workload wanted the request, not when the tester managed to send it."],
        ["Attainment", "Share of the requests that are complete and meet all objectives; cancelled ones left out."],
        ["Goodput", "Requests per second that are complete and meet all objectives."],
        ["p95", "95 % of the values are at most this; between two values, by linear interpolation."],
    ],
    words=2,
)

PLOTS: dict[str, Callable[[LoadResult, str], str]] = {
    plot.__name__.replace("_", "-"): plot
    for plot in (
        over_time.ttft_over_time,
        over_time.itl_over_time,
        spread.distributions,
        spread.ttft_by_prompt,
        over_time.throughput,
        over_time.arrivals,
        over_time.goodput,
        spread.tenants,
        spread.outcomes,
        over_time.tester,
    )
}
"""Figures by the name that a `Plot` of the outline has."""


def outline(result: LoadResult) -> Document:
    """Builds the whole report of a run."""
    target = result.target
    server = f" ({target.server})" if target.server else ""
    sections = [
        Section("Key figures", [_key_figures(result)]),
        Section("Latency", list(_latency(result))),
        Section("Throughput", list(_throughput(result))),
        Section("Objectives", list(_objectives(result))),
        Section("Tenants", list(_tenants(result))),
        Section("Outcomes", list(_outcomes(result))),
        Section("The tester itself", list(_tester(result))),
        Section("Settings", list(_settings(result))),
        Section("Terms", [DEFINITIONS]),
    ]
    return Document(
        title=f"Load test of {target.model or target.url}",
        subtitle=f"{result.workload} · {target.url}{server} · {result.started} · {duration(result.seconds)}",
        verdict=verdict(result),
        notes=notes(result),
        sections=[section for section in sections if section.blocks],
    )


def draw(result: LoadResult) -> dict[str, str]:
    """Draws every figure that the run has data for: name -> SVG.

    Raises:
        Unavailable: matplotlib is not installed.
    """
    with canvas.style():
        drawn = {name: plot(result, name) for name, plot in PLOTS.items()}
    return {name: text for name, text in drawn.items() if text}


def _key_figures(result: LoadResult) -> KeyFigures:
    summary = result.summary
    complete = summary.outcomes.get(UserOutcome.COMPLETE, 0)
    figures = [
        KeyFigure(f"{name} p50", duration(times.p50), f"{high} {duration(getattr(times, high))}")
        for name, times, high in (
            ("TTFT", summary.ttft, "p95"),
            ("ITL", summary.itl, "p99"),
            ("End to end", summary.e2e, "p95"),
        )
        if times.count
    ]
    figures += [
        KeyFigure("Output tokens", rate(summary.output_tokens_per_s), f"{count(summary.output_tokens)} in all"),
        KeyFigure("Complete requests", rate(summary.requests_per_s), f"{count(complete)} of {count(summary.requests)}"),
    ]
    if has_objectives(result):
        figures.append(KeyFigure("Attainment", share(summary.attainment), f"goodput {rate(summary.goodput_per_s)}"))
    return KeyFigures(figures)


def _latency(result: LoadResult) -> Iterator[Block]:
    summary = result.summary
    named = {
        "Time to first token (TTFT)": summary.ttft,
        "Time between tokens (ITL)": summary.itl,
        "Time per output token (TPOT)": summary.tpot,
        "End to end": summary.e2e,
    }
    rows = [_quantiles(name, times) for name, times in named.items() if times.count]
    if not rows:
        yield Paragraph("No answer came, so there are no times.")
        return
    yield Table(["", "Count", "Mean", "p50", "p90", "p95", "p99", "Max"], rows)
    yield Plot(
        "ttft-over-time",
        "Each dot is a request, at the time when it was due. A slope is a queue that grows; the shaded parts do not "
        "count in the figures.",
    )
    yield Plot(
        "itl-over-time",
        "Of the pieces of text that arrived at that time. A p99 far above the median means that running answers wait, "
        "as for other requests' prompts.",
    )
    yield Plot("distributions", "The share of the values (up) that are at most so large (right).")
    yield Plot("ttft-by-prompt", "Each dot is a request. What was read from the prefix cache need not be computed.")


def _throughput(result: LoadResult) -> Iterator[Block]:
    summary = result.summary
    cached = summary.cached_tokens / summary.prompt_tokens if summary.prompt_tokens else 0.0
    rows = [
        ["Requests", count(summary.requests), rate(summary.requests_per_s)],
        ["Output tokens", count(summary.output_tokens), rate(summary.output_tokens_per_s)],
        ["Prompt tokens", count(summary.prompt_tokens), rate(summary.prompt_tokens_per_s)],
        ["… of them from the prefix cache", count(summary.cached_tokens), share(cached)],
    ]
    yield Table(["", "In all", "Rate"], rows)
    yield Paragraph(
        f"Rates are of what happened from {duration(result.window.from_s)} to {duration(result.window.until_s)} of the "
        "run: after the warm-up, and while requests still came."
    )
    yield Plot("throughput", "Where more open requests bring no more tokens, the server is at its limit.")
    yield Plot("arrivals", "Where fewer requests end than were due, a queue grows.")


def _objectives(result: LoadResult) -> Iterator[Block]:
    if not has_objectives(result):
        return
    objectives, summary = result.objectives, result.summary
    judged = result.counted_flags() & ~result.times.cancelled
    rows = []
    for field, name in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("e2e_s", "End to end")):
        bound_s = getattr(objectives, field)
        if bound_s is None:
            continue
        alone = result.times.met_flags(msgspec.structs.replace(NO_OBJECTIVES, **{field: bound_s}))[judged]
        rows.append([name, f"≤ {exact(duration(bound_s))}", share(float(alone.mean())) if len(alone) else NONE])
    rows.append(["All of them: attainment", f"≥ {exact(share(objectives.attainment))}", share(summary.attainment)])
    yield Table(["Objective", "Bound", "Met by"], rows)
    yield Paragraph(
        f"Goodput is {rate(summary.goodput_per_s, 'requests')}. A request that did not get a whole answer meets none "
        "of the objectives; one that its user cancelled is not judged."
    )
    yield Plot("goodput", "Green is what users got in time; what lies between it and the line of due requests is lost.")


def _tenants(result: LoadResult) -> Iterator[Block]:
    if len(result.tenants) < 2:
        return
    total = sum(summary.output_tokens for summary in result.tenants.values())
    rows = [
        [
            name,
            count(summary.requests),
            share(summary.outcomes.get(UserOutcome.COMPLETE, 0) / summary.requests) if summary.requests else NONE,
            duration(summary.ttft.p50),
            duration(summary.ttft.p95),
            duration(summary.itl.p99),
            rate(summary.output_tokens_per_s),
            share(summary.output_tokens / total) if total else NONE,
            share(summary.attainment) if has_objectives(result) else NONE,
        ]
        for name, summary in result.tenants.items()
    ]
    head = ["Tenant", "Requests", "Complete", "TTFT p50", "TTFT p95", "ITL p99", "Tokens/s", "Of all", "Attainment"]
    yield Table(head, rows)
    yield Plot("tenants", "From p50 over p95 to p99, and who got how much.")


def _outcomes(result: LoadResult) -> Iterator[Block]:
    summary = result.summary
    if not summary.requests:
        return
    errors: dict[UserOutcome, Counter[str]] = {outcome: Counter() for outcome in UserOutcome}
    for position in np.flatnonzero(result.counted_flags()):
        errors[result.requests.outcome[position]][result.requests.error[position]] += 1
    rows = []
    for outcome in UserOutcome:
        number = summary.outcomes.get(outcome, 0)
        if number:
            said = [(error, times) for error, times in errors[outcome].most_common(EXAMPLES) if error]
            examples = "; ".join(error if len(said) == 1 else f"{error} ({count(times)}×)" for error, times in said)
            more = sum(1 for error in errors[outcome] if error) - len(said)
            examples += f"; and {count(more)} other texts" if more > 0 else ""
            rows.append([outcome.replace("_", " "), examples, count(number), share(number / summary.requests)])
    yield Table(["Outcome", "What was said", "Requests", "Share"], rows, words=2)
    yield Plot("outcomes", "All counted requests.")


def _tester(result: LoadResult) -> Iterator[Block]:
    cost = result.tester
    rows = [
        ["Processor time", f"{duration(cost.cpu_seconds)}, {share(cost.cpu_share)} of one core"],
        ["… in its busiest second", f"{share(cost.cpu_share_max)} of one core"],
        ["Ready to run, but no core was free", f"{share(cost.starved_share)} of the time"],
        ["Most requests open at once", count(cost.peak_open)],
        ["Memory", size(cost.peak_memory_bytes)],
    ]
    yield Paragraph(cost.verdict)
    late: list[tuple[str, float, float, float]] = [
        ("Its event loop", cost.lag_p50_s, cost.lag_p99_s, cost.lag_max_s),
        ("Requests, by its own fault", cost.send_delay_p50_s, cost.send_delay_p99_s, cost.send_delay_max_s),
    ]
    yield Table(["Cost", ""], rows)
    yield Table(["Late by", "p50", "p99", "Max"], [[name, *map(duration, times)] for name, *times in late])
    yield Plot(
        "tester", "Time stamps are late where the tester has no processor time left: at the dotted line, or before."
    )


def _settings(result: LoadResult) -> Iterator[Block]:
    yield CodeBlock(result.command)
    default = msgspec.to_builtins(LoadSpec())
    changed = [
        [path, _plain(value)] for path, value in _leaves(result.spec) if value != dict(_leaves(default)).get(path)
    ]
    if changed:
        yield Table(["Setting (all others are as by default)", "Value"], changed, words=2)
    machine, calibration = result.machine, result.calibration
    rows = [
        ["Tester", f"maitred {result.maitred}, Python {machine.python}"],
        [
            "Its machine",
            f"{machine.cpu}, {machine.cores} cores, {significant(machine.memory_gib)} GiB, {machine.system}",
        ],
        ["Server", result.target.server or NONE],
        [
            "Prompts",
            f"{significant(calibration.tokens_per_word)} tokens per word, and "
            f"{significant(calibration.template_tokens)} of the chat template",
        ],
    ]
    yield Table(["", ""], rows, words=2)


NO_OBJECTIVES = LoadSpec().objectives


def _quantiles(name: str, times: Quantiles) -> list[str]:
    shown = (times.mean, times.p50, times.p90, times.p95, times.p99, times.max)
    return [name, count(times.count), *(duration(value) for value in shown)]


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _plain(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
