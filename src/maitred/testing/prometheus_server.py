"""Prometheus for a test: it scrapes one server once a second, and evaluates the given rules."""

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from maitred.testing.server_process import ProgramMissing, free_port

START_S = 300.0
_CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: {rules}
scrape_configs:
  - job_name: maitred
    static_configs: [{{targets: ["{target}"]}}]
"""


class PrometheusServer:
    """Prometheus server that runs.

    Args:
        url: Address that it listens at, without a trailing slash.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Returns the value of an expression now: one object with ``metric`` and ``value`` for each series.

        Raises:
            ValueError: The text is not an expression; the message is Prometheus' own.
        """
        found: list[dict[str, Any]] = self._get("query", query=expression)["result"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        """Returns every rule with its health and, for an alert, its state."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def targets(self) -> list[dict[str, Any]]:
        """Returns the scraped targets, with the result of each scrape."""
        active: list[dict[str, Any]] = self._get("targets")["activeTargets"]
        return active

    def families(self) -> set[str]:
        """Returns the names of all scraped metrics, including those without a value."""
        return set(self._get("metadata"))

    def _get(self, path: str, **parameters: str) -> dict[str, Any]:
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(address, timeout=300) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error)["error"]) from None
        data: dict[str, Any] = answer["data"]
        return data


def promtool() -> str:
    """Returns the path of the program that checks rules.

    Raises:
        ProgramMissing: Prometheus is not installed.
    """
    return _program("promtool")


@contextmanager
def prometheus_server(target: str, rules: Sequence[Path]) -> Iterator[PrometheusServer]:
    """Runs a Prometheus server that scrapes another server.

    Args:
        target: Host and port of the scraped server.
        rules: Rule files.

    Raises:
        ProgramMissing: Prometheus is not installed.
    """
    program = _program("prometheus")
    with TemporaryDirectory(prefix="prometheus-") as folder:
        config, log = Path(folder) / "prometheus.yml", Path(folder) / "log"
        config.write_text(_CONFIG.format(rules=json.dumps([str(path.resolve()) for path in rules]), target=target))
        server = PrometheusServer(f"http://127.0.0.1:{free_port()}")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    program,
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder}/data",
                    f"--web.listen-address={server.url.removeprefix('http://')}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            _wait_until_ready(server, process, log)
            yield server
        finally:
            process.terminate()
            process.wait()


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise ProgramMissing(f"{name} is not installed; scripts/services.sh installs what is needed.")
    return path


def _wait_until_ready(server: PrometheusServer, process: "subprocess.Popen[bytes]", log: Path) -> None:
    give_up_s = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < give_up_s:
        try:
            with urllib.request.urlopen(f"{server.url}/-/ready", timeout=300):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise RuntimeError(f"Prometheus does not start. It printed:\n{log.read_text()}")
