"""What callers see of upstream faults: every fault, streaming or not, with one upstream and with a second, sound one.

    caller -> maitred serve -> first upstream (the fault) [, second upstream (sound)]

Every cell is asked for until the faulty server had its turn, and judged by what came:

- a whole answer is whole to the last token, has the usage that its server counted, and is charged for exactly once;
- whatever is not whole says so: a status that clients retry by themselves, or, where a part of a stream has gone out,
  an error event, no finish reason, no ``[DONE]`` and a broken connection. It costs nothing;
- the second server gets a call only where the first one has failed, and the first one more than one only where there is
  no other.

With a second server, every fault before the first byte ends in a whole answer, unless the request is at fault.
"""

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec

from benchmarks.support.chaos.fault_cases import CASES, TEXT, Case, Place, Seen, Time, expected
from benchmarks.support.chaos.fault_servers import PRICE, Cell, Installation, installed
from benchmarks.support.chaos.fault_table import write
from benchmarks.support.report import Report

FOUND_S = 30.0
MOST_TRIES = 16
"""Until the faulty server of two was asked; who is asked is the gateway's choice."""
AT_ONCE = 4
QUICK_CASES = ("refused", "closed", "status-400", "status-429-with-time", "error-in-200", "cut", "no-done", "no-usage")


class Answer(msgspec.Struct):
    """What came back.

    Attributes:
        seen: How it looks to the caller.
        text: The words in it.
        request_id: Of the gateway.
        user: By which the upstreams know the request.
        code: Of the error.
        retry_after: The header.
        prompt_tokens, output_tokens: Of the usage.
        estimated: Whether the usage says that nobody counted.
        faults: What is wrong with it, whatever it was.
        seconds: It took.
    """

    seen: Seen
    request_id: str
    user: str
    text: str = ""
    code: str = ""
    retry_after: int | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    estimated: bool = False
    faults: list[str] = []
    seconds: float = 0.0


class Outcome(msgspec.Struct):
    """A cell of the table.

    Attributes:
        seen: What its caller saw.
        calls: That reached the first and the second server.
        billed_nusd: For the request that the fault met.
        faults: In what it differs from what was expected.
    """

    fault: str
    stream: bool
    second: bool
    seen: Seen
    code: str
    calls: tuple[int, int]
    billed_nusd: int
    billed_tokens: int
    seconds: float
    tries: int
    faults: list[str]


async def measure(cases: Sequence[Case], patience: float = 1.0) -> list[Outcome]:
    """All cells of these cases; a server may take `patience` times as long as usual."""
    cells = [Cell(case, stream, second) for case in cases for second in (False, True) for stream in (False, True)]
    turns = asyncio.Semaphore(AT_ONCE)
    async with installed(cells, patience) as installation, aiohttp.ClientSession() as session:
        await _found(session, installation, [cell for cell in cells if cell.case.place is None])
        trials = await asyncio.gather(*(_try(session, installation, cell, turns) for cell in cells))
        await asyncio.sleep(patience)  # usage reaches the ledger in batches
        lines = await _ledger(session, installation)
        outcomes = [_judge(cell, trial, lines) for cell, trial in zip(cells, trials, strict=True)]
        left = await asyncio.to_thread(_left, installation)
    if left:
        outcomes[0].faults += left
    return outcomes


async def _found(session: aiohttp.ClientSession, installation: Installation, cells: Sequence[Cell]) -> None:
    """Waits until the gateway has found the servers of these cells."""
    async with asyncio.timeout(FOUND_S):
        for cell in cells:
            head = {"authorization": f"Bearer {installation.keys[cell.model]}"}
            ready = False
            while not ready:
                async with session.get(f"{installation.gateway.url}/v1/models/{cell.model}", headers=head) as response:
                    ready = (await response.json())["ready"]
                await asyncio.sleep(0 if ready else 0.1)


Trial = list[tuple[Answer, tuple[int, int]]]


async def _try(
    session: aiohttp.ClientSession, installation: Installation, cell: Cell, turns: asyncio.Semaphore
) -> Trial:
    """Asks until the faulty server had its turn, or until nobody can know."""
    trial: Trial = []
    known = cell.case.time is Time.KNOWN
    async with turns:
        for number in range(MOST_TRIES):
            answer = await _ask(session, installation, cell, f"{cell.model}.{number}")
            calls = await asyncio.to_thread(_calls, installation, answer.user)
            trial.append((answer, calls))
            if calls[0] or known or not cell.second or (cell.case.place is Place.GONE and number == 3):
                break
    return trial


