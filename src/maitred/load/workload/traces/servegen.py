"""ServeGen (Xiang et al., *ServeGen: Workload Characterization and Generation of LLM Serving in Production*, 2025).

The data is no list of requests: it describes each client of a large service, and requests are drawn from it. Each
client has two files, in a folder or a tar archive:

* ``chunk-<client>-trace.csv``, without header: start of a window of 600 s, requests per second, coefficient of
  variation of the gaps, ``Gamma`` or ``Weibull``, and that distribution's shape and scale;
* ``chunk-<client>-dataset.json``: start of a window of 6 h -> ``input_tokens`` and ``output_tokens``, each the text of
  a table from length to probability.

Each client becomes a tenant, ``client-<number>``. Some clients were published without lengths; each of their requests
uses the lengths of another client, drawn by the clients' rates. The gaps of a client have the published shape. Their
scale follows from the rate of the window: the time of a renewal process at rate 1 is transformed to the rates as in
`arrivals`, so windows join continuously. A burst has the same number of requests at any rate, so at a rate far below
the published one it lasts longer: the busiest window of ``m-small`` has 3.3 times the mean rate as published, and 4.8
times at 0.3 requests per second.
"""

import heapq
import itertools
import lzma
import math
import random
import re
import tarfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from maitred.core.errors import InvalidRequest
from maitred.load.workload import terms
from maitred.load.workload.lengths import Histogram
from maitred.load.workload.session import LoadSession, SessionTurn, Workload
from maitred.load.workload.tables import fault

WINDOW_S = 600.0
NAME = re.compile(r"chunk-(\d+)-(trace\.csv|dataset\.json)$")
FORMS = "`start=86400`, `end=90000` (seconds of the trace) and `rate=5` (sessions per second on average)"


@dataclass(frozen=True)
class ServeGenSelection:
    """Selection from the data: the part of the days that is played, and its rate.

    Attributes:
        start_s: Begin of the part; it is second 0 of the run.
        end_s: End of the part.
        rate_per_s: Mean rate over the part, for all clients together; None: as published.
    """

    start_s: float = 0.0
    end_s: float = math.inf
    rate_per_s: float | None = None

    @classmethod
    def parse(cls, options: str) -> "ServeGenSelection":
        """Parses the optional part after ``?`` in ``servegen:PATH?start=86400&end=90000&rate=5``.

        Raises:
            InvalidRequest: A name is unknown, or a value is not a number.
        """
        given: dict[str, float] = {}
        try:
            for name, value in terms.pairs(options.replace("&", ",")) if options else []:
                if name not in ("start", "end", "rate"):
                    raise ValueError(f"{name!r} is no option")
                given[name] = terms.number(value)
        except ValueError as error:
            raise InvalidRequest(f"shape.trace: servegen's options {options!r}: {error}. There are {FORMS}.") from None
        part = cls(given.get("start", 0.0), given.get("end", math.inf), given.get("rate"))
        if part.end_s <= part.start_s or part.rate_per_s == 0:
            raise InvalidRequest(f"shape.trace: servegen's options {options!r} leave nothing. There are {FORMS}.")
        return part


@dataclass(frozen=True)
class ServeGenWindow:
    """Arrivals of a client over `WINDOW_S`."""

    start_s: float
    rate_per_s: float
    family: str
    shape: float

    def gap(self, rng: random.Random) -> float:
        """Draws one gap from a distribution with mean 1."""
        if self.family == "Weibull":
            return rng.weibullvariate(1 / math.gamma(1 + 1 / self.shape), self.shape)
        return rng.gammavariate(self.shape, 1 / self.shape)


@dataclass(frozen=True)
class ServeGenLengths:
    """Lengths of a client: from each start on, the lengths of prompts and of answers."""

    starts_s: Sequence[float]
    pairs: Sequence[tuple[Histogram, Histogram]]

    def turn(self, at_s: float, rng: random.Random) -> SessionTurn:
        """Draws a request for a time."""
        prompt, output = self.pairs[max(0, bisect_right(self.starts_s, at_s) - 1)]
        return SessionTurn(prompt_tokens=max(1, round(prompt.draw(rng))), output_tokens=max(1, round(output.draw(rng))))


@dataclass(frozen=True)
class ServeGenClient:
    """Client of a ServeGen trace.

    Attributes:
        number: Number in the file's name.
        windows: Windows in the order of time.
        lengths: Lengths of the client; if it has none, those of all other clients.
        rates: Cumulative sums of the rates of the clients that `lengths` come from.
    """

    number: int
    windows: Sequence[ServeGenWindow]
    lengths: Sequence[ServeGenLengths]
    rates: Sequence[float]

    def requests(self, part: ServeGenSelection, factor: float, seed: int) -> Iterator[tuple[float, int, SessionTurn]]:
        """Yields time since the start of the part, client and turn of every request, in order."""
        gaps, sizes = (random.Random(f"{seed}:servegen:{self.number}:{purpose}") for purpose in ("gaps", "lengths"))
        left: float | None = None
        for window in self.windows:
            begin_s, end_s = max(window.start_s, part.start_s), min(window.start_s + WINDOW_S, part.end_s)
            rate_per_s = window.rate_per_s * factor
            if end_s <= begin_s or rate_per_s == 0:
                continue
            if left is None:
                left = window.gap(gaps) * gaps.random()
            at_s = begin_s + left / rate_per_s
            while at_s < end_s:
                yield at_s - part.start_s, self.number, self._turn(at_s, sizes)
                at_s += window.gap(gaps) / rate_per_s
            left = (at_s - end_s) * rate_per_s

    def _turn(self, at_s: float, rng: random.Random) -> SessionTurn:
        if len(self.lengths) == 1:
            return self.lengths[0].turn(at_s, rng)
        (lengths,) = rng.choices(self.lengths, cum_weights=self.rates)
        return lengths.turn(at_s, rng)


