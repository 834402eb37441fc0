"""``python -m benchmarks.support.ray.cluster``: a Ray cluster of two nodes on this machine, until standard input ends.

It prints a line with what others need to know of it. Ray runs in a process of its own, because it changes the process
that it runs in: signals, threads, the log.
"""

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile, mkdtemp
from typing import IO

from maitred.testing.server_process import free_port

NODES = 2
CPUS = 4
_ROOT = Path(__file__).parents[3]
"""Folder of this repository, from which Ray's processes import."""
_STORE_BYTES = 80 << 20
_REQUESTS = re.compile(
    r"ray_serve_deployment_processing_latency_ms_count\{.*application=\"(?P<application>[^\"]*)\".*\} (?P<count>\S+)"
)
"""Sample of the histogram to which each replica adds each request that came through a handle."""


@dataclass(frozen=True)
class RayCluster:
    """A running cluster.

    Attributes:
        dashboard: Address of its dashboard.
        token: Token that the dashboard asks for.
        secret: Secret of the engines on it, which they have in `MAITRED_LINK_SECRET`.
        metrics: Addresses at which its nodes show metrics.
        pid: Process that has started it.
    """

    dashboard: str
    token: str
    secret: str
    metrics: list[str]
    pid: int

    def handle_requests(self) -> Counter[str]:
        """Counts the requests that Serve's replicas have taken, by application; some seconds late."""
        requests: Counter[str] = Counter()
        for address in self.metrics:
            with urllib.request.urlopen(f"{address}/metrics", timeout=60) as response:
                for line in response.read().decode().splitlines():
                    if counted := _REQUESTS.match(line):
                        requests[counted["application"]] += int(float(counted["count"]))
        return requests


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """Runs a cluster of two nodes, with a token, in processes of their own."""
    token, secret = secrets.token_hex(32), secrets.token_hex(16)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_ROOT), str(_ROOT / "src")]),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "MAITRED_LINK_SECRET": secret,
    }
    with TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.support.ray.cluster"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        yield from _while_it_runs(process, errors, token, secret)


def _while_it_runs(
    process: "subprocess.Popen[bytes]", errors: IO[bytes], token: str, secret: str
) -> Iterator[RayCluster]:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith(b"{"):
                yield RayCluster(token=token, secret=secret, pid=process.pid, **json.loads(line))
                return
        errors.seek(0)
        raise RuntimeError(f"The Ray cluster did not start: {errors.read().decode(errors='replace')}")
    finally:
        process.stdin.close()
        process.wait(timeout=300)
        process.stdout.close()


def main() -> None:
    """Starts the cluster, says where it is, and stops it when standard input ends."""
    import ray
    from ray._private.utils import get_ray_address_file
    from ray.cluster_utils import Cluster

    folder = mkdtemp(prefix="ray-")
    # Ray writes an address here, whatever its own folder is.
    Path(get_ray_address_file(None)).parent.mkdir(exist_ok=True)
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "gcs_server_port": free_port(),
            "num_cpus": CPUS,
            "include_dashboard": True,
            "dashboard_host": "127.0.0.1",
            "dashboard_port": free_port(),
            "object_store_memory": _STORE_BYTES,
            "temp_dir": folder,
        },
    )
    for _ in range(NODES - 1):
        cluster.add_node(num_cpus=CPUS, object_store_memory=_STORE_BYTES)
    context = ray.init(address=cluster.address, log_to_driver=False)
    nodes = ray.nodes()
    facts = {
        "dashboard": f"http://{context.dashboard_url}",
        "metrics": [f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in nodes],
    }
    print(json.dumps(facts), flush=True)
    try:
        sys.stdin.read()
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
