"""Headers of LiteLLM's proxy: what its clients read in responses, and what they say in requests.

Facts: `litellm/proxy/common_request_processing.py` and `litellm/proxy/litellm_pre_call_utils.py` of LiteLLM 1.106.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial

from maitred import __version__
from maitred.admission.prices import PriceList
from maitred.api.dialect import Header
from maitred.api.exchange import HttpExchange
from maitred.api.headers import DEADLINE, MOST_RETRIES, RETRIES, SESSION, Headers
from maitred.api.routes import Handler, Route
from maitred.core.clock import Clock
from maitred.core.context import RequestContext
from maitred.core.errors import InvalidRequest
from maitred.core.request import Usage
from maitred.core.tenancy import Scope
from maitred.core.usage import to_usd
from maitred.wire.openai.faults import format_value

_TIMEOUT, _NUM_RETRIES = b"x-litellm-timeout", b"x-litellm-num-retries"
_END_USER, _TAGS = b"x-litellm-end-user-id", b"x-litellm-tags"
_READ = frozenset({_TIMEOUT, _NUM_RETRIES, _END_USER})
_UNFIT = re.compile(rb"[^ -~]")
_LONGEST_NAME = 256


class LitellmHeaders:
    """Reads and writes LiteLLM's headers of inference requests.

    Args:
        prices: The prices of all models, for the cost of whole answers.
        api_bases: Model -> the address of its one server; models with several servers are missing.
        clock: Clock for durations.
    """

    def __init__(self, prices: PriceList, api_bases: Mapping[str, str], clock: Clock) -> None:
        self._prices = prices
        self._api_bases = api_bases
        self._clock = clock

    def guard(self, route: Route) -> Route:
        """Returns the route of an inference request with a handler that reads and writes the headers; others as is."""
        if route.reads is None or route.needs is not Scope.INFERENCE:
            return route
        return dataclasses.replace(route, handler=partial(self._handle, route.handler))

    async def _handle(self, handler: Handler, exchange: HttpExchange) -> None:
        exchange.late_headers = self.response_headers
        exchange.header = self.read(exchange.header)
        await handler(exchange)

    def read(self, header: Headers) -> Headers:
        """Returns the headers of a request with ours for what LiteLLM's say; ours win.

        Raises:
            InvalidRequest: A time or a number of retries is none.
        """
        if not header.have_any(_READ):
            return header
        ours: list[Header] = []
        if (timeout := header(_TIMEOUT)) is not None:
            ours.append((DEADLINE.encode(), b"%d" % _milliseconds(timeout)))
        if (retries := header(_NUM_RETRIES)) is not None:
            if not (retries.isascii() and retries.isdigit() and len(retries) <= 2):
                name = _NUM_RETRIES.decode()
                raise InvalidRequest(f"{name} must be a whole number; got {format_value(retries)}.", param=name)
            ours.append((RETRIES.encode(), b"%d" % min(int(retries), MOST_RETRIES)))
        if (user := header(_END_USER)) is not None:
            ours.append((SESSION, user.encode("latin-1")))
        return header.followed_by(ours)

    def response_headers(self, exchange: HttpExchange, status: int) -> Sequence[Header]:
        """Returns the headers of a response; the cost is known of a whole answer only.

        Args:
            exchange: The request with its response.
            status: Status of a whole response; 0: it is a stream.
        """
        context = exchange.context
        now_s = self._clock.monotonic_s()
        dispatched_s = now_s if context.dispatched_s is None else context.dispatched_s
        headers = [
            (b"x-litellm-overhead-duration-ms", _number(1000 * (dispatched_s - context.started_s))),
            (b"x-litellm-call-id", context.request_id.encode("ascii")),
            (b"x-litellm-version", __version__.encode("ascii")),
            (b"x-litellm-response-duration-ms", _number(1000 * (now_s - context.started_s))),
            (b"x-litellm-attempted-retries", b"%d" % context.recoveries),
            (b"x-litellm-attempted-fallbacks", b"%d" % len(context.fallbacks)),
        ]
        if context.request is not None:
            headers.append((b"x-litellm-model-group", _text(context.request.model)))
        if context.model:
            headers.append((b"x-litellm-model-id", _text(context.model)))
            if (api_base := self._api_bases.get(context.model)) is not None:
                headers.append((b"x-litellm-model-api-base", _text(api_base)))
        if status:
            cost_usd = self._cost_usd(context) if status == 200 and context.model else 0.0
            headers.append((b"x-litellm-response-cost", _number(cost_usd)))
        if exchange.header(_TAGS) is not None:
            headers.append((b"x-maitred-ignored", _TAGS))
        return headers

    def _cost_usd(self, context: RequestContext) -> float:
        tag = self._prices.price_for(context.model)
        usage = context.usage
        if context.is_computed:
            return to_usd(tag.price.cost_nusd(usage))
        return to_usd(tag.of_hits.price.cost_nusd(Usage(usage.total_tokens, 0)))


def _milliseconds(timeout: str) -> int:
    try:
        seconds = float(timeout)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < 7 * 24 * 3600:
        name = _TIMEOUT.decode()
        raise InvalidRequest(f"{name} must be a number of seconds; got {format_value(timeout)}.", param=name)
    return max(1, round(seconds * 1000))


def _number(value: float) -> bytes:
    return f"{value:.12g}".encode("ascii")


def _text(name: str) -> bytes:
    return _UNFIT.sub(b"?", name[:_LONGEST_NAME].encode("utf-8", "replace"))
