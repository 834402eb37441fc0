"""Whatever is sent to the Responses API of a running server is answered as its own description says, or refused.

10,000 requests with a seed, to the bundled model. A request is drawn from what the API knows (the items, parts, tools
and fields of the official SDK's types) and then changed at random places: another type, an extreme number, text of any
kind, deep nesting, a member that nobody knows, a member that is missing. Half ask for a stream. No answer may have a
status of 500 or above, none may take longer than `PATIENCE_S`, and each one (whole, stream or error) has to be valid
by the schemas in the server's ``/openapi.json``. At the end nothing may be held.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import aiohttp
import uvloop
from jsonschema import Draft202012Validator

from benchmarks.support.fuzzed_requests import fuzzed_request
from benchmarks.support.report import Report
from benchmarks.support.tenant_gateway import settled
from maitred.testing.server_process import ServerProcess, serving

SEED = 20261128
REQUESTS, QUICK_REQUESTS = 10_000, 200
AT_ONCE = 16
PATIENCE_S = 60.0
SHOWN = 10
HELD = ("maitred_in_flight", "maitred_leases", "maitred_engine_running", "maitred_engine_waiting")
_ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


def main() -> int:
    """Runs the benchmark; the exit code says whether every bar is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_REQUESTS} requests")
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    report = Report("responses_fuzz", seed=arguments.seed, quick=arguments.quick)
    with serving() as server:
        uvloop.run(run(report, server, arguments.seed, QUICK_REQUESTS if arguments.quick else REQUESTS))
        report.require("exit code", server.stop(), at_most=0)
    return report.finish()


async def run(report: Report, server: ServerProcess, seed: int, requests: int) -> None:
    """Sends all requests, and counts what is wrong with their answers."""
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(base_url=server.url, timeout=timeout) as session:
        async with session.get("/openapi.json") as described:
            judge = AnswerJudge(await described.json())
        numbers = iter(range(requests))

        async def send_some() -> None:
            for number in numbers:
                await _send(session, judge, fuzzed_request(random.Random(f"{seed}/{number}")), number)

        began_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(send_some())
    samples = await settled(server)
    report.figures = {
        "requests": requests,
        "seconds": round(time.monotonic() - began_s, 1),
        "answers": dict(judge.answers.most_common()),
        "wrong": dict(judge.wrong),
        "first_faults": judge.faults,
    }
    print(report.figures, flush=True)
    for name in ("server errors", "hangs", "connections broken", "answers beside the description"):
        report.require(name, judge.wrong[name], at_most=0)
    report.require("answers of 200", sum(judge.answers[kind] for kind in ("200", "200 stream")), at_least=requests / 20)
    report.require("held afterwards", sum(samples.get(name, 0.0) for name in HELD), at_most=0)
    blocks = samples["maitred_engine_kv_blocks_total"] - samples["maitred_engine_kv_blocks_free"]
    report.require("KV blocks held", blocks, at_most=0)


async def _send(session: aiohttp.ClientSession, judge: "AnswerJudge", body: Any, number: int) -> None:  # noqa: ANN401
    try:
        async with session.post("/v1/responses", data=json.dumps(body), headers=_JSON) as answer:
            content = await answer.read()
            judge.take(number, body, answer.status, answer.content_type, content)
    except TimeoutError:
        judge.fault("hangs", number, body, "")
    except aiohttp.ClientError as error:
        judge.fault("connections broken", number, body, repr(error))


_JSON = {"content-type": "application/json"}


class AnswerJudge:
    """Judge of answers by the server's description.

    Args:
        described: The server's ``/openapi.json``.

    Attributes:
        answers: Answers by their kind.
        wrong: What was wrong, by name.
        faults: The first of the faults, with their requests.
    """

    def __init__(self, described: Mapping[str, Any]) -> None:
        operation = described["paths"]["/v1/responses"]["post"]
        self._described = described
        self._whole = self._validator(operation["responses"]["200"]["content"]["application/json"]["schema"])
        self._event = self._validator({"$ref": "#/components/schemas/ResponseEvent"})
        refusals = {key: value for key, value in operation["responses"].items() if not key.startswith("2")}
        self._refusals = {
            status: self._validator(self._resolved(answer)["content"]["application/json"]["schema"])
            for status, answer in refusals.items()
        }
        self.answers: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self.faults: list[dict[str, Any]] = []

    def take(self, number: int, body: Any, status: int, kind: str, content: bytes) -> None:  # noqa: ANN401 - JSON
        """Judges one answer."""
        streams = kind == "text/event-stream"
        self.answers[f"{status} stream" if streams else str(status)] += 1
        if status >= 500:
            self.fault("server errors", number, body, content.decode())
            return
        try:
            problem = self._stream_problem(content) if streams else self._problem(status, json.loads(content))
        except ValueError as error:
            problem = f"not JSON: {error}"
        if problem:
            self.fault("answers beside the description", number, body, problem)

    def fault(self, name: str, number: int, body: Any, what: str) -> None:  # noqa: ANN401 - JSON
        """Counts a fault, and keeps the first ones."""
        self.wrong[name] += 1
        if len(self.faults) < SHOWN:
            self.faults.append({"fault": name, "number": number, "what": what[:1000], "request": repr(body)[:1000]})

    def _stream_problem(self, content: bytes) -> str:
        events = [json.loads(line[6:]) for line in content.split(b"\n") if line.startswith(b"data: {")]
        for event in events:
            if event["type"] != "error" and (problem := _first_error(self._event, event)):
                return problem
        if not events or events[-1]["type"] not in _ENDS or b"data: [DONE]" not in content:
            return f"the stream does not come to its end: {content[-200:]!r}"
        return _first_error(self._whole, events[-1]["response"]) if "response" in events[-1] else ""

    def _problem(self, status: int, answer: Any) -> str:  # noqa: ANN401 - JSON
        if status == 200:
            return _first_error(self._whole, answer)
        described = self._refusals.get(str(status)) or self._refusals.get("default")
        return f"{status} is not described" if described is None else _first_error(described, answer)

    def _validator(self, schema: Mapping[str, Any]) -> Draft202012Validator:
        return Draft202012Validator({**schema, "components": self._described["components"]})

    def _resolved(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        name = answer.get("$ref", "").rpartition("/")[2]
        resolved: Mapping[str, Any] = self._described["components"]["responses"][name] if name else answer
        return resolved


def _first_error(validator: Draft202012Validator, value: Any) -> str:  # noqa: ANN401 - JSON
    error = next(validator.iter_errors(value), None)
    return "" if error is None else f"{error.json_path}: {error.message}"


if __name__ == "__main__":
    sys.exit(main())
