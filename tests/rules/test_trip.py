"""How far a request travels: files, functions and frames of the gateway that one streamed chat request passes."""

import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import FrameType

from tests.support.gateway import gateway
from tests.support.source import SOURCE

FILES = 65
"""Files of the gateway that a streamed request enters. All bounds are today's counts: they fall, and rise only for what
saves more than it costs, such as the caches of tokens and of answers."""
FUNCTIONS = 357
FILES_BEFORE_SUBMIT = 54
STACK = 14
CALLS_PER_TOKEN = 37
TRIPS = 40
OUTSIDE = ("testing/", "engine/", "cli/")
"""Not the gateway's: the scripted engine and what starts it."""


class Trip:
    """Calls of maitred's own functions, as `sys.setprofile` reports them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int]] = []
        """File, function, and how many of our own frames are below."""

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or (file := source_file(frame)) is None or file.startswith(OUTSIDE):
            return
        depth, below = 0, frame.f_back
        while below is not None:
            if (caller := source_file(below)) is not None:
                if caller.startswith(OUTSIDE):
                    return  # the engine uses some of the gateway's modules, too
                depth += 1
            below = below.f_back
        self.calls.append((file, frame.f_code.co_qualname, depth))


def source_file(frame: FrameType) -> str | None:
    """The file of a frame of our own, below `src/maitred`."""
    path = frame.f_code.co_filename
    return str(Path(path).relative_to(SOURCE)) if path.startswith(str(SOURCE)) else None


async def traced_chat(system, max_tokens):
    """Calls of one streamed chat request."""
    trip = Trip()
    sys.setprofile(trip)
    try:
        response = await system.chat(stream=True, max_tokens=max_tokens)
    finally:
        sys.setprofile(None)
    assert response.text.endswith("data: [DONE]\n\n")
    return trip.calls


async def measured_trip(system):
    """Files, functions, files before the engine hears of the request, frames, and calls for a token."""
    calls = await traced_chat(system, 48)
    files = {file for file, _, _ in calls}
    functions = {(file, name) for file, name, _ in calls}
    submitted = next(n for n, (_, name, _) in enumerate(calls) if name == "EngineConnection.submit")
    files_before = {file for file, _, _ in calls[:submitted]}
    tokens = [n for n, (_, name, _) in enumerate(calls) if name == "EngineConnection.data_received"]
    per_token = median(after - before for before, after in pairwise(tokens))
    return len(files), len(functions), len(files_before), max(depth for _, _, depth in calls), per_token


async def test_a_streamed_request_passes_no_more_files_functions_and_frames_than_before():
    async with gateway() as system:
        await system.chat(stream=True, max_tokens=24)
        # On a busy machine a request meets more: tokens that come together, a timer that is due. So the least counts.
        bounds = (FILES, FUNCTIONS, FILES_BEFORE_SUBMIT, STACK, CALLS_PER_TOKEN)
        counts = await measured_trip(system)
        for _ in range(TRIPS):
            if all(count <= bound for count, bound in zip(counts, bounds, strict=True)):
                break
            counts = tuple(map(min, counts, await measured_trip(system)))
    assert all(count <= bound for count, bound in zip(counts, bounds, strict=True)), counts