def _calls(installation: Installation, user: str) -> tuple[int, int]:
    first, second = (
        sum(request.user == user for request in server.truth().requests)
        for server in (installation.faulty, installation.sound)
    )
    return first, second


async def _ask(session: aiohttp.ClientSession, installation: Installation, cell: Cell, user: str) -> Answer:
    body = {
        "model": cell.model,
        "messages": [{"role": "user", "content": "one two three"}],
        "max_tokens": cell.case.tokens,
        "user": user,
        "stream": cell.stream,
    }
    if cell.stream:
        body["stream_options"] = {"include_usage": True}
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async with session.post(
        f"{installation.gateway.url}/v1/chat/completions",
        json=body,
        headers={"authorization": f"Bearer {installation.keys[cell.model]}"},
        timeout=aiohttp.ClientTimeout(total=30),
    ) as response:
        answer = Answer(Seen.WHOLE, response.headers["x-request-id"], user)
        if response.status != 200:
            _read_error(answer, response.status, await response.json())
            if "retry-after" in response.headers:
                answer.retry_after = int(response.headers["retry-after"])
        elif cell.stream:
            await _read_stream(answer, response)
        else:
            _read_whole(answer, await response.json())
    answer.seconds = round(loop.time() - began_s, 3)
    return answer


def _read_error(answer: Answer, status: int, fields: dict[str, Any]) -> None:
    answer.code = fields["error"]["code"]
    seen = {"400": Seen.REFUSED, "502": Seen.LOST, "503": Seen.AWAY}.get(str(status))
    if seen is None:
        answer.faults.append(f"the status {status}")
    answer.seen = seen or Seen.LOST


def _read_whole(answer: Answer, fields: dict[str, Any]) -> None:
    (choice,) = fields["choices"]
    answer.text = choice["message"]["content"]
    if choice["finish_reason"] != "length":
        answer.faults.append(f"the finish reason {choice['finish_reason']}")
    _read_usage(answer, fields["usage"])


def _read_usage(answer: Answer, usage: dict[str, Any]) -> None:
    answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    answer.estimated = usage.get("estimated", False)


async def _read_stream(answer: Answer, response: aiohttp.ClientResponse) -> None:
    """Reads to the end, and notes everything that an end must or must not have."""
    data: list[str] = []
    whole_body = False
    with suppress(aiohttp.ClientPayloadError, ConnectionError):
        async for line in response.content:
            data += [line.removeprefix(b"data: ").decode().strip()] if line.startswith(b"data: ") else []
        whole_body = True
    done = data[-1:] == ["[DONE]"]
    events = [msgspec.json.decode(text) for text in data if text != "[DONE]"]
    finishes: Counter[str] = Counter()
    for event in events:
        if "error" in event:
            answer.seen, answer.code = Seen.BROKEN, event["error"]["code"]
        if event.get("usage"):
            _read_usage(answer, event["usage"])
        for choice in event.get("choices", ()):
            answer.text += choice["delta"].get("content") or ""
            if choice["finish_reason"]:
                finishes[choice["finish_reason"]] += 1
    if answer.seen is Seen.WHOLE:
        if not done or not whole_body or finishes != {"length": 1}:
            answer.faults.append(f"no error, but [DONE] {done}, body {whole_body}, finishes {dict(finishes)}")
    elif done or whole_body or finishes or "error" not in events[-1]:
        answer.faults.append(f"an error that looks like an end: [DONE] {done}, body {whole_body}")


