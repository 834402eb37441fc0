"""``python -m maitred.cli.local_engine MODEL ADDRESS SETTINGS``: an engine as a gateway starts it.

People start theirs with `maitred engine`, which reads files, variables and flags. This one is told everything, and so
does not wait for a command line to be put together: that would be a tenth of its start.
"""

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from maitred.cli.extras import needing
from maitred.core.errors import CallerError, ConfigInvalid, MaitredError
from maitred.core.flow import ServiceWeights
from maitred.core.parent_watch import follow_parent
from maitred.engine.config import EngineConfig
from maitred.engine.lean_torch import import_lean_torch, wait_briefly_at_barriers
from maitred.fleet.process import EngineArgs
from maitred.observe.config import LogConfig
from maitred.observe.logs import configure_logging
from maitred.wire.link.config import LinkConfig

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: "Sequence[str]") -> int:
    """Runs one engine process.

    Args:
        arguments: The model's folder, where to listen, and the settings as JSON.

    Returns:
        The exit code, as the `maitred` command has them.
    """
    follow_parent()
    model, address, settings = arguments
    try:
        passed = _decode_settings(settings)
        run(Path(model), passed.engine, address, passed.service, passed.link, passed.log, passed.region)
    except MaitredError as error:
        sys.stderr.write(f"{error.message}\n")
        return 2 if isinstance(error, CallerError) else 1
    return 0


def run(
    model: Path,
    config: EngineConfig,
    listen: str,
    weights: ServiceWeights,
    link: LinkConfig | None,
    log: LogConfig,
    region: str | None = None,
) -> None:
    """Runs an engine in this process; see `maitred.engine.process.serve`.

    Raises:
        Unavailable: What the engine needs is not installed.
        ConfigInvalid: The model, the device or the address cannot be had.
    """
    configure_logging(log)
    wait_briefly_at_barriers()
    # Hundreds of thousands of objects come to stay now. To look through them for garbage, again and again while they
    # come, takes a quarter of the start; `serve` goes back to it when it is ready.
    gc.disable()
    try:
        with needing("engine", "The engine"):
            import_lean_torch()
            from maitred.engine.process import serve
        serve(model, config, listen, weights, link, region)
    finally:
        gc.enable()


def _decode_settings(settings: str) -> EngineArgs:
    """The settings as a gateway passes them: whole, and sound already.

    Raises:
        ConfigInvalid: They are not.
    """
    try:
        return EngineArgs.decode(settings)
    except msgspec.MsgspecError as error:
        raise ConfigInvalid(f"The settings that were passed: {error}. Start your own with `maitred engine`.") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
