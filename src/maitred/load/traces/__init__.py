"""Traces: what real users asked of real services, in the formats in which it was published, and in our own.

One module per format reads it into sessions, line by line, so a trace may be longer than the memory. `load_trace` plays
it at the speed and in the sizes that a shape asks for.
"""

from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from maitred.core.errors import InvalidRequest
from maitred.load.session import Session, Workload
from maitred.load.sizing import Sizing
from maitred.load.spec import Shape

READERS: dict[str, Callable[[Path, dict[str, str], int], Workload]] = {}


def load_trace(shape: Shape, seed: int) -> Workload:
    """Opens the trace that a shape names.

    Raises:
        InvalidRequest: The format is unknown, or the file cannot be read.
    """
    text = shape.trace or ""
    raise InvalidRequest(f"shape.trace: {text!r} cannot be read yet.")