def _judge(cell: Cell, trial: Trial, lines: dict[str, list[dict[str, Any]]]) -> Outcome:
    """The last answer of a trial is the one that the fault met; those before it came from the sound server."""
    case, faults = cell.case, []
    for answer, calls in trial:
        met = answer is trial[-1][0]
        wanted = expected(case, stream=cell.stream, second=cell.second) if met else Seen.WHOLE
        own = lines.get(answer.request_id, [])
        faults += answer.faults
        if answer.seen is not wanted:
            faults.append(f"{answer.seen.value} ({answer.code}), not {wanted.value}")
        if answer.seen is Seen.WHOLE and answer.text != TEXT:
            faults.append(f"the text {answer.text!r}")
        if met and calls != _calls_expected(cell, wanted):
            faults.append(f"{calls} calls, not {_calls_expected(cell, wanted)}")
        if met and not cell.second and case.retry_after is not None and answer.retry_after != case.retry_after:
            faults.append(f"Retry-After {answer.retry_after}, not {case.retry_after}")
        charged = sum(round(float(line["cost_usd"]) * 1e9) for line in own)
        price = 0
        if answer.seen is Seen.WHOLE:
            price = round(1000 * (PRICE["prompt"] * answer.prompt_tokens + PRICE["output"] * answer.output_tokens))
            if answer.estimated is not (case.estimated and (not cell.second or met)):
                faults.append(f"a usage with estimated: {answer.estimated}")
        if charged != price or len(own) > 1:
            faults.append(f"{len(own)} lines in the ledger of {charged} n$, not {price} n$")
    answer, calls = trial[-1]
    own = lines.get(answer.request_id, [])
    if cell.second and case.place is None and not calls[0]:
        faults.append(f"the faulty server was not asked in {len(trial)} tries")
    return Outcome(
        fault=case.name,
        stream=cell.stream,
        second=cell.second,
        seen=answer.seen,
        code=answer.code,
        calls=calls,
        billed_nusd=sum(round(float(line["cost_usd"]) * 1e9) for line in own),
        billed_tokens=sum(line["output_tokens"] for line in own if float(line["cost_usd"])),
        seconds=answer.seconds,
        tries=len(trial),
        faults=faults,
    )


def _calls_expected(cell: Cell, wanted: Seen) -> tuple[int, int]:
    if cell.case.place is not None:
        return 0, int(cell.second)
    case = cell.case
    seen_in_part = cell.stream and case.time is Time.MIDDLE
    if not cell.second:
        return 1 if seen_in_part else case.calls, 0
    elsewhere = wanted is Seen.WHOLE or (case.hopeless and not seen_in_part)
    return 1, int(elsewhere and case.time is not Time.NEVER)


async def _ledger(session: aiohttp.ClientSession, installation: Installation) -> dict[str, list[dict[str, Any]]]:
    """The lines of every request."""
    lines: dict[str, list[dict[str, Any]]] = {}
    head = {"authorization": f"Bearer {installation.admin}"}
    query = {"start": "-1h", "limit": "100"}
    while True:
        async with session.get(
            f"{installation.gateway.url}/admin/v1/usage/events", params=query, headers=head
        ) as response:
            page = await response.json()
        for line in page["data"]:
            lines.setdefault(line["request_id"], []).append(line)
        if not page["has_more"]:
            return lines
        query["after"] = page["next"]


def _left(installation: Installation) -> list[str]:
    """What was not given back."""
    requests = [request for server in (installation.faulty, installation.sound) for request in server.truth().requests]
    still_open = sum(request.ended_s is None for request in requests)
    return [f"{still_open} requests are still open at the servers"] if still_open else []


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few faults")
    quick = parser.parse_args().quick
    report = Report("faults", seed=0, quick=quick)
    cases = [case for case in CASES if not quick or case.name in QUICK_CASES]
    outcomes = asyncio.run(measure(cases))
    for outcome in outcomes:
        if outcome.faults:
            print(f"{outcome.fault} {'streamed' if outcome.stream else 'whole'} "
                  f"{'with a second' if outcome.second else 'alone'}: {'; '.join(outcome.faults)}")  # fmt: skip
    middle = {case.name for case in cases if case.time is Time.MIDDLE}
    lost = {case.name for case in cases if case.seen is Seen.REFUSED or case.hopeless}
    seen_in_part = {(name, True) for name in middle}
    recoverable = [o for o in outcomes if o.second and o.fault not in lost and (o.fault, o.stream) not in seen_in_part]
    report.figures["cells"] = msgspec.to_builtins(outcomes)
    report.require("faults", len(cases), at_least=len(QUICK_CASES) if quick else 30)
    report.require("cells other than expected", sum(bool(o.faults) for o in outcomes), at_most=0)
    report.require("recoverable cells whole with a second server",
                   sum(o.seen is Seen.WHOLE for o in recoverable) / len(recoverable), at_least=1)  # fmt: skip
    code = report.finish()
    if not quick and code == 0:
        write(msgspec.to_builtins(outcomes))
    return code


if __name__ == "__main__":
    sys.exit(main())
