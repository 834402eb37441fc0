"""Which of the replicas that have room for a request takes it."""

from collections.abc import Mapping, Sequence

from maitred.core.balance import CacheAwareBalancer, PlacementRequest, ReplicaCandidate
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.load_reports import LoadReports, ReportedLoad
from maitred.dispatch.pool_queue import QueuedRequest, QueueState
from maitred.dispatch.predictor import UNMEASURED, LatencyPredictor
from maitred.dispatch.request import DispatchRequest

_UNKNOWN_ROOM_TOKENS = 131_072
"""Of a cache that nothing is said of."""
_UNKNOWN_OUTPUT_TOKENS = 64.0
_NOTHING: Mapping[str, int] = {}
_SAME_S = 0.005
"""What caches hold of a prompt is looked up once for a request that is foreseen, placed and released so fast..."""
_WAITS_S = 1.0
"""...and so often for one that waits, to tell how long it still will."""


class ReplicaSelector:
    """Tells a placement what it goes by, and what has come of it.

    Args:
        placement: Decides. None: the replica with the most room takes it.
        outlook: What is predicted.
        reports: What is believed of the replicas' own words.

    Attributes:
        placement: See above.
    """

    def __init__(self, placement: CacheAwareBalancer | None, outlook: LatencyPredictor, reports: LoadReports) -> None:
        self.placement = placement
        self._outlook = outlook
        self._reports = reports
        self._steps: dict[str, int] = {}

    def adopt(self, placement: CacheAwareBalancer | None, reports: LoadReports) -> None:
        """Goes by these from now on."""
        self.placement = placement
        self._reports = reports

    def of(self, ticket: QueuedRequest, stations: Sequence[EndpointState], now_s: float) -> EndpointState:
        """One of these, of which there is at least one."""
        ticket.candidates = ()
        if len(stations) == 1:
            return stations[0]
        if self.placement is None:
            return max(stations, key=ease_of)
        errand = ticket.errand
        held = self._held_by(ticket, stations, now_s)
        named = {station.post.name: station for station in stations}
        inquiry = PlacementRequest(errand.prompt_tokens, ticket.expected_tokens * errand.choices, errand.session)
        words = self._reports.believed(stations, self._outlook.typical_prompt_tokens, now_s)
        candidates = [
            self._candidate(station, word, errand.prompt_tokens, held.get(station.post.name, 0), now_s)
            for station, word in zip(stations, words, strict=True)
        ]
        ticket.candidates = candidates
        return named[self.placement.choose(inquiry, candidates).name]

    def held(self, errand: DispatchRequest) -> int:
        """Leading tokens of its prompts that one of the replicas holds, as far as that is followed."""
        if self.placement is None:
            return 0
        return max(self.placement.held(errand.principal_org, errand.prompts).values(), default=0)

    def prefill_s(
        self,
        ticket: QueuedRequest,
        station: EndpointState,
        ahead: int,
        now_s: float,
        *,
        released_s: float | None = None,
    ) -> float:
        """From its release to its first token there, before any correction.

        Of its prompt has to be computed what the replica does not hold, as far as that is told; else as much as usual.

        Args:
            ticket: The request.
            station: Where it will run.
            ahead: Requests that are released to it in the same moment.
            now_s: Now.
            released_s: When it is released; None: now.
        """
        if station.load.times == UNMEASURED:
            return 0.0
        within_s = _WAITS_S if ticket.state is QueueState.WAITING else _SAME_S
        held_tokens = self._held_by(ticket, (station,), now_s, within_s).get(station.post.name)
        from_s = now_s if released_s is None else released_s
        if held_tokens is None:
            return self.usual_prefill_s(ticket, station, ahead, from_s)
        fresh_tokens = ticket.errand.prompt_tokens - held_tokens
        return self._outlook.prefill_s(fresh_tokens, held_tokens, station, ahead, from_s)

    def usual_prefill_s(self, ticket: QueuedRequest, station: EndpointState, ahead: int, now_s: float) -> float:
        """The same where nothing is known of what it holds."""
        prompt_tokens = ticket.errand.prompt_tokens
        fresh_tokens = self._outlook.to_compute(prompt_tokens)
        return self._outlook.prefill_s(fresh_tokens, prompt_tokens - fresh_tokens, station, ahead, now_s)

    def _held_by(
        self, ticket: QueuedRequest, stations: Sequence[EndpointState], now_s: float, within_s: float = _SAME_S
    ) -> Mapping[str, int]:
        """For each replica that is followed, how much of its prompts it holds; none where nobody knows their tokens.

        Args:
            ticket: The request.
            stations: Those in question.
            now_s: Now.
            within_s: What was looked up so long ago is as good.
        """
        placement = self.placement
        if placement is None:
            return _NOTHING
        for station in stations:
            if self._began_anew(station):
                placement.emptied(station.post.name)
                ticket.held = None
        if ticket.held is None or now_s - ticket.held_at_s > within_s:
            errand = ticket.errand
            known = all(prompt[:1] for prompt in errand.prompts)
            ticket.held = placement.held(errand.principal_org, errand.prompts) if known else _NOTHING
            ticket.held_at_s = now_s
        return ticket.held

    def released(self, ticket: QueuedRequest, station: EndpointState) -> None:
        """A request was released to that replica."""
        if self.placement is not None:
            room_tokens = station.load.total_blocks * station.block_tokens or _UNKNOWN_ROOM_TOKENS
            self.placement.sent(station.post.name, room_tokens, ticket.errand.principal_org, ticket.errand.prompts)

    def _candidate(
        self, station: EndpointState, word: ReportedLoad, prompt_tokens: int, held_tokens: int, now_s: float
    ) -> ReplicaCandidate:
        account = station.credits
        load = station.load
        wait_s = prefill_s = None
        if load.times != UNMEASURED:
            wait_s = self._outlook.prefill_s(0, 0, station, 0, now_s)
            whole_s = self._outlook.prefill_s(prompt_tokens - held_tokens, held_tokens, station, 0, now_s)
            prefill_s = max(0.0, whole_s - wait_s)
            wait_s = max(0.0, wait_s + load.times.token_s * (word.prompt_tokens - load.waiting_prompt_tokens))
        half_answer = (self._outlook.outputs.mean or _UNKNOWN_OUTPUT_TOKENS) / 2
        return ReplicaCandidate(
            station.post.name,
            weight=station.weight,
            requests=account.held + round(word.requests),
            prompt_tokens=word.prompt_tokens + account.uncounted.prompt_tokens,
            # Answers that run are over by half, on average.
            output_tokens=(account.outstanding.slots + word.requests) * half_answer,
            held_tokens=held_tokens,
            wait_s=wait_s,
            prefill_s=prefill_s,
        )

    def _began_anew(self, station: EndpointState) -> bool:
        """Whether an engine has started anew since somebody asked: it counts its steps from 0 again."""
        name, steps = station.post.name, station.load.steps
        before, self._steps[name] = self._steps.get(name, 0), steps
        return steps < before


def ease_of(station: EndpointState) -> float:
    """How much of a replica is free."""
    return station.free.slots / max(1, station.total.slots)
