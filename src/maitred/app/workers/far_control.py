"""`Control` for a worker: one question for each request, over the line to the controller."""

from collections.abc import Mapping

from maitred.admission.config import AdmissionConfig
from maitred.admission.prices import PriceList
from maitred.admission.work import Work
from maitred.api.interrupt import Interruptible
from maitred.app.holding import Holder
from maitred.app.workers.far_seat import FarSeat
from maitred.app.workers.hotline import Hotline
from maitred.app.workers.submissions import Submissions
from maitred.core.answer import Standing
from maitred.core.errors import Unavailable
from maitred.core.money import Price
from maitred.core.place import Place
from maitred.core.story import Story
from maitred.core.tenancy import Principal
from maitred.dispatch.errand import AnyPost, Errand
from maitred.wire.desk import Asks, Peeked, Peeks, WrittenPrompt


class FarControl:
    """Implements `maitred.app.control.Control`.

    Args:
        line: To the controller.
        posts: Pool -> its replicas, by name.
        submissions: Pool -> what was sent to its engines.
        config: What tokens cost, and how long answers are by default.
        recoveries: How often a request may wait for another replica.
    """

    def __init__(
        self,
        line: Hotline,
        posts: Mapping[str, Mapping[str, AnyPost]],
        submissions: Mapping[str, Mapping[str, Submissions]],
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

    def check(self, pool: str, errand: Errand) -> None:
        """See `Control.check`: the controller looks when it is asked for a place."""

    async def relieve(self, pool: str, errand: Errand) -> bool:
        """See `Control.relieve`: no request that could be sent elsewhere is asked for here."""
        return False

    async def admit(
        self, pool: str, errand: Errand, work: Work, story: Story, running: Holder
    ) -> tuple[FarSeat, FarSeat]:
        """See `Control.admit`."""
        await self._line.ready()
        posts = self._posts[pool]
        seat = await running.enter_async_context(
            FarSeat(
                self._line,
                posts,
                self._submissions.get(pool, {}),
                Interruptible(),
                work,
                self._recoveries,
            )
        )
        await seat.take(_asks(seat.number, pool, errand, work, compared=len(posts) > 1))
        return seat, seat

    async def peek(self, principal: Principal, model: str) -> Standing | None:
        """See `Control.peek`."""
        try:
            answer = await self._line.ask(lambda number: Peeks(number, principal, model))
        except Unavailable:
            return None
        assert isinstance(answer, Peeked)
        return answer.standing

    def place_of(self, request_id: str, organisation: str) -> Place | None:
        """See `Control.place_of`: whoever asks is answered by the controller."""
        return None

    def serving(self, pool: str) -> bool:
        """See `Control.serving`."""
        return self._line.up


def _asks(number: int, pool: str, errand: Errand, work: Work, *, compared: bool) -> Asks:
    """The request, as the controller is asked for it.

    Args:
        number: Of the seat.
        pool: Where it waits.
        errand: As the queue sees it.
        work: As admission sees it.
        compared: Whether replicas are compared by what they hold of its prompts. Else these are not told, but how long
            they are.
    """
    return Asks(
        number=number,
        pool=pool,
        principal=work.principal,
        request_id=errand.id,
        route=work.route,
        model=work.model,
        arrived_s=errand.arrived_s,
        flow=errand.flow,
        prompts=[
            WrittenPrompt(len(prompt), list(prompt[: len(prompt)]) if compared else []) for prompt in errand.prompts
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
