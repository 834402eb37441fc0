"""Keeps the directory as new as the store that it comes from.

A gateway asks a few times a second what has changed, so a revoked key is refused everywhere within a second. While the
store is away the gateway goes on with what it knows, and says how old that is. Knowledge that is too old is no longer
used: a key that was revoked in the meantime must not work for ever.
"""

import asyncio
import logging
from collections.abc import Callable

from maitred.core.clock import Clock
from maitred.core.errors import StoreUnavailable
from maitred.core.tenancy import DirectorySource
from maitred.identity.directory import Directory

log = logging.getLogger(__name__)

_POLL_TIMEOUT_S = 5.0
"""A store that does not answer is as good as one that is away."""


class DirectoryRefresher:
    """Brings changes from their source into the directory.

    Args:
        source: Where the directory is kept.
        directory: What is kept as new as the source.
        clock: For the age.
        every_s: Time between two questions. Changes take effect within this time and what one question takes.
        max_stale_s: Oldest knowledge that is used.
    """

    def __init__(
        self,
        source: DirectorySource,
        directory: Directory,
        clock: Clock,
        *,
        every_s: float = 0.3,
        max_stale_s: float = 3600.0,
    ) -> None:
        self._source = source
        self._directory = directory
        self._clock = clock
        self._every_s = every_s
        self._max_stale_s = max_stale_s
        self._as_of_s: float | None = None
        self._away = False
        self._listeners: list[Callable[[], object]] = []
        # Two answers at once could be applied in the wrong order, and bring a revoked key back for a moment.
        self._one_at_a_time = asyncio.Lock()

    def reconfigure(self, every_s: float, max_stale_s: float) -> None:
        """Goes by these from now on."""
        self._every_s = every_s
        self._max_stale_s = max_stale_s

    @property
    def age_s(self) -> float:
        """How old the directory may be: nothing that changed before that is missing. Infinite before it is loaded."""
        return float("inf") if self._as_of_s is None else self._clock.monotonic_s() - self._as_of_s

    @property
    def away(self) -> bool:
        """Whether the source could not be read when it was last asked."""
        return self._away

    def watch(self, listener: Callable[[], object]) -> None:
        """Has a function called whenever the source was asked: keys may have been revoked since, or have expired."""
        self._listeners.append(listener)

    def check(self) -> None:
        """Raises StoreUnavailable if the directory is too old to be used."""
        if self._as_of_s is None or self._clock.monotonic_s() - self._as_of_s > self._max_stale_s:
            raise StoreUnavailable(
                "Keys cannot be checked now: the store that keeps them has been away for too long. Try again shortly.",
                retry_after_s=max(1.0, self._every_s),
            )

    async def load(self) -> None:
        """Reads everything that is new; admin routes call it too, to see what they have just changed.

        Raises:
            StoreUnavailable: The source cannot be read now. The directory is what it was.
        """
        async with self._one_at_a_time:
            # What changes while the source answers may be missing, so the answer is as old as the question.
            asked_s = self._clock.monotonic_s()
            try:
                await self._read()
            except StoreUnavailable:
                self._away = True
                raise
            self._as_of_s = asked_s
            self._away = False

    async def run(self) -> None:
        """Asks until it is cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            was_away = self._away
            try:
                await self.load()
            except StoreUnavailable as error:
                if not was_away:
                    cause = str(error.__cause__ or "").strip().partition("\n")[0]
                    log.warning("Keys and limits are kept as they were %.1f s ago: %s", self.age_s, cause or error)
            except Exception:
                # Without this task revocations would stop unnoticed; the age tells of a fault that stays.
                if not was_away:
                    log.exception("Keys and limits are kept as they were %.1f s ago.", self.age_s)
                self._away = True
            else:
                if was_away:
                    log.info("Keys and limits are up to date again.")
            for listener in self._listeners:
                listener()

    async def _read(self) -> None:
        since = self._directory.version
        try:
            async with asyncio.timeout(_POLL_TIMEOUT_S):
                changes = await self._source.changes(since)
                if changes.version < since:
                    # An older store than the one we know, such as one restored from a backup.
                    self._directory.replace(await self._source.changes(0))
                elif changes.version > since:
                    self._directory.apply(changes)
        except TimeoutError:
            raise StoreUnavailable(f"The store did not answer within {_POLL_TIMEOUT_S:.0f} s.") from None
