"""Route of the live state: one snapshot, or one every second as long as the client reads."""

import msgspec
from msgspec.structs import replace

from maitred.api.admin.directory_admin import DirectoryAdmin
from maitred.api.admin.service import LiveService
from maitred.api.exchange import HttpExchange
from maitred.api.in_flight import CancelScope
from maitred.api.routes import Route
from maitred.core.errors import Unauthenticated
from maitred.core.tenancy import Scope
from maitred.wire.admin.live import LiveBody
from maitred.wire.sse import encode_event


class LiveRoutes:
    """Admin routes of the live state.

    A caller that may read metrics may see the live state; only administrators see tenants and refused callers.

    Args:
        admin: The parts that admin routes share.
        live: The service of the live state.
    """

    def __init__(self, admin: DirectoryAdmin, live: LiveService) -> None:
        self._admin = admin
        self._live = live
        self._encoded: dict[bool, tuple[LiveBody, bytes]] = {}

    def routes(self) -> list[Route]:
        """Returns the route of the live state."""
        text = "What the gateway does now; as an event stream, every second."
        return [
            Route("GET", "/admin/v1/live", self.live, text, returns=LiveBody, streams=LiveBody, needs=Scope.METRICS)
        ]

    async def live(self, exchange: HttpExchange) -> None:
        """Answers with the state in the format of `Accept`; a stream of it ends when the server drains."""
        whole = Scope.ADMIN in exchange.principal.scopes
        if "text/event-stream" not in (exchange.header(b"accept") or ""):
            await self._admin.reply(exchange, _visible_state(await self._live.snapshot(), whole=whole))
            return
        with self._live.watching(exchange.principal.key, is_operator=whole) as states:
            with CancelScope() as block, exchange.cancel_on_disconnect(block):
                await exchange.stream(encode_event(msgspec.json.encode(self._live.history()), b"history"))
                async for state in states:
                    if state.draining:
                        break
                    if not self._admin.holds(exchange.principal):
                        raise Unauthenticated("This API key was revoked, or has expired.")
                    await exchange.stream(self._event(state, whole=whole))
            await exchange.finish()

    def _event(self, state: LiveBody, *, whole: bool) -> bytes:
        """Returns the state as an event, which is encoded once for all viewers with the same rights."""
        known = self._encoded.get(whole)
        if known is None or known[0] is not state:
            known = state, encode_event(msgspec.json.encode(_visible_state(state, whole=whole)), b"state")
            self._encoded[whole] = known
        return known[1]


def _visible_state(state: LiveBody, *, whole: bool) -> LiveBody:
    """Returns the state without the parts that only administrators may see, unless the viewer is one."""
    if whole:
        return state
    return replace(
        state,
        tenants=[],
        refusals=[replace(refusal, tenant="", request_id="", message="") for refusal in state.refusals],
        # Findings about callers at their limits show only the number of callers, because the rest of their evidence
        # names tenants.
        findings=state.findings
        and [
            replace(finding, where="", evidence=finding.evidence[:1]) if finding.kind == "limits" else finding
            for finding in state.findings
        ],
        queues=[replace(queue, tenants=[]) for queue in state.queues],
        engines=[replace(engine, held=[]) for engine in state.engines],
    )
