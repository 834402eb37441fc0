"""How every benchmark ends: a result file that can be traced back, figures beside their bars, an honest exit code."""

import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True)
class Bar:
    """A figure that was promised, and what was measured."""

    name: str
    measured: float
    bound: float
    at_least: bool
    """Whether the bound is a least or a most."""

    @property
    def met(self) -> bool:
        """Whether the measurement keeps the promise."""
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        return f"{self.name} {self.measured:.4g} ({sign} {self.bound:g}: {'met' if self.met else 'MISSED'})"


def load_result(name: str) -> dict[str, Any]:
    """Returns the result file of a benchmark."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def bar_of(result: dict[str, Any], words: str) -> float:
    """Returns what was measured for the first bar with these words."""
    return next(float(bar["measured"]) for bar in result["bars"] if words in bar["name"])


class Report:
    """Collects the figures of one benchmark run.

    Args:
        name: Of the benchmark; the result file is ``benchmarks/results/<name>.json``.
        seed: That the workload was made with.
        quick: Bounded run for checking that the benchmark works; written beside the full one, never over it.

    Attributes:
        path: Of the result file.
    """

    def __init__(self, name: str, *, seed: int, quick: bool) -> None:
        self.quick = quick
        self.path = RESULTS / (f"{name}.quick.json" if quick else f"{name}.json")
        self._started_s = time.time()
        self.bars: list[Bar] = []
        self.figures: dict[str, Any] = {}
        self.commit = _commit()
        self._head = {
            "benchmark": name,
            "quick": quick,
            "command": " ".join(["python -m benchmarks", Path(sys.argv[0]).stem, *sys.argv[1:]]),
            "commit": self.commit,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started_s)),
            "seed": seed,
            "machine": machine(),
        }

    def require(
        self, name: str, measured: float, *, at_least: float | None = None, at_most: float | None = None
    ) -> None:
        """Holds a figure against its bar."""
        bound = at_least if at_least is not None else at_most
        assert bound is not None, "a bar needs a bound"
        self.bars.append(Bar(name, measured, bound, at_least is not None))

    def write(self) -> None:
        """Writes the result file as far as it is known; for a run so long that it may not come to its end."""
        result = {
            **self._head,
            "seconds": round(time.time() - self._started_s, 1),
            "bars": [{"name": b.name, "measured": b.measured, "bound": b.bound, "met": b.met} for b in self.bars],
            "figures": self.figures,
        }
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")

    def finish(self) -> int:
        """Writes the result file, prints the last line, and returns the exit code: 0 when every bar is met."""
        self.write()
        print(f"written: {self.path}")
        print("; ".join(map(str, self.bars)) or "no bars")
        return 0 if all(bar.met for bar in self.bars) else 1


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory_bytes = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def percentiles(values: list[float]) -> dict[str, float]:
    """p50, p95 and p99 by nearest rank, and the mean."""
    ordered = sorted(values)
    if not ordered:
        return {}
    pick = {f"p{p}": ordered[min(len(ordered) - 1, int(len(ordered) * p / 100))] for p in (50, 95, 99)}
    return {**{name: round(value, 5) for name, value in pick.items()}, "mean": round(sum(ordered) / len(ordered), 5)}


def _commit() -> str:
    """What is measured: with `-dirty` behind it if files differ from the commit, be it not results of other runs."""
    try:
        name = _git("describe", "--always")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name}-dirty" if changed else name


def _git(*arguments: str) -> str:
    root = Path(__file__).parents[2]
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
