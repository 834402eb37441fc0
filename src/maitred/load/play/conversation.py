"""Conversations with the server: sends the turns of a session in order, and keeps a record of each."""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable

from maitred.load.measure.record import RequestRecord, UserOutcome
from maitred.load.play.client.answer import StreamTotals
from maitred.load.play.client.caller import PATIENT, LoadClient, UserBehaviour
from maitred.load.play.client.pool import ConnectionPool
from maitred.load.play.doors import StartGate
from maitred.load.play.target import Message, RequestEncoder, TargetCalibration
from maitred.load.spec import LoadSpec
from maitred.load.workload.lengths import parse_distribution
from maitred.load.workload.prompts import PromptWriter
from maitred.load.workload.session import LoadSession, SessionTurn

LATEST_STALL_S = 1.0
"""Longest time after the response's head at which a stalled user stops reading; the moment is random."""
RECENT = 200
"""Number of the last answers that the live medians are computed from."""


class Conversations:
    """Conversations of one run.

    Args:
        spec: Settings of the run.
        block_tokens: Length of the blocks of a trace.
        pool: Pool of connections to the server.
        calibration: Calibration of the target.
        doors: Gate that decides whether a request may still be sent.
        now_s: Returns the time of the run's clock.
        keep_text: Whether the records keep the text of the answers.

    Attributes:
        records: One record per request that was due, in the order in which they were due.
        open: Number of requests that are due and have no outcome yet.
        ended: Outcome -> number of requests that ended so.
        recent: Last requests that ended.
        traffic: Totals of the received data.
        text_seed: Seed of the words.
    """

    def __init__(
        self,
        spec: LoadSpec,
        block_tokens: int,
        pool: ConnectionPool,
        calibration: TargetCalibration,
        doors: StartGate,
        now_s: Callable[[], float],
        *,
        keep_text: bool,
    ) -> None:
        self.records: list[RequestRecord] = []
        self.open = 0
        self.ended: Counter[UserOutcome] = Counter()
        self.recent: deque[RequestRecord] = deque(maxlen=RECENT)
        self.traffic = StreamTotals()
        given = spec.shape.text_seed
        self.text_seed = random.SystemRandom().randrange(1 << 32) if given is None else given
        self._spec = spec
        self._doors = doors
        self._now_s = now_s
        self._keep_text = keep_text
        self._requests = RequestEncoder(spec.target, pool.origin, calibration.model, calibration.dialect)
        self._writer = PromptWriter(
            tokens_per_word=calibration.tokens_per_word,
            template_tokens=calibration.template_tokens,
            block_tokens=block_tokens,
            seed=self.text_seed,
            tokenizer=calibration.tokenizer,
        )
        self._caller = LoadClient(
            pool,
            now_s=now_s,
            retries=spec.clients.retries,
            timeout_s=spec.clients.timeout_s,
            rng=random.Random(f"{spec.seed}:retries"),
            traffic=self.traffic,
        )
        self._keys = {name: tenant.api_key.reveal() for name, tenant in spec.tenants.items() if tenant.api_key}
        self._default_key = spec.target.api_key.reveal() if spec.target.api_key else None
        self._leave = parse_distribution(spec.clients.cancel_after_s, what="clients.cancel_after_s")
        self._places = asyncio.Semaphore(spec.clients.max_open) if spec.clients.max_open else None

    async def hold(self, session: LoadSession, due_s: float) -> float:
        """Sends the turns of a session, the first when it is due; returns when the last answer ended.

        A conversation ends when an answer fails, because its user has nothing to reply to.
        """
        history: list[Message] = []
        if session.prefix is not None:
            prefix = self._writer.prefix(session.prefix, session.prefix_tokens)
            history.append({"role": "system", "content": prefix})
        last = len(session.turns) - 1
        for number, turn in enumerate(session.turns):
            if number:
                due_s += turn.think_s
            if not await self._doors.admit(due_s):
                break
            record = RequestRecord(
                session=session.id,
                turn=number,
                tenant=session.tenant,
                intended_s=due_s,
                asked_tokens=turn.output_tokens,
            )
            question = {"role": "user", "content": self._question(session, number, turn)}
            messages = [question] if turn.blocks else [*history, question]
            answer = await self._ask(record, messages, keep_text=self._keep_text or number < last)
            due_s = record.ended_s
            if record.outcome is not UserOutcome.COMPLETE:
                break
            if number < last:
                history += [question, {"role": "assistant", "content": "".join(answer)}]
        return due_s

    def _question(self, session: LoadSession, number: int, turn: SessionTurn) -> str:
        if turn.blocks:
            return self._writer.blocks(turn.blocks, turn.prompt_tokens)
        return self._writer.message(session.id, number, turn.prompt_tokens)

    async def _ask(self, record: RequestRecord, messages: list[Message], *, keep_text: bool) -> list[str]:
        """Sends one question; the record gets an outcome in every case."""
        self.records.append(record)
        self.open += 1
        tenant = record.tenant
        try:
            request = self._requests.encode(
                messages,
                record.asked_tokens,
                key=self._keys.get(tenant, self._default_key),
                user=tenant if self._spec.tenants else None,
            )
            record.late_s = self._now_s() - record.intended_s
            if self._places is None:
                return await self._caller.ask(record, request, self._behaviour(record), keep_text=keep_text)
            async with self._places:
                return await self._caller.ask(record, request, self._behaviour(record), keep_text=keep_text)
        finally:
            if record.outcome is UserOutcome.UNFINISHED:
                record.ended_s = self._now_s()
            if not self._keep_text:
                record.text = None
            self.open -= 1
            self.ended[record.outcome] += 1
            self.recent.append(record)

    def _behaviour(self, record: RequestRecord) -> UserBehaviour:
        """Draws the behaviour of this user; the same seed gives the same behaviour."""
        clients = self._spec.clients
        if not clients.cancel_share and not clients.stall_share:
            return PATIENT
        lot = random.Random(f"{self._spec.seed}:manners:{record.session}:{record.turn}")
        leaves, stalls = lot.random() < clients.cancel_share, lot.random() < clients.stall_share
        return UserBehaviour(
            leave_after_s=self._leave.draw(lot) if leaves else None,
            stall_after_s=lot.uniform(0, LATEST_STALL_S) if stalls else None,
            stall_s=clients.stall_s,
        )
