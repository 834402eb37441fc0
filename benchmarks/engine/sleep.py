"""What a model that sleeps gives back, and how soon it answers again, beside a load.

An engine is started, asked once, sent to sleep and asked again, round after round; each time it is a request that wakes
it. *Load* is from the start of a process to its first token for the same question, with everything kept on disk that
can be. Memory is the proportional set size, and what the system could have back of it (anonymous pages; the others are
files).
"""

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.engine.startup import LIMIT_S, PROMPT, StartedEngine
from benchmarks.support.report import Report
from benchmarks.support.shapes import BUNDLED, random_qwen, servable
from maitred.core.request import EngineRequest, SamplingParams
from maitred.wire.frames import EngineHello, FrameReader, SleepCommand, Step, Submit, ToGateway, encode_frame

SEED = 20261122
OUTPUT_TOKENS = 8
ROUNDS, QUICK_ROUNDS = 5, 3


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the bundled model alone")
    quick = parser.parse_args().quick
    report = Report("sleep", seed=SEED, quick=quick)
    models = {"bundled": BUNDLED} if quick else {"bundled": BUNDLED, "0.5B": servable(random_qwen())}
    for name, model in models.items():
        with TemporaryDirectory(prefix="maitred-sleep-") as folder:
            figures = _measured(model, Path(folder), rounds=QUICK_ROUNDS if quick else ROUNDS)
        report.figures[name] = figures
        print(f"{name:8}", json.dumps(figures))
        report.require(f"{name}: a first token by waking, of one by loading", figures["wake_share"], at_most=0.25)
    if not quick:
        report.require("0.5B: memory asleep, of awake", report.figures["0.5B"]["asleep_share"], at_most=0.25)
    return report.finish()


def _measured(model: Path, folder: Path, *, rounds: int) -> dict[str, Any]:
    environment = dict(os.environ)
    with StartedEngine(model, folder, environment):
        pass  # whatever is to be kept is kept now
    wakes_s, sleeps_s, ready_s, awake_mib, asleep_mib = [], [], [], [], []
    with StartedEngine(model, folder, environment) as engine, Talk(engine.connected()) as talk:
        load_s = engine.first_token_s
        before = talk.answer()
        for _ in range(rounds):
            talk.answer()
            ready_s.append(talk.first_token_s)
            awake_mib.append(engine.pss_mib())
            sleeps_s.append(talk.sleep())
            asleep_mib.append(engine.pss_mib())
            same = talk.answer() == before
            assert same, "what it answers has changed in its sleep"
            wakes_s.append(talk.first_token_s)
    load_again_s = []
    for _ in range(2):
        with StartedEngine(model, folder, environment) as engine:
            load_again_s.append(engine.first_token_s)
    load_s = statistics.median([load_s, *load_again_s])
    wake_s = statistics.median(wakes_s)
    return {
        "load_s": round(load_s, 2),
        "wake_first_token_s": round(wake_s, 3),
        "wake_each_s": [round(s, 3) for s in wakes_s],
        "awake_first_token_s": round(statistics.median(ready_s), 3),
        "sleep_s": round(statistics.median(sleeps_s), 3),
        "wake_share": round(wake_s / load_s, 3),
        "awake_mib": round(statistics.median(awake_mib)),
        "asleep_mib": round(statistics.median(asleep_mib)),
        "asleep_share": round(statistics.median(asleep_mib) / statistics.median(awake_mib), 3),
    }


class Talk:
    """A conversation with an engine on its socket. Enter it to begin.

    Args:
        connection: To the engine, which has sent nothing yet.

    Attributes:
        first_token_s: Of the last answer, from the request on.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._reader: FrameReader[ToGateway] = FrameReader(ToGateway)
        self._inbox: list[ToGateway] = []
        self._asked = 0
        self.first_token_s = 0.0

    def __enter__(self) -> "Talk":
        self._until(lambda message: isinstance(message, EngineHello))
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()

    def answer(self) -> list[int]:
        """The tokens of one answer; always to the same question."""
        self._asked += 1
        sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, seed=0, temperature=0.0)
        began_s = time.perf_counter()
        self._socket.sendall(encode_frame(Submit(EngineRequest(f"r{self._asked}", PROMPT, sampling))))
        tokens: list[int] = []
        while len(tokens) < OUTPUT_TOKENS:
            step = self._until(lambda message: isinstance(message, Step) and bool(message.outputs))
            assert isinstance(step, Step)
            if not tokens:
                self.first_token_s = time.perf_counter() - began_s
            tokens += [token for output in step.outputs for token in output.delta.tokens]
        return tokens

    def sleep(self) -> float:
        """Sends it to sleep; how long that took."""
        began_s = time.perf_counter()
        self._socket.sendall(encode_frame(SleepCommand()))
        self._until(lambda message: isinstance(message, Step) and message.load.asleep)
        return time.perf_counter() - began_s

    def _until(self, wanted: Callable[[ToGateway], bool]) -> ToGateway:
        until_s = time.perf_counter() + LIMIT_S
        while time.perf_counter() < until_s:
            if not self._inbox:
                self._inbox += self._reader.feed(self._socket.recv(1 << 16))
            elif wanted(message := self._inbox.pop(0)):
                return message
        raise TimeoutError


if __name__ == "__main__":
    sys.exit(main())
