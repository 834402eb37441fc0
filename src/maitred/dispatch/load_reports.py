"""Load reports of replicas, as far as they can be believed.

Of a replica's load we know what we have sent there and has not come back; the rest is its own word: of our engines the
prompts that are still to be computed, after every step; of servers of others, where they tell, what others have there,
as of the last look. A word that does not come in time loses weight (`policy.staleness`): a replica that hangs, or whose
metrics do, is judged more and more by its peers and always by what we have sent there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from maitred.dispatch.config import ReportsConfig
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.policy.staleness import AgedLoad, estimate_loads, trust


@dataclass(frozen=True, slots=True)
class ReportedLoad:
    """Load of a replica beyond what was sent from here since its report."""

    requests: float
    """Of others."""
    prompt_tokens: float
    """To be computed."""


class LoadReports:
    """Listens to the replicas of one model.

    Args:
        config: The settings.
    """

    def __init__(self, config: ReportsConfig) -> None:
        self._fresh_s = config.fresh_s
        self._half_s = config.half_s

    def trust(self, endpoint_state: EndpointState, now_s: float) -> float:
        """How much the replica's last word counts, from 0 to 1."""
        return trust(late_s(endpoint_state, now_s), self._fresh_s, self._half_s)

    def estimate_loads(
        self, endpoint_states: Sequence[EndpointState], prompt_tokens: float, now_s: float
    ) -> list[ReportedLoad]:
        """The word of each as it is believed.

        Args:
            endpoint_states: The replicas that are compared.
            prompt_tokens: Of a typical request; what waits at a server of somebody else's is taken to be like it.
            now_s: Now.
        """
        lates_s = [late_s(endpoint_state, now_s) for endpoint_state in endpoint_states]
        words = [_reported_load(endpoint_state, prompt_tokens, now_s) for endpoint_state in endpoint_states]
        if max(lates_s) <= self._fresh_s:
            return words
        requests = [AgedLoad(word.requests, late) for word, late in zip(words, lates_s, strict=True)]
        prompts = [
            AgedLoad(word.prompt_tokens, late, known=min(word.prompt_tokens, _counted_tokens(endpoint_state)))
            for word, late, endpoint_state in zip(words, lates_s, endpoint_states, strict=True)
        ]
        fresh_s, half_s = self._fresh_s, self._half_s
        return list(
            map(ReportedLoad, estimate_loads(requests, fresh_s, half_s), estimate_loads(prompts, fresh_s, half_s))
        )


def late_s(endpoint_state: EndpointState, now_s: float) -> float:
    """For how long a replica's next word has been due.

    Our engines report after every step, so one with something to do owes a report since its step began; one without
    owes none.
    """
    endpoint = endpoint_state.endpoint
    if endpoint.exact:
        return 0.0 if endpoint_state.credits.idle else now_s - endpoint_state.step_began_s
    return inf if endpoint.external_load is None else endpoint.external_load(now_s).late_s


def _reported_load(endpoint_state: EndpointState, prompt_tokens: float, now_s: float) -> ReportedLoad:
    endpoint = endpoint_state.endpoint
    if endpoint.exact:
        return ReportedLoad(0.0, endpoint_state.load.waiting_prompt_tokens)
    if endpoint.external_load is None:
        return ReportedLoad(0.0, 0.0)
    external = endpoint.external_load(now_s)
    return ReportedLoad(external.requests, external.waiting * prompt_tokens)


def _counted_tokens(endpoint_state: EndpointState) -> int:
    """Returns tokens of our prompts that the report counts and that are not answered yet."""
    credits_ = endpoint_state.credits
    return max(0, credits_.unanswered_tokens - credits_.uncounted.prompt_tokens)
