"""What one token costs the gateway between the engine's socket and the task that reads its stream.

One step with one output for each of 200 streams, as bytes into the connection, in three depths measured in turns:
decoding the frame alone; decoding and handing out, nobody waiting; and the whole way, with 200 tasks that wait, are
woken and take their batch, on uvloop. Times are of the processor, so that a busy machine does not count. Then: the
death of the engine under 2,000 waiting streams, and the cost of submitting a request of 1,000 tokens.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable

import uvloop

from benchmarks.support.report import Report
from maitred.core.errors import ReplicaLost
from maitred.core.replica import LoadReport
from maitred.core.request import EngineRequest, SamplingParams, TokenDelta
from maitred.replica.engine.connection import EngineConnection
from maitred.replica.engine.stream import EngineStream
from maitred.testing.script import SCRIPTED_CARD
from maitred.wire.frames import PROTOCOL_VERSION, EngineHello, FrameReader, Step, ToGateway, TokenOutput, encode_frame

SEED = 0
ROUNDS, QUICK_ROUNDS = 2000, 200
OUTPUTS = 200
VICTIMS = 2000


class Sink(asyncio.Transport):
    """A socket that takes everything."""

    def write(self, data: object) -> None:
        """Forgets it."""

    def abort(self) -> None:
        """Needs nothing."""


class Bench:
    """A connection with streams, and the steps of an engine."""

    def __init__(self, streams: int) -> None:
        self.connection = EngineConnection()
        self.connection.connection_made(Sink())
        self.connection.data_received(encode_frame(EngineHello(PROTOCOL_VERSION, 1, 1, SCRIPTED_CARD, LoadReport())))
        sampling = SamplingParams(max_tokens=1 << 20, seed=0)
        request = EngineRequest("req-5b1f0c9e7d2a4c6f8e1b3a5d", list(range(1000)), sampling)
        began_s = time.process_time()
        self.streams = [self.connection.submit(request) for _ in range(streams)]
        self.submit_us = (time.process_time() - began_s) / streams * 1e6
        self._steps = 0

    def step(self) -> bytes:
        """The next step's frame: one token for every stream."""
        self._steps += 1
        outputs = [TokenOutput(stream.wire_id, TokenDelta(0, [self._steps % 30_000])) for stream in self.streams]
        return encode_frame(Step(self._steps, outputs, [], LoadReport()))


async def measure(rounds: int) -> dict[str, float]:
    """Microseconds per output, by depth: the median over the rounds."""
    decoder: FrameReader[ToGateway] = FrameReader(ToGateway)
    idle, awake = Bench(OUTPUTS), Bench(OUTPUTS)
    readers = [asyncio.create_task(_drain(stream)) for stream in awake.streams]
    await asyncio.sleep(0)
    samples: dict[str, list[float]] = {"decode": [], "dispatch": [], "delivery": []}
    for _ in range(rounds):
        samples["decode"].append(_timed_us(decoder.feed, idle.step()))
        idle_frame = _renumbered(idle)
        samples["dispatch"].append(_timed_us(idle.connection.data_received, idle_frame))
        frame = awake.step()
        began_s = time.process_time()
        awake.connection.data_received(frame)
        await asyncio.sleep(0)  # the woken readers run in this turn
        samples["delivery"].append((time.process_time() - began_s) / OUTPUTS * 1e6)
    awake.connection.end("over")
    assert sum(await asyncio.gather(*readers)) == rounds * OUTPUTS, "a delivery took more than one turn of the loop"
    return {name: round(statistics.median(values), 3) for name, values in samples.items()}


async def death_ms() -> float:
    """From the end of the byte stream until the last of many readers has its error."""
    bench = Bench(VICTIMS)
    readers = [asyncio.create_task(_drain(stream)) for stream in bench.streams]
    await asyncio.sleep(0)
    began_s = time.process_time()
    bench.connection.connection_lost(None)
    await asyncio.gather(*readers)
    return (time.process_time() - began_s) * 1e3


def _renumbered(bench: Bench) -> bytes:
    """The step that the decoder alone has just read is not one that the connection has heard."""
    bench._steps -= 1
    return bench.step()


async def _drain(stream: EngineStream) -> int:
    heard = 0
    try:
        async for batch in stream:
            heard += len(batch)
    except ReplicaLost:
        pass
    return heard


def _timed_us(run: Callable[[bytes], object], frame: bytes) -> float:
    began_s = time.process_time()
    run(frame)
    return (time.process_time() - began_s) / OUTPUTS * 1e6


def main() -> int:
    """Runs the benchmark; the exit code says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds")
    quick = parser.parse_args().quick
    rounds = QUICK_ROUNDS if quick else ROUNDS
    report = Report("engine_link", seed=SEED, quick=quick)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        per_output_us = runner.run(measure(rounds))
        death = statistics.median(runner.run(death_ms()) for _ in range(5))

        async def submit() -> float:
            return statistics.median(Bench(1000).submit_us for _ in range(5))

        submit_us = runner.run(submit())
    report.figures = {
        "per_output_us": per_output_us,
        "death_ms": round(death, 2),
        "submit_us": round(submit_us, 1),
        "outputs_per_step": OUTPUTS,
        "streams_at_death": VICTIMS,
    }
    for name, value in per_output_us.items():
        print(f"{name:10} {value:6.3f} µs per output")
    print(f"death of {VICTIMS} streams {death:.2f} ms; a submit of 1,000 tokens {submit_us:.1f} µs")
    report.require("dispatch, µs per output", per_output_us["dispatch"], at_most=2.0)
    # In units of the decoder, which is C: a slow machine slows both.
    report.require("dispatch, times the decoding", per_output_us["dispatch"] / per_output_us["decode"], at_most=2.5)
    report.require("delivery, times the decoding", per_output_us["delivery"] / per_output_us["decode"], at_most=10.0)
    report.require(f"death of {VICTIMS} streams, ms", death, at_most=100.0)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
