"""Traces of requests to real services, in their published formats and in our own format.

One module per format reads a trace into sessions, line by line, so a trace may be larger than the memory. `load_trace`
applies the speed and the sizes of a shape.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec.structs import replace

from maitred.core.errors import InvalidRequest
from maitred.load.spec import ShapeSpec
from maitred.load.workload.session import LoadSession, Workload
from maitred.load.workload.sizing import LengthScaling
from maitred.load.workload.traces.agentic import read_agentic
from maitred.load.workload.traces.azure import read_azure
from maitred.load.workload.traces.burstgpt import read_burstgpt
from maitred.load.workload.traces.mooncake import read_mooncake
from maitred.load.workload.traces.recorded import read_recorded
from maitred.load.workload.traces.servegen import ServeGenSelection, read_servegen

READERS: dict[str, Callable[[Path], Workload]] = {
    "mooncake": read_mooncake,
    "azure": read_azure,
    "burstgpt": read_burstgpt,
    "agentic": read_agentic,
    "recorded": read_recorded,
}


def load_trace(shape: ShapeSpec, seed: int) -> Workload:
    """Opens the trace of a shape, ``FORMAT:PATH``; for ``servegen``, options may follow the path.

    Args:
        shape: Shape whose `trace`, `speed`, `scale` and limits are used.
        seed: Seed for ``servegen``, whose requests are drawn; other formats do not use it.

    Raises:
        InvalidRequest: The format is unknown, or the file cannot be read.
    """
    trace = shape.trace or ""
    kind, _, place = trace.partition(":")
    if not place or kind not in {*READERS, "servegen"}:
        formats = ", ".join(f"`{name}`" for name in (*READERS, "servegen"))
        raise InvalidRequest(
            f"shape.trace: {trace!r} names no trace. Write FORMAT:PATH with one of the formats {formats}.",
            param="shape.trace",
        )
    if kind == "servegen":
        path, _, options = place.partition("?")
        own = read_servegen(Path(path), ServeGenSelection.parse(options), seed)
    else:
        own = READERS[kind](Path(place))
    sizing = LengthScaling.of(shape, own.block_tokens)
    words = [own.description or kind, "" if shape.speed == 1 else f"speed {shape.speed:g}", str(sizing)]
    return Workload(_rescale(own.sessions, sizing, shape.speed), sizing.block_tokens, ", ".join(filter(None, words)))


def _rescale(sessions: Iterator[LoadSession], sizing: LengthScaling, speed: float) -> Iterator[LoadSession]:
    """Rescales sessions in size and speed; the speed also applies to pauses between turns."""
    for session in sessions:
        turns = tuple(sizing.turn(replace(turn, think_s=turn.think_s / speed)) for turn in session.turns)
        at_s = None if session.at_s is None else session.at_s / speed
        prefix_tokens = session.prefix_tokens if session.prefix is None else sizing.tokens(session.prefix_tokens)
        yield replace(session, turns=turns, at_s=at_s, prefix_tokens=prefix_tokens)
