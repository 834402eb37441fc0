"""Reload of the configuration while the gateway runs: it is applied as a whole or not at all.

SIGHUP, POST /admin/v1/config/reload -> read -> compare -> check -> apply
`--------`--------`--> refused: the configuration stays as it was
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
"""Applies a configuration; if it raises MaitredError, it has changed nothing."""


class Reloader:
    """Holds the current configuration and reloads it. Implements `maitred.api.admin.service.ConfigService`.

    Args:
        loaded: The configuration that the gateway was started with.
        read: Reads the configuration again. It may read files, so it is called in a thread.
        clock: The clock.
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
        """Sets the function that applies a configuration. Until this call, no configuration is applied."""
        self._apply = apply

    @property
    def state(self) -> ReloadState:
        """State of the reloads, for metrics."""
        return ReloadState(
            outcomes=dict(self._ends),
            last_successful=self._fault is None,
            since_s=self._since_s,
            last_duration_s=self._took_s,
            pending=len(self._pending),
        )

    def running(self) -> ConfigBody:
        """Returns the configuration that is in force."""
        return ConfigBody(
            since=self._since_s,
            settings=to_yaml(self._loaded, with_origins=True),
            needs_restart=_bodies(self._pending),
            fault=self._fault,
        )

    async def reload(self, *, dry_run: bool = False) -> ReloadBody:
        """Reads the configuration again and applies it; with `dry_run`, only returns what would change.

        Raises:
            InvalidRequest: The configuration has faults, and the message lists all of them. The current configuration
                stays in force.
            StoreUnavailable: The declared tenants or rollouts cannot be stored. The current configuration stays in
                force.
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
        """Reloads after a signal: no caller waits for an answer, so the result is logged."""
        try:
            await self.reload()
        except MaitredError:
            pass  # the failure has been logged
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
