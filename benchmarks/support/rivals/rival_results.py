"""What came of comparing with rivals, part by part: one file that grows, and the bars over all of it.

A whole comparison takes the better part of an hour of a machine that does nothing else. So it can be made in parts:
some workloads, some precisions, some rivals. What a part measures replaces what the file had of the same workload,
precision and rival; everything else stays, unless it was measured on another processor. Each entry holds our own rates
of the same run beside a rival's, so its ratios never mix two runs.
"""

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.report import RESULTS, Report, machine

START = "start"
SHARED_OVER_BEST, INT8_OVER_BEST = 1.5, 1.0
FP32_OVER = {"vllm": 1.2, "openvino": 0.95}


class Results:
    """The figures of a report, with those of earlier parts.

    Args:
        report: Gets all figures, and in the end the bars.
        kept: Of earlier parts.
    """

    def __init__(self, report: Report, kept: dict[str, Any]) -> None:
        self._report = report
        self._measured = {"started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "commit": report.commit}
        report.figures |= {"how": {}, "failed": {}, "workloads": {}} | kept

    def ready(self, rival: str, precision: str, how: str) -> None:
        """A rival has started: how it is run, in words."""
        self._report.figures["how"].setdefault(rival, {})[precision] = how
        self._report.figures["failed"].pop(f"{rival} {precision} {START}", None)

    def failed(self, rival: str, precision: str, what: str, why: str) -> None:
        """It did not answer a workload, or did not even `START`."""
        self._report.figures["failed"][f"{rival} {precision} {what}"] = why

    def note(
        self,
        workload: str,
        precision: str,
        shape: Mapping[str, int],
        rival: str,
        own: Sequence[float],
        rates: Sequence[float],
    ) -> None:
        """Puts a rival's entry in, and writes the file.

        Args:
            workload: Its name.
            precision: The class.
            shape: Of the workload.
            rival: Whose.
            own: Our tokens per second around each of its turns: the mean of a round.
            rates: Its own, one for each round.
        """
        entry = self._report.figures["workloads"].setdefault(f"{workload} {precision}", {**shape, "rivals": {}})
        entry["rivals"][rival] = {
            "tokens_per_s": [round(rate, 1) for rate in rates],
            "ours": [round(rate, 1) for rate in own],
            "ours_over": [round(mine / rate, 3) for mine, rate in zip(own, rates, strict=True)],
            **self._measured,
        }
        self._report.figures["failed"].pop(f"{rival} {precision} {workload}", None)
        self._report.write()

    def finish(self) -> int:
        """Holds everything that the file has against its bars; the exit code."""
        for key, entry in sorted(self._report.figures["workloads"].items()):
            ratios = {name: statistics.median(one["ours_over"]) for name, one in entry["rivals"].items()}
            best = min(ratios, key=lambda name: ratios[name])
            if entry["shared_tokens"]:
                self._report.require(f"{key}: ours over the best, {best}", ratios[best], at_least=SHARED_OVER_BEST)
            if key.endswith("int8"):
                self._report.require(f"{key}: ours over the best, {best}", ratios[best], at_least=INT8_OVER_BEST)
                continue
            for name in FP32_OVER.keys() & ratios:
                self._report.require(f"{key}: ours over {name}", ratios[name], at_least=FP32_OVER[name])
        return self._report.finish()


WIDE, NARROW = "rivals", "rivals_avx2"
"""Result files: of processors with AVX-512, and of those without."""


def result_name() -> str:
    """Of the result file that this processor's figures belong to."""
    return WIDE if " avx512f " in Path("/proc/cpuinfo").read_text() else NARROW


def kept_figures(name: str) -> dict[str, Any]:
    """Of the result file, if there is one of this processor."""
    path = RESULTS / f"{name}.json"
    kept = json.loads(path.read_text()) if path.exists() else {"machine": {}}
    here = machine()
    if any(kept["machine"].get(part) != here[part] for part in ("cpu", "cores")):
        return {}
    figures: dict[str, Any] = kept["figures"]
    return figures
