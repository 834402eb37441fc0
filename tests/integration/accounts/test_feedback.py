"""Feedback on answers: whose requests it may be about, what a second one does, and what becomes of it in the usage."""

import os
import random
import re
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from statistics import fmean

import httpx
import openai
import pytest
from sqlalchemy import delete, func, select

from maitred.core.errors import ResourceNotFound
from maitred.core.tenancy import Principal, Scope
from maitred.core.usage import Feedback, FeedbackLabel
from maitred.identity.keys import make_key
from maitred.store.database import open_database
from maitred.store.feedback import FeedbackStore
from maitred.store.journal import Journal
from maitred.store.ledger import UsageLedger
from maitred.store.schema import feedback as opinions
from maitred.store.schema import usage
from maitred.store.usage import UsageQueries
from maitred.testing.scripted_openai import DelayDistribution, ServerScript, scripted_openai
from maitred.testing.server_process import serving
from tests.support.usage_events import SetClock, usage_event

EVER = (0.0, 4e9)
GOOD, BAD = Feedback(score=1.0), Feedback(score=0.0, text="No.\nThe 🚀 is \0 older.", tags=("wrong", "dates"))


def caller(*tenants, key="5b1f0c9e7d2a"):
    return Principal(key=key, tenants=tenants, scopes=frozenset({Scope.INFERENCE}))


RESEARCH = caller("research", "acme")


@asynccontextmanager
async def holding(config, folder, events, *, flushed=True):
    """Feedback on a ledger that has these events, and its queries."""
    async with open_database(config) as database:
        ledger = UsageLedger(database, Journal(folder), SetClock())
        for event in events:
            ledger.record(event)
        if flushed:
            await ledger.flush()
        yield FeedbackStore(database, ledger.flush, SetClock()), UsageQueries(database)
        await ledger.close()


async def test_the_second_opinion_takes_the_place_of_the_first(store_config, tmp_path):
    async with holding(store_config, tmp_path / "j", [usage_event(1), usage_event(2)]) as (store, queries):
        first = await store.store(RESEARCH, "req-1", GOOD)
        assert (first.feedback, first.model, first.before) == (GOOD, "tiny", None)
        assert (await store.store(RESEARCH, "req-1", BAD)).before == GOOD
        # What PostgreSQL cannot store is replaced, as in the ledger.
        stored = Feedback(score=0.0, text=BAD.text.replace("\0", "\ufffd"), tags=BAD.tags)
        assert (await store.store(RESEARCH, "req-1", GOOD)).before == stored
        await store.store(RESEARCH, "req-1", BAD)
        lines = await queries.events(*EVER)
        assert [lines.feedback.get(event.id) for event in lines.events] == [None, stored]
        (row,) = (await queries.report(*EVER)).rows
        assert (row.requests, row.rated, row.mean_score) == (2, 1, 0.0)


async def test_lines_are_picked_by_what_was_thought_of_them(store_config, tmp_path):
    async with holding(store_config, tmp_path / "j", [usage_event(number) for number in range(5)]) as (store, queries):
        for number, score in enumerate((0.0, 0.5, 0.49, 1.0)):
            await store.store(RESEARCH, f"req-{number}", Feedback(score=score))
        for verdicts, expected in (
            ([FeedbackLabel.BAD], {"req-0", "req-2"}),
            ([FeedbackLabel.NEUTRAL], {"req-1"}),
            ([FeedbackLabel.GOOD], {"req-3"}),
            ([*FeedbackLabel], {"req-0", "req-1", "req-2", "req-3"}),
            ([], set()),
            (None, {f"req-{number}" for number in range(5)}),
        ):
            lines = await queries.events(*EVER, verdicts=verdicts)
            assert {event.request_id for event in lines.events} == expected, verdicts
        one = await queries.events(*EVER, verdicts=[FeedbackLabel.BAD], limit=1)
        rest = await queries.events(*EVER, verdicts=[FeedbackLabel.BAD], limit=1, after=one.next)
        assert {event.request_id for event in (*one.events, *rest.events)} == {"req-0", "req-2"}
        assert rest.next == ""


