"""Health probe of an upstream: periodically checks whether the server is up, and reads its load.

    GET its health path -> 200: up. Anything else, or nothing in time: down. GET its metrics, if it is up -> its load.
    On an error the last load is kept.

The first successful probe also fetches the model list, in which most servers report their context length.
"""

import asyncio
import logging
from contextlib import suppress

import msgspec

from maitred.core.errors import ReplicaLost, ReplicaUnavailable
from maitred.replica.http.connection import ResponseBroken
from maitred.replica.upstream.dialects import LoadGauges
from maitred.replica.upstream.errors import failure_details
from maitred.replica.upstream.external_load import ScrapedLoad, parse_load
from maitred.replica.upstream.replica import UpstreamReplica

log = logging.getLogger(__name__)

_DOWN_INTERVAL_S = 1.0
"""Longest interval between the probes of a server that is down."""
_MAX_BODY_BYTES = 4 << 20
_CONTEXT_LENGTH_FIELDS = ("max_model_len", "context_length", "context_window", "max_context_length", "max_input_tokens")
"""Fields of a model list entry that contain the context length.

The first is used by vLLM, SGLang and maitred, the second by Together, the third by Groq. llama.cpp reports it as
`meta.n_ctx`, the context length of one request; `n_ctx_train` is that of the training.
"""


class HealthProbe:
    """Health probe of one upstream.

    Args:
        upstream: The probed upstream.
    """

    def __init__(self, upstream: UpstreamReplica) -> None:
        self._upstream = upstream
        self._context_length_fetched = False

    async def run(self) -> None:
        """Probes the server at its interval until the task is cancelled."""
        config, upstream_status = self._upstream.config, self._upstream.status
        while True:
            await self.probe_once()
            await asyncio.sleep(
                config.probe_every_s if upstream_status.is_up else min(config.probe_every_s, _DOWN_INTERVAL_S)
            )

    async def probe_once(self) -> None:
        """Probes the server once and updates the upstream's status and load."""
        upstream = self._upstream
        upstream_status, was_up, reason = upstream.status, upstream.status.is_up, upstream.status.reason
        try:
            async with asyncio.timeout(upstream.config.probe_timeout_s):
                async with self._upstream.get(upstream.dialect.health_path) as response:
                    status = response.status
                if status == 200 and not self._context_length_fetched:
                    await self._fetch_context_length()
        except TimeoutError:
            upstream_status.mark_down(f"nothing within {upstream.config.probe_timeout_s:g} s")
        except (ReplicaUnavailable, ReplicaLost) as error:
            upstream_status.mark_down(failure_details(error))
        except ResponseBroken as error:
            upstream_status.mark_down(f"it broke off ({error})")
        else:
            if status == 200:
                upstream_status.mark_up()
            elif status in (401, 403):
                upstream_status.mark_down(f"it does not accept our credential ({status})")
            else:
                upstream_status.mark_down(f"it answers {status}")
        if not upstream_status.is_up and (was_up or upstream_status.reason != reason):
            log.error("The upstream %s is away: %s.", upstream.name, upstream_status.reason)
        elif upstream_status.is_up and not was_up:
            log.info("The upstream %s is up.", upstream.name)
        if upstream_status.is_up and upstream.dialect.load_gauges is not None:
            await self._update_load(upstream.dialect.load_gauges)

    async def _update_load(self, gauges: LoadGauges) -> None:
        """Fetches the server's load and reports it to the upstream.

        An error is ignored: the last known load is kept, and its weight decreases with its age.
        """
        config = self._upstream.config
        failures = (TimeoutError, ReplicaUnavailable, ReplicaLost, ResponseBroken)
        with suppress(*failures):
            async with asyncio.timeout(min(config.probe_timeout_s, config.probe_every_s)):
                self._upstream.on_load_scraped(await self._fetch_load(gauges))

    async def _fetch_context_length(self) -> None:
        """Fetches the context length from the model list. It is no error if the list does not have it."""
        async with self._upstream.get("models") as response:
            body = await response.read_body(_MAX_BODY_BYTES) if response.status == 200 else b""
        self._context_length_fetched = True
        try:
            fields = msgspec.json.decode(body)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return
        self._upstream.reported_context_tokens = parse_context_length(fields, self._upstream.server_model)

    async def _fetch_load(self, gauges: LoadGauges) -> ScrapedLoad:
        """Fetches the load; an empty one if the server's metrics are disabled."""
        async with self._upstream.get(gauges.path) as response:
            body = await response.read_body(_MAX_BODY_BYTES) if response.status == 200 else b""
        return parse_load(body.decode("utf-8", "replace"), gauges)


def parse_context_length(fields: object, model: str) -> int | None:
    """Returns the context length of a model from a model list; None if the list does not have it."""
    entries = fields.get("data") if isinstance(fields, dict) else fields
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("id") == model:
            meta = entry.get("meta")
            values = [
                *(entry.get(name) for name in _CONTEXT_LENGTH_FIELDS),
                meta.get("n_ctx") if isinstance(meta, dict) else None,
            ]
            return next((value for value in values if isinstance(value, int) and value > 0), None)
    return None
