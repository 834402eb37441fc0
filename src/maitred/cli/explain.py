"""`maitred explain`: what happened to one request."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from maitred.cli.options import DEFAULT_URL, AdminKeyOption, JsonOption, UrlOption
from maitred.cli.tables import amount, print_json, print_table

if TYPE_CHECKING:
    from maitred.wire.admin.responses import SpanBody, TimelineBody, TimelineList

EXAMPLES = """
Examples:

    maitred explain

    maitred explain req-019aa6f1c0e5b1f0c9e7d2a4

    maitred explain req-019aa6f1c0e5b1f0c9e7d2a4 --json
"""
_INDENT = "  "


def explain(
    request_id: Annotated[
        str | None,
        typer.Argument(
            metavar="REQUEST_ID", help="As in `x-request-id` of its answer; without one, the last are listed."
        ),
    ] = None,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """Tell what happened to a request: what it waited for, what was decided, and what it cost."""
    from maitred.cli.admin_client import administer, in_path
    from maitred.wire.admin.responses import TimelineBody, TimelineList

    if request_id is None:
        _list(administer(url, key, lambda client: client.get("requests", TimelineList)), as_json=as_json)
        return
    path = f"requests/{in_path(request_id)}"
    story = administer(url, key, lambda client: client.get(path, TimelineBody))
    if as_json:
        print_json(story)
        return
    print_table(("REQUEST", story.id), _heading(story))
    typer.echo()
    print_table(
        ("AT MS", "TOOK MS", "WHAT", "HOW"),
        (row for chapter in story.chapters for row in _rows(chapter, 0)),
        numbers=("AT MS", "TOOK MS"),
    )


def _list(stories: "TimelineList", *, as_json: bool) -> None:
    if as_json:
        print_json(stories)
        return
    print_table(
        ("ID", "ENDED", "MODEL", "TENANT", "OUTCOME", "STATUS", "TTFT MS", "TOOK MS", "TOKENS"),
        (
            (
                *(one.id, one.time, one.model, one.organisation, one.outcome, str(one.status)),
                *(one.ttft_ms, one.duration_ms, one.output_tokens),
            )
            for one in stories.data
        ),
        numbers=("TTFT MS", "TOOK MS", "TOKENS"),
    )


def _heading(story: "TimelineBody") -> Iterator[tuple[str, object]]:
    """What is said of the whole; nothing of what there is nothing to say."""
    end = f"{story.outcome}, status {story.status}" + "".join(
        f", {word}" for word in (story.error, story.refused_by) if word
    )
    whose = "/".join(dict.fromkeys(name for name in (story.organisation, story.tenant, story.key) if name))
    model = story.model or story.asked
    if story.asked not in (None, model):
        model = f"{model}, asked for as {story.asked}"
    for title, value in (
        ("trace", story.trace_id),
        ("ended", story.time),
        ("route", story.route),
        ("tenant", whose),
        ("model", model),
        ("parameters", told(story.parameters)),
        ("class", story.priority),
        ("outcome", end),
        ("took", f"{amount(story.duration_ms)} ms"),
        ("first token", None if story.ttft_ms is None else f"after {amount(story.ttft_ms)} ms"),
        ("waited", told(story.waited_ms, " ms")),
        ("tokens", f"{story.prompt_tokens:,} in, {story.cached_tokens:,} of them cached; {story.output_tokens:,} out"),
        ("ended by", story.finish_reasons),
        ("cost", None if story.cost_usd is None else f"${amount(story.cost_usd)}"),
        ("rollout", story.rollout),
        ("degraded", story.degraded),
        ("fallbacks", story.fallbacks),
        ("escalated", story.escalated),
        ("recoveries", story.recoveries or None),
    ):
        if value not in (None, "", []):
            yield title, value


def _rows(chapter: "SpanBody", depth: int) -> Iterator[tuple[object, ...]]:
    """A line for the chapter, and below it lines for what it holds."""
    candidates = chapter.facts.get("candidates", [])
    facts = {name: value for name, value in chapter.facts.items() if name != "candidates"}
    how = told(facts) if not chapter.error else f"failed: {chapter.error}  {told(facts)}"
    yield _ms(chapter.at_ms), _ms(chapter.took_ms), _INDENT * depth + chapter.name, how
    for candidate in candidates:
        mark = "taken" if candidate["replica"] == facts.get("replica") else "considered"
        yield None, None, f"{_INDENT * (depth + 1)}{mark}", told(candidate)
    for inner in chapter.inside:
        yield from _rows(inner, depth + 1)


def told(facts: Mapping[str, Any], unit: str = "") -> str:
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
