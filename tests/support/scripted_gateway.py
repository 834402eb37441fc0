"""`maitred serve` with a scripted engine in place of the real one: ``python -m tests.support.scripted_gateway``."""

import argparse
import os
import sys
from pathlib import Path

from maitred.app.models import upstreams
from maitred.app.start import run
from maitred.app.workers import controller_client
from maitred.config.loader import LoadedConfig, load


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--script", default="{}")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--port", default="0")
    parser.add_argument("--controller-wait-s", type=float, help="how long a controller is waited for, and its probes")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    overrides: dict[str, object] = {"server.port": arguments.port}
    overrides |= dict(assignment.split("=", 1) for assignment in arguments.set)

    if arguments.controller_wait_s is not None:
        # How fast a machine starts a controller, and has its first probes answered, is no matter of a test.
        controller_client._CONNECT_TIMEOUT_S = controller_client._RECONNECT_TIMEOUT_S = arguments.controller_wait_s
        upstreams._FIRST_PROBE_TIMEOUT_S = arguments.controller_wait_s

    def command(address: str) -> list[str]:
        engine = [sys.executable, "-m", "maitred.testing.scripted_engine"]
        return [*engine, "--listen", address, "--script", arguments.script]

    def read() -> LoadedConfig:
        return load(arguments.config, os.environ, overrides)

    return run(read(), command, read=read)


if __name__ == "__main__":
    sys.exit(main())
