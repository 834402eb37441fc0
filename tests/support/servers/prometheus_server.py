"""A real Prometheus of a test's own; see `maitred.testing.prometheus_server`."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from maitred.testing import prometheus_server as real
from maitred.testing.prometheus_server import PrometheusServer
from maitred.testing.server_process import ProgramMissing
from tests.support.programs import do_without, entered

DEPLOYED = Path(__file__).parents[3] / "deploy" / "prometheus"


@contextmanager
def prometheus_server(target: str) -> Iterator[PrometheusServer]:
    """A server with the rules that come along, looking at another one."""
    with ExitStack() as stack:
        yield entered(stack, real.prometheus_server(target, sorted((DEPLOYED / "rules").glob("*.yml"))))


def promtool() -> str:
    """The program that checks rules."""
    try:
        return real.promtool()
    except ProgramMissing as missing:
        do_without(missing)
