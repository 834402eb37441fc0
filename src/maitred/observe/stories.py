"""The stories of the last requests, for whoever asks what happened to one."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from maitred.core.answer import Ask, Tally
from maitred.core.clock import Clock
from maitred.core.errors import ResourceNotFound
from maitred.core.request import SamplingParams
from maitred.core.story import Chapter, ChapterName
from maitred.wire.admin.responses import ChapterBody, StoryBody, StoryHead
from maitred.wire.admin.times import iso_of

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("min_tokens", "n", "top_logprobs"),
)
"""Fields of `SamplingParams` that are told, where they are not as they would be by default."""
_DEFAULTS = SamplingParams(max_tokens=0, seed=0)


class Stories:
    """Keeps so many. Implements `maitred.core.answer.Observer`.

    Kept are those that could be read as asking a model for something; not lists, scrapes and who is not known.

    Args:
        most: Requests. Each takes some kilobytes; 0 keeps none.
        clock: For the times that people read.
    """

    def __init__(self, most: int, clock: Clock) -> None:
        self._most = most
        self._clock = clock
        self._kept: OrderedDict[str, StoryBody] = OrderedDict()
        """By the id, of which clients may choose the same again: the latest counts."""

    def ended(self, tally: Tally) -> None:
        """Keeps one."""
        if not self._most or tally.ask is None:
            return
        self._kept.pop(tally.request_id, None)
        self._kept[tally.request_id] = story_of(tally, self._clock.wall_s())
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def latest(self) -> Sequence[StoryHead]:
        """All of them, the latest first."""
        return [
            StoryHead(
                id=story.id,
                time=story.time,
                route=story.route,
                organisation=story.organisation,
                model=story.model,
                outcome=story.outcome,
                status=story.status,
                duration_ms=story.duration_ms,
                ttft_ms=story.ttft_ms,
                output_tokens=story.output_tokens,
            )
            for story in reversed(self._kept.values())
        ]

    def of(self, request_id: str) -> StoryBody:
        """The latest of that id.

        Raises:
            ResourceNotFound: None is known.
        """
        story = self._kept.get(request_id)
        if story is None:
            raise ResourceNotFound(
                f"No request of that id is known here. A gateway knows the last {self._most:,} that it has served and "
                "that have ended (`explain.requests`)."
            )
        return story


def story_of(tally: Tally, wall_s: float) -> StoryBody:
    """An ended request as the administration tells of it."""
    principal, started_s, ask = tally.principal, tally.started_s, tally.ask
    return StoryBody(
        id=tally.request_id,
        trace_id=None if tally.story.trace is None else tally.story.trace.trace_id,
        time=iso_of(wall_s),
        route=tally.route,
        organisation=None if principal is None else principal.tenants[-1],
        tenant=None if principal is None else principal.tenants[0],
        key=None if principal is None else principal.key,
        asked=None if ask is None else ask.model,
        model=tally.model or None,
        parameters={} if ask is None else parameters_of(ask),
        priority=tally.priority,
        outcome=str(tally.outcome),
        status=tally.status,
        error=tally.error or None,
        duration_ms=_ms(tally.ended_s - started_s),
        ttft_ms=None if tally.first_token_s is None else _ms(tally.first_token_s - started_s),
        waited_ms={str(cause): round(waited_ms, 3) for cause, waited_ms in tally.waited_ms.items()},
        prompt_tokens=tally.prompt_tokens,
        cached_tokens=tally.cached_tokens,
        output_tokens=tally.completion_tokens,
        finish_reasons=[str(reason) for reason in tally.finishes],
        cost_usd=_cost_usd(tally.story.chapters),
        degraded=[*tally.degraded],
        fallbacks=[*tally.fallbacks],
        escalated=tally.escalated,
        recoveries=tally.recoveries,
        rollout=None if tally.arm is None else str(tally.arm),
        chapters=[_chapter(chapter, started_s) for chapter in tally.story.chapters],
    )


def parameters_of(ask: Ask) -> dict[str, Any]:
    """What a client has asked for beside the answer, by the names of the API. No text of its own is among it."""
    sampling = ask.sampling
    told: dict[str, Any] = {
        "max_tokens": ask.max_tokens,
        "seed": ask.seed,
        "stops": len(ask.stops) or None,
        "deadline_s": ask.deadline_in_s,
        "ttft_objective_s": ask.ttft_in_s,
        "itl_objective_s": ask.itl_objective_s,
        "priority": ask.priority,
        "needs": [*ask.needs] or None,
        "stream": None if ask.whole else True,
    }
    for name in _SAMPLING:
        if name not in ask.left_open and (value := getattr(sampling, name)) != getattr(_DEFAULTS, name):
            told[name] = value
    return {name: value for name, value in told.items() if value is not None}


def _chapter(chapter: Chapter, started_s: float) -> ChapterBody:
    return ChapterBody(
        name=str(chapter.name),
        at_ms=_ms(chapter.began_s - started_s),
        took_ms=None if chapter.ended_s is None else _ms(chapter.ended_s - chapter.began_s),
        error=chapter.error,
        facts=chapter.facts,
        inside=[_chapter(one, started_s) for one in chapter.inside],
    )


def _cost_usd(chapters: Sequence[Chapter]) -> float | None:
    costs = [chapter.facts["cost_usd"] for chapter in chapters if chapter.name is ChapterName.SETTLEMENT]
    return sum(costs) if costs else None


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
