"""The live state as a screen of a terminal: what `/console` shows, in tables and bars."""

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from maitred.cli.output.tables import cell
from maitred.cli.output.tune_table import bar
from maitred.wire.admin.live import EngineBody, FindingBody, LiveBody, QueueBody, UseBody

_BAR = 30
_MOST_ROWS = 10
"""Of tenants and of refusals: a terminal is short."""


def screen(state: LiveBody) -> RenderableType:
    """Renders the whole screen, the most important first."""
    parts: list[RenderableType] = [_head(state), _path(state)]
    parts += [_finding(finding) for finding in state.findings or ()]
    parts.append(_queues(state.queues))
    parts += [_engine(engine) for engine in state.engines]
    parts.append(_replicas(state))
    if state.tenants:
        parts.append(_tenants(state))
    if state.refusals:
        parts.append(_refusals(state))
    spaced = [item for part in parts for item in (part, Text())]
    return Group(*spaced[:-1])


def _head(state: LiveBody) -> Text:
    text = Text.assemble(("maitred ", "bold"), state.version, ("   up ", "dim"), _span(state.at - state.started_at))
    if state.draining:
        text.append("   draining", "yellow")
    for store, up in state.stores.items():
        if not up:
            text.append(f"   {store} does not answer", "red")
    return text


def _path(state: LiveBody) -> Text:
    path, point = state.path, state.point
    text = Text()
    for name, number in (
        ("arriving", path.arriving),
        ("queued", path.queued),
        ("prefill", path.prefilling),
        ("decoding", path.decoding),
    ):
        text.append(f"{name} ", "dim").append(f"{number:,}", "bold").append("  →  ", "dim")
    text.append("last second ", "dim")
    text.append(", ".join(f"{outcome.value} {number:,}" for outcome, number in point.ended.items()) or "nothing ended")
    for name, times in (("TTFT", point.ttft_s), ("ITL", point.itl_s)):
        text.append(f"\n{name} ", "dim").append(
            "–" if times is None else f"{_span(times[0])} median, {_span(times[1])} p95"
        )
    return text


def _finding(finding: FindingBody) -> Text:
    """Renders one finding, as `maitred doctor` would print it."""
    where = f" {finding.where}" if finding.where else ""
    text = Text.assemble((cell(f"{finding.kind}{where}"), "yellow"), "  ", cell(finding.summary))
    return text.append(f"\n{cell(finding.remedy)}", "dim")


def _queues(queues: Iterable[QueueBody]) -> Table:
    table = _table("QUEUE", ["RUNNING"], ["CLASSES", "TENANTS"])
    for queue in queues:
        classes = ", ".join(
            f"{name} {number:,} ({_span(queue.predicted_wait_s.get(name))})"
            for name, number in queue.waiting.items()
            if number
        )
        tenants = ", ".join(
            f"{tenant.tenant} {tenant.waiting:,}+{tenant.running:,}" for tenant in queue.tenants[:_MOST_ROWS]
        )
        _add(table, queue.model, queue.running, classes or "nobody waits", tenants)
    return table


def _engine(engine: EngineBody) -> Table:
    state = "asleep" if engine.asleep else "up" if engine.up else "not connected"
    table = _table("ENGINE", ["BATCH", "WAITING", "PAUSED", "PREEMPTIONS"], ["KV CACHE"])
    free = engine.blocks - engine.used_blocks - engine.cached_blocks
    map_ = Text(f"used {engine.used_blocks:,}  cached {engine.cached_blocks:,}  free {free:,}")
    if engine.blocks:
        used, kept = engine.used_blocks / engine.blocks, engine.cached_blocks / engine.blocks
        full = round(used * _BAR)
        half = round((used + kept) * _BAR) - full
        map_ = Text.assemble(
            ("█" * full, "blue"), ("▒" * half, "cyan"), ("·" * (_BAR - full - half), "dim"), "  ", map_
        )
    batch = f"{engine.running:,}/{engine.running + engine.free_sequences:,}"
    name = f"{engine.model} {engine.replica} {state}"
    table.add_row(*map(_text, (name, batch, engine.waiting, engine.paused, engine.preemptions)), map_)
    return table


def _replicas(state: LiveBody) -> Table:
    table = _table("REPLICA", ["REQUESTS", "PLACES FREE", "KV TOKENS FREE"], ["STATE"])
    for replica in state.replicas:
        health = (
            "ready"
            if replica.ready
            else replica.outage or "not ready"
            if replica.state == "serving"
            else replica.state.value
        )
        slots, tokens = (
            "-" if (credit := replica.credits.get(name)) is None else f"{max(0, credit.free):,}/{credit.total:,}"
            for name in ("slots", "kv_tokens")
        )
        _add(table, f"{replica.model} {replica.replica}", replica.requests, slots, tokens, health)
    return table


def _tenants(state: LiveBody) -> Table:
    table = _table("TENANT", ["WAITING", "RUNNING", "ENDED", "REFUSED", "TOKENS"], ["LIMITS"])
    for tenant in state.tenants[:_MOST_ROWS]:
        limits = Text("\n").join(_limit(limit) for limit in tenant.limits)
        name = "everybody" if tenant.tenant == "*" else tenant.tenant
        numbers = (
            tenant.waiting,
            tenant.running,
            tenant.requests,
            tenant.refused,
            tenant.prompt_tokens + tenant.output_tokens,
        )
        table.add_row(*map(_text, (name, *numbers)), limits)
    return table


def _limit(limit: UseBody) -> Text:
    share = limit.used / limit.value if limit.value else 0.0
    style = "red" if share >= 1 else "yellow" if share >= 0.8 else "green"
    kind = limit.kind.value if limit.hard else f"soft {limit.kind.value}"
    model = f" of {limit.model}" if limit.model else ""
    return Text.assemble((bar(share, 10).ljust(10), style), cell(f" {share:4.0%} {kind}{model}"))


def _refusals(state: LiveBody) -> Table:
    table = _table("REFUSED", ["TIMES", "AGO"], ["MODEL", "WHY"])
    for refusal in state.refusals[:_MOST_ROWS]:
        why = " ".join(filter(None, (str(refusal.status), refusal.code, refusal.limit)))
        _add(table, refusal.tenant, refusal.count, _span(max(0.0, state.at - refusal.at)), refusal.model, why)
    return table


def _table(first: str, numbers: Sequence[str], texts: Sequence[str]) -> Table:
    """A column of names, then numbers, then texts."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(first, no_wrap=True, max_width=40)
    for title in numbers:
        table.add_column(title, no_wrap=True, justify="right")
    for title in texts:
        table.add_column(title, overflow="fold")
    return table


def _add(table: Table, *values: object) -> None:
    table.add_row(*map(_text, values))


def _text(value: object) -> Text:
    return Text(cell(value))


def _span(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
