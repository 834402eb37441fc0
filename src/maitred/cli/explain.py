"""`maitred explain`: what happened to one request, and why models have the replicas that they have."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from maitred.cli.options import DEFAULT_URL, AdminKeyOption, JsonOption, UrlOption
from maitred.cli.output.tables import amount, print_json, print_table
from maitred.cli.scaling import explain_scaling
from maitred.core.errors import InvalidRequest

if TYPE_CHECKING:
    from maitred.wire.admin.responses import SpanBody, TimelineBody, TimelineList

EXAMPLES = """
Examples:

    maitred explain

    maitred explain req-019aa6f1c0e5b1f0c9e7d2a4

    maitred explain req-019aa6f1c0e5b1f0c9e7d2a4 --json

    maitred explain scaling

    maitred explain scaling chat
"""
_INDENT = "  "
_SCALING = "scaling"


def explain(
    request_id: Annotated[
        str | None,
        typer.Argument(
            metavar="REQUEST_ID",
            help="As in `x-request-id` of its answer; without one, the last are listed. `scaling`: why models have "
            "the number of replicas that they have.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="After `scaling`: one model, with its last decisions.")
    ] = None,
    named: Annotated[
        str | None,
        typer.Option("--request", metavar="ID", help="The request of this id, also if it reads `scaling`."),
    ] = None,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """Tell what happened to a request: what it waited for, what was decided, and what it cost."""
    if named is None and request_id == _SCALING:
        explain_scaling(model, as_json=as_json, url=url, key=key)
        return
    if model is not None or (named is not None and request_id is not None):
        raise InvalidRequest("One request at a time. A model is named only after `scaling`.")
    request_id = named or request_id
    from maitred.cli.admin_client import administer, in_path
    from maitred.wire.admin.responses import TimelineBody, TimelineList

    if request_id is None:
        _list(administer(url, key, lambda client: client.get("requests", TimelineList)), as_json=as_json)
        return
    path = f"requests/{in_path(request_id)}"
    timeline = administer(url, key, lambda client: client.get(path, TimelineBody))
    if as_json:
        print_json(timeline)
        return
    print_table(("REQUEST", timeline.id), _heading(timeline))
    typer.echo()
    print_table(
        ("AT MS", "TOOK MS", "WHAT", "HOW"),
        (row for span in timeline.chapters for row in _rows(span, 0)),
        numbers=("AT MS", "TOOK MS"),
    )


def _list(timelines: "TimelineList", *, as_json: bool) -> None:
    if as_json:
        print_json(timelines)
        return
    print_table(
        ("ID", "ENDED", "MODEL", "TENANT", "OUTCOME", "STATUS", "TTFT MS", "TOOK MS", "TOKENS"),
        (
            (
                *(summary.id, summary.time, summary.model, summary.organisation, summary.outcome, str(summary.status)),
                *(summary.ttft_ms, summary.duration_ms, summary.output_tokens),
            )
            for summary in timelines.data
        ),
        numbers=("TTFT MS", "TOOK MS", "TOKENS"),
    )


def _heading(timeline: "TimelineBody") -> Iterator[tuple[str, object]]:
    """Returns the lines about the whole request, without those that there is nothing to say in."""
    end = f"{timeline.outcome}, status {timeline.status}" + "".join(
        f", {word}" for word in (timeline.error, timeline.refused_by) if word
    )
    owner = "/".join(dict.fromkeys(name for name in (timeline.organisation, timeline.tenant, timeline.key) if name))
    model = timeline.model or timeline.asked
    if timeline.asked not in (None, model):
        model = f"{model}, asked for as {timeline.asked}"
    for title, value in (
        ("trace", timeline.trace_id),
        ("ended", timeline.time),
        ("route", timeline.route),
        ("tenant", owner),
        ("model", model),
        ("parameters", format_facts(timeline.parameters)),
        ("class", timeline.priority),
        ("outcome", end),
        ("took", f"{amount(timeline.duration_ms)} ms"),
        ("first token", None if timeline.ttft_ms is None else f"after {amount(timeline.ttft_ms)} ms"),
        ("waited", format_facts(timeline.waited_ms, " ms")),
        (
            "tokens",
            f"{timeline.prompt_tokens:,} in, {timeline.cached_tokens:,} of them cached; {timeline.output_tokens:,} out",
        ),
        ("ended by", timeline.finish_reasons),
        ("cost", None if timeline.cost_usd is None else f"${amount(timeline.cost_usd)}"),
        ("rollout", timeline.rollout),
        ("degraded", timeline.degraded),
        ("fallbacks", timeline.fallbacks),
        ("escalated", timeline.escalated),
        ("cache", timeline.cache),
        ("recoveries", timeline.recoveries or None),
    ):
        if value not in (None, "", []):
            yield title, value


def _rows(span: "SpanBody", depth: int) -> Iterator[tuple[object, ...]]:
    """Makes the row of a span, and below it the rows of the spans inside."""
    candidates = span.facts.get("candidates", [])
    facts = {name: value for name, value in span.facts.items() if name != "candidates"}
    how = format_facts(facts) if not span.error else f"failed: {span.error}  {format_facts(facts)}"
    yield _ms(span.at_ms), _ms(span.took_ms), _INDENT * depth + span.name, how
    for candidate in candidates:
        mark = "taken" if candidate["replica"] == facts.get("replica") else "considered"
        yield None, None, f"{_INDENT * (depth + 1)}{mark}", format_facts(candidate)
    for inner in span.inside:
        yield from _rows(inner, depth + 1)


def format_facts(facts: Mapping[str, Any], unit: str = "") -> str:
    """Facts on one line; those that say nothing are left out."""
    return "  ".join(
        f"{name}={_value(value)}{unit}" for name, value in facts.items() if value not in (None, "", [], {}, False)
    )


def _value(value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case int() | float():
            return amount(value)
        case dict():
            return ",".join(f"{name}:{_value(inner)}" for name, inner in value.items())
        case list():
            return ",".join(map(_value, value))
        case _:
            return str(value)


def _ms(value: float | None) -> str | None:
    return None if value is None else f"{value:,.1f}"
