"""Looks at a server now and then: is it there, and how long may prompts be?

    GET its health path -> 200: up. Anything else, or nothing in time: down.
    GET its metrics, if it is up -> its load. Anything else: no news of it.

The first look also asks for the list of models, where most servers tell the length of their window.
"""

import asyncio
import logging
from contextlib import suppress

import msgspec

from maitred.core.errors import ReplicaLost, ReplicaUnavailable
from maitred.replica.http.connection import ResponseBroken
from maitred.replica.upstream.dialects import LoadGauges
from maitred.replica.upstream.external_load import ServerLoad, load_in
from maitred.replica.upstream.openai_stream import how_broken
from maitred.replica.upstream.replica import UpstreamReplica

log = logging.getLogger(__name__)

_DOWN_EVERY_S = 1.0
"""A server that is down is looked at so often, or as often as configured if that is more."""
_MOST_BYTES = 4 << 20
_WINDOW_NAMES = ("max_model_len", "context_length", "context_window", "max_context_length", "max_input_tokens")
"""What servers call it in the entry of a model: vLLM, SGLang and maitred the first; Together, Groq the next. llama.cpp
has it as `n_ctx` of `meta`: what one request may have, not what it was trained with."""


class Probe:
    """Of one server.

    Args:
        upstream: The server.
    """

    def __init__(self, upstream: UpstreamReplica) -> None:
        self._upstream = upstream
        self._asked_window = False

    async def run(self) -> None:
        """Looks until it is cancelled."""
        config, standing = self._upstream.config, self._upstream.status
        while True:
            await self.check()
            await asyncio.sleep(config.probe_every_s if standing.up else min(config.probe_every_s, _DOWN_EVERY_S))

    async def check(self) -> None:
        """One look; what was seen is in the upstream's standing."""
        upstream = self._upstream
        standing, was_up, reason = upstream.status, upstream.status.up, upstream.status.reason
        try:
            async with asyncio.timeout(upstream.config.probe_timeout_s):
                async with self._upstream.get(upstream.dialect.health) as response:
                    status = response.status
                if status == 200 and not self._asked_window:
                    await self._ask_window()
        except TimeoutError:
            standing.on_unreachable(f"nothing within {upstream.config.probe_timeout_s:g} s")
        except (ReplicaUnavailable, ReplicaLost) as error:
            standing.on_unreachable(how_broken(error))
        except ResponseBroken as error:
            standing.on_unreachable(f"it broke off ({error})")
        else:
            if status == 200:
                standing.on_probe_success()
            elif status in (401, 403):
                standing.on_unreachable(f"it does not accept our credential ({status})")
            else:
                standing.on_unreachable(f"it answers {status}")
        if not standing.up and (was_up or standing.reason != reason):
            log.error("The upstream %s is away: %s.", upstream.name, standing.reason)
        elif standing.up and not was_up:
            log.info("The upstream %s is up.", upstream.name)
        if standing.up and upstream.dialect.gauges is not None:
            await self._update_load(upstream.dialect.gauges)

    async def _update_load(self, gauges: LoadGauges) -> None:
        """Its load. Not to be told is no fault: what was told before grows old, and weighs less and less."""
        config = self._upstream.config
        broken = (TimeoutError, ReplicaUnavailable, ReplicaLost, ResponseBroken)
        with suppress(*broken):
            async with asyncio.timeout(min(config.probe_timeout_s, config.probe_every_s)):
                self._upstream.on_load_report(await self._ask_load(gauges))

    async def _ask_window(self) -> None:
        """The window, if the list of models has it. Not to know it is no fault."""
        async with self._upstream.get("models") as response:
            body = await response.body(_MOST_BYTES) if response.status == 200 else b""
        self._asked_window = True
        try:
            fields = msgspec.json.decode(body)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return
        self._upstream.window_tokens = window_in(fields, self._upstream.model)

    async def _ask_load(self, gauges: LoadGauges) -> ServerLoad:
        """What it says of its load; nothing if it does not, which is no fault: metrics can be switched off."""
        async with self._upstream.get(gauges.path) as response:
            body = await response.body(_MOST_BYTES) if response.status == 200 else b""
        return load_in(body.decode("utf-8", "replace"), gauges)


def window_in(fields: object, model: str) -> int | None:
    """The context window of a model in a list of models; None if it is not there."""
    entries = fields.get("data") if isinstance(fields, dict) else fields
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("id") == model:
            meta = entry.get("meta")
            named = [
                *(entry.get(name) for name in _WINDOW_NAMES),
                meta.get("n_ctx") if isinstance(meta, dict) else None,
            ]
            return next((value for value in named if isinstance(value, int) and value > 0), None)
    return None
