"""`Control` for a worker: one question for each request, over the line to the controller."""

from collections.abc import Mapping

from maitred.admission.config import AdmissionConfig
from maitred.admission.prices import PriceList
from maitred.admission.work import AdmissionRequest
from maitred.api.cancel_scope import CancelScope
from maitred.app.holding import Holder
from maitred.app.workers.client import ControllerClient
from maitred.app.workers.far_seat import RemoteDispatch
from maitred.app.workers.submissions import SubmissionTracker
from maitred.core.answer import RateLimitStatus
from maitred.core.errors import Unavailable
from maitred.core.money import Price
from maitred.core.queue_position import QueuePosition
from maitred.core.tenancy import Principal
from maitred.core.timeline import RequestTimeline
from maitred.dispatch.request import AnyEndpoint, DispatchRequest
from maitred.wire.worker_protocol import AdmitRequest, PromptSummary, RateLimitQuery, RateLimitReply


class RemoteFlowController:
    """Implements `maitred.app.request.flow_control.FlowController`.

    Args:
        line: To the controller.
        posts: Pool -> its replicas, by name.
        submissions: Pool -> what was sent to its engines.
        config: What tokens cost, and how long answers are by default.
        recoveries: How often a request may wait for another replica.
    """

    def __init__(
        self,
        line: ControllerClient,
        posts: Mapping[str, Mapping[str, AnyEndpoint]],
        submissions: Mapping[str, Mapping[str, SubmissionTracker]],
        config: AdmissionConfig,
        recoveries: int,
    ) -> None:
        self._line = line
        self._posts = posts
        self._submissions = submissions
        self._prices = PriceList(config.prices)
        self._default_output_tokens = config.default_output_tokens
        self._recoveries = recoveries

    @property
    def default_output_tokens(self) -> int | None:
        """See `Control.default_output_tokens`."""
        return self._default_output_tokens

    def price_of(self, model: str) -> Price:
        """See `Control.price_of`."""
        return self._prices.of(model).price

    def check(self, pool: str, errand: DispatchRequest) -> None:
        """See `Control.check`: the controller looks when it is asked for a place."""

    async def relieve(self, pool: str, errand: DispatchRequest) -> bool:
        """See `Control.relieve`: no request that could be sent elsewhere is asked for here."""
        return False

    async def admit(
        self, pool: str, errand: DispatchRequest, work: AdmissionRequest, story: RequestTimeline, running: Holder
    ) -> tuple[RemoteDispatch, RemoteDispatch]:
        """See `Control.admit`."""
        await self._line.ready()
        posts = self._posts[pool]
        seat = await running.enter_async_context(
            RemoteDispatch(
                self._line,
                posts,
                self._submissions.get(pool, {}),
                CancelScope(),
                work,
                self._recoveries,
            )
        )
        await seat.take(_asks(seat.number, pool, errand, work, compared=len(posts) > 1))
        return seat, seat

    async def peek(self, principal: Principal, model: str) -> RateLimitStatus | None:
        """See `Control.peek`."""
        try:
            answer = await self._line.ask(lambda number: RateLimitQuery(number, principal, model))
        except Unavailable:
            return None
        assert isinstance(answer, RateLimitReply)
        return answer.standing

    def place_of(self, request_id: str, organisation: str) -> QueuePosition | None:
        """See `Control.place_of`: whoever asks is answered by the controller."""
        return None

    def serving(self, pool: str) -> bool:
        """See `Control.serving`."""
        return self._line.up


def _asks(number: int, pool: str, errand: DispatchRequest, work: AdmissionRequest, *, compared: bool) -> AdmitRequest:
    """The request, as the controller is asked for it.

    Args:
        number: Of the seat.
        pool: Where it waits.
        errand: As the queue sees it.
        work: As admission sees it.
        compared: Whether replicas are compared by what they hold of its prompts. Else these are not told, but how long
            they are.
    """
    return AdmitRequest(
        number=number,
        pool=pool,
        principal=work.principal,
        request_id=errand.id,
        route=work.route,
        model=work.model,
        arrived_s=errand.arrived_s,
        flow=errand.flow,
        prompts=[
            PromptSummary(len(prompt), list(prompt[: len(prompt)]) if compared else []) for prompt in errand.prompts
        ],
        choices=errand.choices,
        length=errand.max_tokens,
        window_left=work.window_left,
        max_tokens=work.max_tokens,
        min_tokens=work.min_tokens,
        deadline_s=errand.deadline_s,
        session=errand.session,
        max_tokens_param=work.max_tokens_param,
        prompt_param=work.prompt_param,
    )
