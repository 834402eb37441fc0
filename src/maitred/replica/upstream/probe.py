"""Health probe of an upstream: checks now and then whether the server is up, and how long prompts may be.

    GET its health path -> 200: up. Anything else, or nothing in time: down.
    GET its metrics, if it is up -> its load. Anything else: no news of its load.

The first successful probe also asks for the list of models, where most servers name the length of their context window.
"""

import asyncio
import logging
from contextlib import suppress

import msgspec

from maitred.core.errors import ReplicaLost, ReplicaUnavailable
from maitred.replica.http.connection import ResponseBroken
from maitred.replica.upstream.dialects import LoadGauges
from maitred.replica.upstream.external_load import ServerLoad, parse_load
from maitred.replica.upstream.openai_stream import failure_details
from maitred.replica.upstream.replica import UpstreamReplica

log = logging.getLogger(__name__)

_DOWN_INTERVAL_S = 1.0
"""Interval between probes of a server that is down, unless the configured one is shorter."""
_MAX_BODY_BYTES = 4 << 20
_WINDOW_FIELDS = ("max_model_len", "context_length", "context_window", "max_context_length", "max_input_tokens")
"""Names of the context window in the entry of a model.

The first is that of vLLM, SGLang and maitred; the next ones are those of Together and Groq. llama.cpp has it as `n_ctx`
of `meta`: the window of one request, not the one of its training.
"""


class HealthProbe:
    """Health probe of one upstream.

    Args:
        upstream: The server.
    """

    def __init__(self, upstream: UpstreamReplica) -> None:
        self._upstream = upstream
        self._window_fetched = False

    async def run(self) -> None:
        """Probes the server at its interval until the task is cancelled."""
        config, upstream_status = self._upstream.config, self._upstream.status
        while True:
            await self.check()
            await asyncio.sleep(
                config.probe_every_s if upstream_status.is_up else min(config.probe_every_s, _DOWN_INTERVAL_S)
            )

    async def check(self) -> None:
        """Probes the server once and writes the result into the upstream's status."""
        upstream = self._upstream
        upstream_status, was_up, reason = upstream.status, upstream.status.is_up, upstream.status.reason
        try:
            async with asyncio.timeout(upstream.config.probe_timeout_s):
                async with self._upstream.get(upstream.dialect.health_path) as response:
                    status = response.status
                if status == 200 and not self._window_fetched:
                    await self._fetch_window()
        except TimeoutError:
            upstream_status.on_unreachable(f"nothing within {upstream.config.probe_timeout_s:g} s")
        except (ReplicaUnavailable, ReplicaLost) as error:
            upstream_status.on_unreachable(failure_details(error))
        except ResponseBroken as error:
            upstream_status.on_unreachable(f"it broke off ({error})")
        else:
            if status == 200:
                upstream_status.on_probe_success()
            elif status in (401, 403):
                upstream_status.on_unreachable(f"it does not accept our credential ({status})")
            else:
                upstream_status.on_unreachable(f"it answers {status}")
        if not upstream_status.is_up and (was_up or upstream_status.reason != reason):
            log.error("The upstream %s is away: %s.", upstream.name, upstream_status.reason)
        elif upstream_status.is_up and not was_up:
            log.info("The upstream %s is up.", upstream.name)
        if upstream_status.is_up and upstream.dialect.load_gauges is not None:
            await self._update_load(upstream.dialect.load_gauges)

    async def _update_load(self, gauges: LoadGauges) -> None:
        """Updates the server's load.

        A load that cannot be read is no fault: the last known one grows old, and weighs less and less.
        """
        config = self._upstream.config
        failures = (TimeoutError, ReplicaUnavailable, ReplicaLost, ResponseBroken)
        with suppress(*failures):
            async with asyncio.timeout(min(config.probe_timeout_s, config.probe_every_s)):
                self._upstream.on_load_report(await self._fetch_load(gauges))

    async def _fetch_window(self) -> None:
        """Fetches the context window, if the list of models has it. An unknown window is no fault."""
        async with self._upstream.get("models") as response:
            body = await response.read_body(_MAX_BODY_BYTES) if response.status == 200 else b""
        self._window_fetched = True
        try:
            fields = msgspec.json.decode(body)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return
        self._upstream.window_tokens = parse_window(fields, self._upstream.model)

    async def _fetch_load(self, gauges: LoadGauges) -> ServerLoad:
        """Fetches the load; an empty one if the server reports none, which is no fault: metrics can be switched off."""
        async with self._upstream.get(gauges.path) as response:
            body = await response.read_body(_MAX_BODY_BYTES) if response.status == 200 else b""
        return parse_load(body.decode("utf-8", "replace"), gauges)


def parse_window(fields: object, model: str) -> int | None:
    """Parses the context window of a model in a list of models; None if it is not there."""
    entries = fields.get("data") if isinstance(fields, dict) else fields
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("id") == model:
            meta = entry.get("meta")
            values = [
                *(entry.get(name) for name in _WINDOW_FIELDS),
                meta.get("n_ctx") if isinstance(meta, dict) else None,
            ]
            return next((value for value in values if isinstance(value, int) and value > 0), None)
    return None