def read_servegen(path: Path, part: ServeGenSelection, seed: int) -> Workload:
    """Draws the requests of all clients, in the order of time.

    Args:
        path: Folder or tar archive, compressed or not, with the clients' files.
        part: Part that is played.
        seed: Seed of the draws. Every client has its own random stream.

    Raises:
        InvalidRequest: The files are missing or not valid, or the part contains no requests.
    """
    clients = servegen_clients(path)
    expected = sum(_expected_requests(client, part) for client in clients)
    if expected == 0:
        raise InvalidRequest(f"shape.trace: {path} has no requests in this part of it. There are {FORMS}.")
    last_s = max(client.windows[-1].start_s + WINDOW_S for client in clients if client.windows)
    seconds = min(last_s, part.end_s) - part.start_s
    factor = 1.0 if part.rate_per_s is None else part.rate_per_s * seconds / expected
    requests = heapq.merge(
        *(client.requests(part, factor, seed) for client in clients), key=lambda request: request[:2]
    )
    sessions = (
        LoadSession(id=number, turns=(turn,), tenant=f"client-{client}", at_s=at_s)
        for number, (at_s, client, turn) in enumerate(requests)
    )
    return Workload(sessions, description=f"servegen {path.name} from {part.start_s:g} s")


def _expected_requests(client: ServeGenClient, part: ServeGenSelection) -> float:
    """Returns the mean number of requests of a client within the part."""
    return sum(
        window.rate_per_s * max(0.0, min(window.start_s + WINDOW_S, part.end_s) - max(window.start_s, part.start_s))
        for window in client.windows
    )


def servegen_clients(path: Path) -> list[ServeGenClient]:
    """Reads the clients that have requests, from a folder or a tar archive.

    Raises:
        InvalidRequest: The files are missing or not valid.
    """
    windows: dict[int, list[ServeGenWindow]] = {}
    lengths: dict[int, ServeGenLengths] = {}
    for name, file in _files(path):
        if not (match := NAME.search(name.as_posix())):
            continue
        number = int(match[1])
        if match[2] == "trace.csv":
            windows[number] = _windows(name, file)
        else:
            own = _lengths(name, file)
            if own.pairs:
                lengths[number] = own
    if not windows:
        raise InvalidRequest(f"shape.trace: {path} has no files like chunk-0-trace.csv. Give ServeGen's folder or tar.")
    rates = {number: sum(window.rate_per_s for window in own) for number, own in windows.items()}
    lenders = [number for number in sorted(lengths) if rates.get(number)]
    if not lenders:
        raise InvalidRequest(f"shape.trace: {path} has no lengths in files like chunk-0-dataset.json. Fetch it again.")
    lent = [lengths[number] for number in lenders]
    sums = list(itertools.accumulate(rates[number] for number in lenders))
    return [
        ServeGenClient(number, windows[number], *(([lengths[number]], [1.0]) if number in lengths else (lent, sums)))
        for number in sorted(windows)
        if rates[number]
    ]


def _files(path: Path) -> Iterator[tuple[Path, IO[bytes]]]:
    """Yields the files of a folder or archive, with names for errors."""
    try:
        if path.is_dir():
            for name in sorted(path.rglob("chunk-*")):
                with name.open("rb") as file:
                    yield name, file
            return
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                if member.isfile() and (content := archive.extractfile(member)):
                    yield path / member.name, content
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as error:
        raise InvalidRequest(f"shape.trace: {path} cannot be read: {error}. Give a folder or a tar archive.") from None


def _windows(name: Path, file: IO[bytes]) -> list[ServeGenWindow]:
    windows: list[ServeGenWindow] = []
    for line, text in enumerate(file.read().decode("utf-8", "replace").splitlines(), 1):
        if not text.strip():
            continue
        try:
            start, rate, _, family, shape, _ = text.strip().split(",")
            window = ServeGenWindow(terms.number(start), terms.number(rate), family or "Gamma", terms.number(shape))
        except ValueError as error:
            raise fault(name, line, str(error)) from None
        if window.rate_per_s and (window.family not in ("Gamma", "Weibull") or not window.shape):
            raise fault(name, line, f"{family!r} with shape {shape} is neither Gamma nor Weibull")
        if windows and window.start_s < windows[-1].start_s + WINDOW_S:
            raise fault(name, line, f"the window begins before the end of the one above, {WINDOW_S:g} s each")
        windows.append(window)
    return windows


class _Tables(msgspec.Struct):
    input_tokens: str
    output_tokens: str


def _lengths(name: Path, file: IO[bytes]) -> ServeGenLengths:
    """Reads the lengths of a client; windows without requests are left out."""
    try:
        tables = msgspec.json.decode(file.read(), type=dict[str, _Tables])
        pairs = {
            terms.number(start): (_histogram(table.input_tokens), _histogram(table.output_tokens))
            for start, table in tables.items()
        }
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidRequest(f"shape.trace: {name} is not as ServeGen writes it: {error}. Fetch it again.") from None
    known = {start_s: (prompt, output) for start_s, (prompt, output) in sorted(pairs.items()) if prompt and output}
    return ServeGenLengths(list(known), list(known.values()))


def _histogram(text: str) -> Histogram | None:
    """Parses ``{45: 0.0097, 46: 0.0117}``; None if it is empty."""
    inside = text.strip().removeprefix("{").removesuffix("}")
    bars = [(terms.number(value), terms.number(weight)) for value, weight in terms.pairs(inside, ":")] if inside else []
    if not any(weight for _, weight in bars):
        return None
    return Histogram([value for value, _ in bars], [weight for _, weight in bars])
