"""Whom we are compared with: what pip installs for each, which precisions it has, and its process while it competes.

A process is asleep (``SIGSTOP``) unless it is its turn, so that no thread of one takes time from another.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from benchmarks.support.environments import CPU_TORCH, HOME, Environment
from benchmarks.support.rivals.external_servers import EXTERNALS
from benchmarks.support.rivals.rival_worker import THREADS

ROOT = Path(__file__).parents[3]
CONVERTED = HOME.parent / "rivals"
"""Models in the rivals' own forms, and what they print."""
STOP_S = 10.0
_QUIET = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "OPENVINO_TELEMETRY_DISABLE": "1", "TQDM_DISABLE": "1"}


@dataclass(frozen=True)
class Rival:
    """One that competes.

    Attributes:
        name: Of its worker, ``benchmarks.support.rivals.rival_<name>``.
        python: What runs that.
        environment: Where it is installed; None for ourselves.
        precisions: That it has.
        patient: Workloads that it takes part in; None: in all.
        variables: For its process.
    """

    name: str
    python: Path
    environment: Environment | None
    precisions: Sequence[str]
    patient: Sequence[str] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def installed(self) -> bool:
        """Whether it can compete."""
        return self.environment is None or self.environment.installed


def _external(name: str) -> Environment:
    return next(external for external in EXTERNALS if external.name == name)


def _rival(
    environment: Environment,
    precisions: Sequence[str],
    *,
    patient: Sequence[str] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Rival:
    return Rival(environment.name, environment.python, environment, precisions, patient, variables or {})


OURS = Rival("maitred", Path(sys.executable), None, ("fp32", "int8"))
RIVALS = (
    _rival(_external("vllm"), ("fp32", "int8")),
    _rival(
        Environment(
            name="openvino",
            packages=["openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0", CPU_TORCH],
            removed=["torchvision"],
        ),
        ("fp32", "int8"),
    ),
    _rival(_external("llamacpp"), ("fp32", "int8"), variables={"OMP_NUM_THREADS": str(THREADS)}),
    _rival(
        _external("transformers"),
        ("fp32",),
        patient=("one", "many", "crowd"),  # 32 prompts of 544 tokens take it longer than five minutes
        variables={"OMP_NUM_THREADS": str(THREADS)},
    ),
)


class Failed(Exception):
    """A rival did not start, or died; the message ends with what it printed last."""


class Contestant:
    """A rival's process, asleep until it is asked.

    Args:
        rival: Which one.
        folder: The model.
        precision: Of the class that it competes in.
        sequences: Requests at once at most.
    """

    def __init__(self, rival: Rival, folder: Path, precision: str, sequences: int) -> None:
        self.rival = rival
        converted = CONVERTED / rival.name / f"{folder.name}-{precision}"
        converted.parent.mkdir(parents=True, exist_ok=True)
        self._log = converted.with_name(f"{converted.name}.log")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(str(rival.python), "-m", f"benchmarks.support.rivals.rival_{rival.name}"),
                    *(str(folder), str(converted), precision, str(sequences)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **_QUIET, **rival.variables, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"},
                cwd=ROOT,
                start_new_session=True,
            )

    def __enter__(self) -> "Contestant":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ready(self, limit_s: float) -> str:
        """Waits until it has loaded the model, and puts it to sleep; how it is run, in words.

        Raises:
            Failed: It was not ready in time.
        """
        how = str(self._line(limit_s)["ready"])
        self._signal(signal.SIGSTOP)
        return how

    def answer(self, prompts: Sequence[Sequence[int]], output_tokens: int, limit_s: float) -> float:
        """Seconds that it takes to answer them all, by its own clock.

        Raises:
            Failed: It died, took too long, or an answer has not as many tokens as were asked for.
        """
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        asked = {"prompts": prompts, "output_tokens": output_tokens}
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        result = self._line(limit_s)
        self._signal(signal.SIGSTOP)
        if result["counts"] != [output_tokens] * len(prompts):
            raise Failed(f"{self.rival.name} was asked for {output_tokens} tokens each and gave {result['counts']}.")
        return float(result["seconds"])

    def processor_s(self) -> float:
        """Processor time that it has taken since it started."""
        used = psutil.Process(self._process.pid).cpu_times()
        return float(used.user + used.system)

    def memory_bytes(self) -> int:
        """Its memory, with its part of what it shares with others."""
        return int(psutil.Process(self._process.pid).memory_full_info().pss)

    def close(self) -> None:
        """Ends it."""
        if self._process.poll() is None:
            self._signal(signal.SIGCONT)
            self._signal(signal.SIGKILL)
        self._process.wait(STOP_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            raise Failed(self._last_words("has ended")) from None

    def _line(self, limit_s: float) -> dict[str, Any]:
        """Its next line."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            until_s = time.monotonic() + limit_s
            line = b""
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, until_s - time.monotonic())):
                    raise Failed(self._last_words(f"gave no answer within {limit_s:.0f} s"))
                read = os.read(self._process.stdout.fileno(), 1 << 16)
                if not read:
                    raise Failed(self._last_words("has ended"))
                line += read
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self, what: str) -> str:
        return f"{self.rival.name} {what}:\n{self._log.read_text(errors='replace')[-1500:]}"
