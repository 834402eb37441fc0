"""Result of a run: all measured data, in one JSON file that any other tool can read.

`docs/load-format.md` describes the file field by field. Reports and comparisons need only this file, so they can be
made long after the run.
"""

import os
import platform
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

import maitred as package
from maitred.core.errors import InvalidRequest
from maitred.load import result_file
from maitred.load.measure.columns import RequestColumns, pack_gaps, unpack_gaps
from maitred.load.measure.cost import TesterCost, judge
from maitred.load.measure.record import RunData
from maitred.load.measure.series import TimeSeries, series
from maitred.load.measure.summary import MeasuringWindow, Summary, rate_window, summarise
from maitred.load.measure.times import Flags, Floats, RequestTimes
from maitred.load.spec import LoadSpec, ObjectivesSpec


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Machine that the tester ran on; the target may run on another one."""

    cpu: str
    cores: int
    memory_gib: float
    python: str
    system: str

    @classmethod
    def here(cls) -> "Machine":
        """Describes this machine; unknown values are empty or 0."""
        return cls(
            cpu=_field("/proc/cpuinfo", "model name") or platform.processor(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
            memory_gib=round(int((_field("/proc/meminfo", "MemTotal") or "0").split()[0]) / 2**20, 1),
            python=platform.python_version(),
            system=platform.platform(),
        )


def _field(path: str, name: str) -> str:
    """Returns the first value of a name in a kernel table; empty: there is none."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


FORMAT = "maitred-load/1"
"""Version of the format: changes when an old reader would misread the file, not when fields are added."""


class TargetSeen(msgspec.Struct, frozen=True, kw_only=True):
    """Target that answered: its address, its model, and its description of itself."""

    url: str
    model: str
    server: str


class PromptCalibration(msgspec.Struct, frozen=True, kw_only=True):
    """Calibration of the prompts: the seed of the words, and what the probes found of the tokenizer."""

    tokens_per_word: float
    template_tokens: float
    text_seed: int = 0


class LoadResult(msgspec.Struct, kw_only=True, dict=True):
    """Result of one run.

    Attributes:
        format: `FORMAT`.
        maitred: Version of the tester.
        command: Shell command, as it was typed.
        started: Start of the run, UTC, ISO 8601.
        seconds: Time from the start to the end of the last request.
        machine: Machine that the tester ran on.
        target: Target that answered.
        calibration: Calibration of the prompts.
        spec: The `LoadSpec` as plain data; a secret appears as its reference.
        workload: Description of the workload in one line.
        window_s: Begin and end of the part that rates are computed from.
        tester: Cost of the tester itself.
        summary: Figures of all counted requests.
        tenants: Figures of the counted requests of each tenant.
        series: Figures of the run over time.
        requests: Columns of all requests, counted or not.
        gaps: Packed times between the pieces of the answers; see `pack_gaps`.
    """

    format: str
    maitred: str
    command: str
    started: str
    seconds: float
    machine: Machine
    target: TargetSeen
    calibration: PromptCalibration
    spec: dict[str, Any]
    workload: str
    window_s: tuple[float, float]
    tester: TesterCost
    summary: Summary
    tenants: dict[str, Summary]
    series: TimeSeries
    requests: RequestColumns
    gaps: str

    @classmethod
    def of(cls, spec: LoadSpec, data: RunData, *, command: str, workload: str) -> "LoadResult":
        """Computes the result of a run from its data.

        Args:
            spec: Settings of the run.
            data: Measured data of the run.
            command: Shell command that started the run.
            workload: Description of the workload in one line.
        """
        requests = RequestColumns.of(data.records)
        gaps = pack_gaps(data.records)
        times = RequestTimes(requests, unpack_gaps(gaps))
        window = rate_window(times, spec.bounds, has_trace=spec.shape.trace is not None, seconds=data.seconds)

        def summary(tenant: str | None = None) -> Summary:
            return summarise(times, window, spec.objectives, warmup_s=spec.bounds.warmup_s, tenant=tenant)

        return cls(
            format=FORMAT,
            maitred=package.__version__,
            command=command,
            started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(data.started_unix_s)),
            seconds=round(data.seconds, 6),
            machine=Machine.here(),
            target=TargetSeen(url=spec.target.url, model=data.model, server=data.server),
            calibration=PromptCalibration(
                tokens_per_word=data.tokens_per_word, template_tokens=data.template_tokens, text_seed=data.text_seed
            ),
            spec=result_file.plain(spec),
            workload=workload,
            window_s=(round(window.from_s, 6), round(window.until_s, 6)),
            tester=judge(data),
            summary=summary(),
            tenants={tenant: summary(tenant) for tenant in sorted(set(requests.tenant))},
            series=series(times, data, spec.objectives),
            requests=requests,
            gaps=gaps,
        )

    def save(self, path: Path) -> None:
        """Writes the file atomically.

        Raises:
            InvalidRequest: The file cannot be written.
        """
        result_file.save(self, path)

    @classmethod
    def load(cls, path: Path) -> "LoadResult":
        """Reads a file that `save` wrote.

        Raises:
            InvalidRequest: The file does not exist, is of another kind, or is damaged.
        """
        result = result_file.load(path, cls, FORMAT, by="maitred load run", again="Run the test again.")
        if fault := result.requests.faults():
            raise InvalidRequest(f"{path} is damaged: {fault}. Run the test again.")
        if len(result.times.gaps_us) != int(np.maximum(result.times.pieces - 1, 0).sum()):
            raise InvalidRequest(f"{path} is damaged: its gaps do not fit its pieces. Run the test again.")
        return result

    @cached_property
    def times(self) -> RequestTimes:
        """Times of the requests, as `RequestTimes` defines them."""
        return RequestTimes(self.requests, unpack_gaps(self.gaps))

    @cached_property
    def objectives(self) -> ObjectivesSpec:
        """Objectives that a good answer must meet."""
        return msgspec.convert(self.spec["objectives"], ObjectivesSpec)

    @property
    def window(self) -> MeasuringWindow:
        """Window of the run that rates are computed from."""
        return MeasuringWindow(*self.window_s)

    def column(self, name: str) -> NDArray[Any]:
        """Returns a `RequestColumns` field of all requests: floats with NaN for none, integers, or text."""
        return self.requests.array(name)

    def counted_flags(self) -> Flags:
        """Flags of the requests that were due after the warm-up."""
        return self.times.intended_s >= float(self.spec["bounds"]["warmup_s"])

    def ttft_s(self) -> Floats:
        """Time to first token of each request; NaN: none."""
        return self.times.ttft_s

    def e2e_s(self) -> Floats:
        """Time to the end of each request; NaN: not complete."""
        return self.times.e2e_s

    def tpot_s(self) -> Floats:
        """Time per output token of each request; NaN: fewer than two."""
        return self.times.tpot_s

    def itl_s(self) -> tuple[Floats, NDArray[np.int64]]:
        """Returns all times between pieces, and the index of the request of each."""
        return self.times.itl_s, self.times.itl_request

    def met_flags(self) -> Flags:
        """Flags of the requests that are complete and met all objectives."""
        return self.times.met_flags(self.objectives)
