"""``python -m tests.support.suite.self_description``: writes how it was started, and runs its input."""

import json
import os
import resource
import signal
import sys
from pathlib import Path

import psutil


def describe():
    """What this process can tell of itself."""
    own = psutil.Process()
    open_ones = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    streams = {"stdin": sys.stdin, "stdout": sys.stdout, "stderr": sys.stderr}
    return {
        "argv": sys.argv,
        "original": sys.orig_argv,
        "command": own.cmdline(),
        "environment": dict(os.environ),
        "environment as others see it": own.environ(),
        "name": own.name(),
        "parent": os.getppid(),
        "leads a session": os.getsid(0) == os.getpid(),
        "folder": str(Path.cwd()),
        "modules from": sys.path[0],
        "cores": own.cpu_affinity(),
        "limits": [resource.getrlimit(limit) for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "children": len(own.children()),
        "threads": own.num_threads(),
        "descriptors": sorted(
            each for each in open_ones if Path(f"/proc/self/fd/{each}").exists() and os.get_inheritable(each)
        ),
        "signals": {number: str(signal.getsignal(number)) for number in signal.valid_signals()},
        "streams": {
            name: (each.fileno(), each.encoding, each.errors, each.line_buffering, each.write_through)
            for name, each in streams.items()
        },
    }


if __name__ == "__main__":
    sys.stdout.write(f"{json.dumps(describe())}\n")
    sys.stdout.flush()
    exec(sys.stdin.read())