@pytest.mark.parametrize(
    ("who", "allowed"),
    [
        (RESEARCH, True),
        (caller("research", "acme", key="another"), True),
        (caller("acme"), True),
        (caller("sales", "acme"), False),
        (caller("beta"), False),
        (caller("5b1f0c9e7d2a"), False),
    ],
)
async def test_requests_of_others_are_as_unknown_as_those_that_never_were(store_config, tmp_path, who, allowed):
    async with holding(store_config, tmp_path / "j", [usage_event(1)]) as (store, queries):
        refusals = []
        for request_id in ("req-1", "req-9"):
            try:
                await store.store(who, request_id, GOOD)
            except ResourceNotFound as error:
                refusals.append(error.message)
        assert len(refusals) == (1 if allowed else 2)
        assert len(set(refusals)) == 1
        assert (await queries.report(*EVER)).rows[0].rated == allowed


async def test_an_answer_can_be_rated_before_its_line_is_in_the_database(store_config, tmp_path):
    async with holding(store_config, tmp_path / "j", [usage_event(1)], flushed=False) as (store, queries):
        assert (await queries.report(*EVER)).rows[0].requests == 0
        await store.store(RESEARCH, "req-1", GOOD)
        assert (await queries.report(*EVER)).rows[0].rated == 1


async def test_of_several_requests_of_one_id_the_last_of_ones_own_is_meant(store_config, tmp_path):
    events = [
        usage_event(1, request_id="same", model="old"),
        usage_event(2, request_id="same", model="new"),
        usage_event(3, request_id="same", model="theirs", tenant="beta", organisation="beta"),
    ]
    async with holding(store_config, tmp_path / "j", events) as (store, _):
        assert (await store.store(RESEARCH, "same", GOOD)).model == "new"


async def test_reports_have_the_mean_of_what_holds_in_the_end_by_side_of_a_rollout(store_config, tmp_path):
    chance = random.Random(7)
    events = [usage_event(n, model=f"v{n % 2}", rollout=("chat=stable", "chat=canary", "")[n % 3]) for n in range(40)]
    scores_given = {}
    async with holding(store_config, tmp_path / "j", events) as (store, queries):
        for _ in range(60):
            number, score = chance.randrange(30), chance.choice([0.0, 0.25, 0.5, 1.0])
            await store.store(RESEARCH, f"req-{number}", Feedback(score=score))
            scores_given[number] = score
        rows = (await queries.report(*EVER, group_by=("model", "rollout"))).rows
        csv = "".join([piece async for piece in queries.csv(*EVER, group_by=("rollout",))])
        lines = "".join([piece async for piece in queries.csv(*EVER)])
    assert sum(row.requests for row in rows) == 40, "nothing counts twice, and what nobody rated counts"
    for row in rows:
        ours = [n for n in scores_given if (events[n].model, events[n].rollout) == (*row.group.values(),)]
        scores = [scores_given[n] for n in ours]
        assert row.rated == len(scores)
        assert row.mean_score == (pytest.approx(fmean(scores)) if scores else None)
    assert csv.startswith("rollout,requests,")
    assert csv.splitlines()[0].endswith(",rated,mean_score")
    assert sum(line.rsplit(",", 1)[1] != "" for line in lines.splitlines()[1:]) == len(scores_given)


async def test_feedback_goes_with_its_line(store_config, tmp_path):
    async with holding(store_config, tmp_path / "j", [usage_event(1), usage_event(2)]) as (store, _):
        for number in (1, 2):
            await store.store(RESEARCH, f"req-{number}", GOOD)
        async with open_database(store_config) as database, database.begin() as connection:
            await connection.execute(delete(usage).where(usage.c.request_id == "req-1"))
            assert await connection.scalar(select(func.count()).select_from(opinions)) == 1


KEYS = {name: make_key().plaintext for name in ("RESEARCH_KEY", "BETA_KEY", "ADMIN_KEY")}
CONFIG = """
server: {allow_unauthenticated: false}
store: {url: {env: DATABASE}}
log: {level: debug, format: json}
models:
  v1: {upstreams: [{url: "%s/v1"}]}
  v2: {upstreams: [{url: "%s/v1"}]}
routing:
  rollouts:
    chat: {stable: v1, canary: v2, weight: 0.5, sticky: session}
tenants:
  acme:
    teams:
      research: {keys: {one: {secret: {env: RESEARCH_KEY}}}}
  beta: {keys: {one: {secret: {env: BETA_KEY}}}}
  house: {keys: {one: {secret: {env: ADMIN_KEY}, scopes: [admin]}}}
"""
SECRET_TEXT = "an-opinion-that-no-log-may-have"


