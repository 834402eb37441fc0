"""Reads the configuration again while the gateway runs, and has it applied as a whole, or not at all.

SIGHUP, POST /admin/v1/config/reload -> read -> compare -> check -> apply
`--------`--------`--> refused: what was in force stays in force
"""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager

from maitred.config.checks import find_conflicts
from maitred.config.comparison import ConfigComparison, SettingChange, compare_configs
from maitred.config.loader import LoadedConfig
from maitred.config.render import to_yaml
from maitred.config.tree import Config
from maitred.core.clock import Clock
from maitred.core.errors import ConfigInvalid, InvalidRequest, MaitredError
from maitred.observe.metrics.reloads import ReloadState
from maitred.wire.admin.responses import ChangeBody, ConfigBody, ReloadBody

log = logging.getLogger(__name__)

Read = Callable[[], LoadedConfig]
"""Reads all layers again; raises ConfigInvalid."""
Apply = Callable[[Config], Awaitable[None]]
"""Puts a configuration in force; raises MaitredError, and has changed nothing then."""


class Reloader:
    """Knows what is in force. Implements `maitred.api.admin.service.ConfigService`.

    Args:
        loaded: What the gateway was started with.
        read: Reads it again. It may read files, so it is called in a thread.
        clock: The time.
    """

    def __init__(self, loaded: LoadedConfig, read: Read, clock: Clock) -> None:
        self._loaded = loaded
        self._read = read
        self._clock = clock
        self._lock = asyncio.Lock()
        self._apply: Apply = _nothing
        self._since_s = clock.wall_s()
        self._pending: tuple[SettingChange, ...] = ()
        self._fault: str | None = None
        self._ends = {"applied": 0, "refused": 0}
        self._took_s = 0.0

    def applies(self, apply: Apply) -> None:
        """Says who puts a configuration in force. Until then nobody does."""
        self._apply = apply

    @property
    def state(self) -> ReloadState:
        """State of the reloads, for metrics."""
        return ReloadState(dict(self._ends), self._fault is None, self._since_s, self._took_s, len(self._pending))

    def running(self) -> ConfigBody:
        """Returns the configuration that is in force."""
        return ConfigBody(
            since=self._since_s,
            settings=to_yaml(self._loaded, with_origins=True),
            needs_restart=_bodies(self._pending),
            fault=self._fault,
        )

    async def reload(self, *, dry_run: bool = False) -> ReloadBody:
        """Reads it again and puts it in force; or says what that would change.

        Raises:
            InvalidRequest: It has faults, all of which the message lists. What was in force stays in force.
            StoreUnavailable: What is declared cannot be stored. What was in force stays in force.
        """
        async with self._lock:
            began_s = self._clock.monotonic_s()
            try:
                read, comparison = await asyncio.to_thread(self._compare)
                if not dry_run and comparison.changes:
                    await self._apply(comparison.config)
            except MaitredError as error:
                if not dry_run:
                    self._reject(error.message)
                if isinstance(error, ConfigInvalid):
                    raise InvalidRequest(f"{error.message}\nThe configuration stays as it was.") from None
                raise
            except Exception:
                if not dry_run:
                    self._reject("the gateway could not apply it; the log says why")
                raise
            took_s = self._clock.monotonic_s() - began_s
            if not dry_run:
                self._apply_changes(read, comparison, took_s)
            return ReloadBody(
                dry_run=dry_run,
                changed=_bodies(comparison.changes),
                needs_restart=_bodies(comparison.pending),
                seconds=round(took_s, 6),
            )

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Reloads at every SIGHUP for as long as the block runs."""
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()

        def on_signal() -> None:
            task = loop.create_task(self._on_signal(), name="reload")
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        loop.add_signal_handler(signal.SIGHUP, on_signal)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGHUP)
            for task in tasks:
                task.cancel()

    async def _on_signal(self) -> None:
        """Reloads after a signal, where nobody waits for an answer: the log says what came of it."""
        try:
            await self.reload()
        except MaitredError:
            pass  # it has been said
        except Exception:
            log.exception("The configuration could not be reloaded.")

    def _compare(self) -> tuple[LoadedConfig, ConfigComparison]:
        """Reads the configuration and compares it with the one in force. Raises ConfigInvalid."""
        read = self._read()
        comparison = compare_configs(self._loaded.config, read.config)
        if comparison.pending:
            faults = [f"  {conflict.keys[0]}: {conflict.message}" for conflict in find_conflicts(comparison.config)]
            if faults:
                pending = ", ".join(change.setting for change in comparison.pending)
                raise ConfigInvalid(
                    "\n".join([f"Without {pending}, which need a restart, the rest does not fit together:", *faults])
                )
        return read, comparison

    def _apply_changes(self, read: LoadedConfig, comparison: ConfigComparison, took_s: float) -> None:
        self._loaded = LoadedConfig(comparison.config, {**self._loaded.origins, **read.origins})
        self._pending, self._fault = comparison.pending, None
        self._since_s, self._took_s = self._clock.wall_s(), took_s
        self._ends["applied"] += 1
        log.info("The configuration was reloaded in %.3f s. Changed: %s.", took_s, _names(comparison.changes))
        for change in comparison.pending:
            log.warning("%s has changed, but needs a restart: %s.", change.setting, change.restart)

    def _reject(self, why: str) -> None:
        self._fault = why
        self._ends["refused"] += 1
        log.error("The configuration was not reloaded, and stays as it was: %s", why)


async def _nothing(config: Config) -> None:
    raise ConfigInvalid("The gateway is still starting. Reload the configuration when it listens.")


def _names(changes: Iterable[SettingChange]) -> str:
    return ", ".join(change.setting for change in changes) or "nothing"


def _bodies(changes: Iterable[SettingChange]) -> list[ChangeBody]:
    return [
        ChangeBody(setting=change.setting, before=change.before, after=change.after, restart=change.restart)
        for change in changes
    ]