@contextmanager
def gateway(folder, postgres_url):
    with serving(
        "--config",
        str(folder / "maitred.yaml"),
        environment={
            "PYTHONPATH": os.pathsep.join((f"{Path.cwd()}/src", str(Path.cwd()))),
            "DATABASE": postgres_url,
            **KEYS,
        },
        program=("-m", "tests.support.scripted_gateway"),
    ) as server:
        yield server


def client_of(server, key):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[key], max_retries=0)


def rate(server, key, request_id, **fields):
    with client_of(server, key) as client:
        return client.post("/feedback", cast_to=object, body={"request_id": request_id, **fields})


def admin(server, path, **query):
    headers = {"authorization": f"Bearer {KEYS['ADMIN_KEY']}"}
    response = httpx.get(f"{server.url}{path}", params=query, headers=headers)
    assert response.status_code == 200, response.text
    return response


def test_what_one_gateway_answered_is_rated_at_another_and_after_a_restart(tmp_path, postgres_url):
    quick = ServerScript(ttft=DelayDistribution(mean_s=0.01), itl=DelayDistribution(mean_s=0.001))
    with ExitStack() as stack:
        one, other = (stack.enter_context(scripted_openai(quick)) for _ in range(2))
        (tmp_path / "maitred.yaml").write_text(CONFIG % (one.url, other.url))
        with gateway(tmp_path, postgres_url) as first:
            ids = {}
            with client_of(first, "RESEARCH_KEY") as client:
                for number in range(12):
                    answer = client.chat.completions.with_raw_response.create(
                        model="chat",
                        messages=[{"role": "user", "content": "Hello"}],
                        max_tokens=4,
                        extra_headers={"x-session-id": f"s{number}"},
                    )
                    ids.setdefault(answer.headers["x-maitred-rollout"], []).append(answer.headers["x-request-id"])
            assert set(ids) == {"chat=stable", "chat=canary"}
            (stable, *_), (canary, *_) = ids["chat=stable"], ids["chat=canary"]
            # At once, on the gateway that answered, with the official client's own means.
            given = rate(first, "RESEARCH_KEY", stable, score=1, tags=["helpful"])
            assert given == {
                "object": "feedback", "request_id": stable, "model": "v1", "score": 1.0, "verdict": "good",
                "text": "", "tags": ["helpful"], "replaced": False,
            }  # fmt: skip
            log = first.log.read_text()
        with gateway(tmp_path, postgres_url) as second:
            assert rate(second, "RESEARCH_KEY", canary, score=False, text=SECRET_TEXT)["model"] == "v2"
            again = rate(second, "RESEARCH_KEY", stable, score=0.75)
            assert (again["replaced"], again["tags"]) == (True, [])
            with pytest.raises(openai.NotFoundError, match="No request of yours has this id"):
                rate(second, "BETA_KEY", stable, score=0)
            with pytest.raises(openai.BadRequestError, match="from 0 \\(bad\\) to 1 \\(good\\)"):
                rate(second, "RESEARCH_KEY", stable, score=-1)
            with pytest.raises(openai.PermissionDeniedError, match="scope `inference`"):
                rate(second, "ADMIN_KEY", stable, score=0)
            rows = admin(second, "/admin/v1/usage", group_by="rollout").json()["data"]
            rated = {row["rollout"]: (row["rated"], row["mean_score"]) for row in rows}
            assert rated == {"chat=stable": (1, 0.75), "chat=canary": (1, 0.0)}
            (line,) = admin(second, "/admin/v1/usage/events", request_id=canary).json()["data"]
            assert line["feedback"] == {"score": 0.0, "verdict": "bad", "text": SECRET_TEXT, "tags": []}
            metrics = admin(second, "/metrics").text
            assert re.search(r'maitred_feedback_total\{.*version="canary".*\} 1\.0', metrics)
            assert re.search(r'maitred_feedback_score_sum\{.*version="stable".*\} 0\.75', metrics)
            log += second.log.read_text()
        assert "/v1/feedback" in log
        assert SECRET_TEXT not in log
