"""Scopes of similar questions for operators: what the administration and its commands say, reset and remove."""

import json

import pytest

from maitred.cache.semantic.evidence import BelowTest, upper_bound
from maitred.core.request import LabelledPair
from maitred.core.semantic_scope import CertificationRecord, ScopeCounts, ScopeRecord
from tests.integration.accounts.test_admin_cli import Operator, rows
from tests.support.admin_app import administered

LEARNING = '["chat","tenant","acme"]'
CERTIFIED = '["chat","key","research","acme","k1"]'
CERTIFYING = '["code","organisation","acme"]'
STUCK = '["code","public"]'
TRIPPED = '["code","tenant","other"]'
SCORING = '["code","tenant","research","acme"]'
NAMES = sorted([LEARNING, CERTIFIED, CERTIFYING, STUCK, TRIPPED, SCORING])


def certification(lookups, *false_hits, **more):
    return CertificationRecord(thresholds=(3.0, 1.5), lookups=lookups, false_hits=false_hits, **more)


RECORDS = {
    LEARNING: ScopeRecord(encoder="e1", labels=3, counts=ScopeCounts(lookups=40, same=2, different=1)),
    SCORING: ScopeRecord(encoder="e1", labels=1000, verifier="v1", scores=(0.5, None)),
    CERTIFYING: ScopeRecord(
        encoder="e1", labels=1000, verifier="v1", certification=certification(300, 1, 2), budget=0.005, confidence=0.95
    ),
    STUCK: ScopeRecord(
        encoder="e1",
        labels=1000,
        verifier="v1",
        certification=certification(90, 40, 0, open=0),
        budget=0.005,
        confidence=0.95,
    ),
    CERTIFIED: ScopeRecord(
        encoder="e1",
        labels=1000,
        verifier="v1",
        certification=certification(1500, 0, 9),
        budget=0.005,
        confidence=0.95,
        counts=ScopeCounts(
            lookups=1234567, audits=1500, same=1200, different=30, served=200, false_hits=1, saved_tokens=54321
        ),
    ),
    TRIPPED: ScopeRecord(
        encoder="e1",
        labels=1000,
        verifier="v1",
        certification=certification(1500, 7, 0, tripped=True),
        budget=0.005,
        confidence=0.95,
    ),
}
LABELS = [
    LabelledPair("How do I pay?", "How can I pay?", same=True, surroundings=(0.1, 0.2, 0.3)),
    LabelledPair("Where is my card?", "Where is my money?", same=False, surroundings=(0.1, 0.2, 0.3)),
    LabelledPair("Is it\nopen?", "Are you open?", same=True, surroundings=(0.1, 0.2, 0.3)),
]


ONE_FALSE = BelowTest(0.005, 0.95).fewest_trials(1)


def bound(lookups, false_hits):
    """A bound as the command shows it."""
    return f"{100 * upper_bound(lookups, false_hits, 0.95):.3f} % of 0.5 %"


@pytest.fixture
async def operator(tmp_path):
    async with administered(tmp_path) as system:
        for scope, record in RECORDS.items():
            for label in LABELS if scope == LEARNING else LABELS[1:2] if scope == TRIPPED else [None]:
                after = (record, [] if label is None else [label])
                await system.scopes.change(scope, "e1", lambda _, after=after: after)
        yield Operator(system)


async def shown(operator):
    listed = await operator.system.done("GET", "cache/semantic")
    return {scope["scope"]: scope for scope in listed["data"]}


async def test_scopes_are_shown(operator):
    scopes = await shown(operator)
    assert list(scopes) == NAMES
    assert {name: (scope["state"], scope["phase"]) for name, scope in scopes.items()} == {
        LEARNING: ("shadow", "learning"),
        SCORING: ("shadow", "scoring"),
        CERTIFYING: ("shadow", "certifying"),
        STUCK: ("shadow", "certifying"),
        CERTIFIED: ("certified", "certified"),
        TRIPPED: ("tripped", "tripped"),
    }
    assert {name: (scope["progress"], scope["progress_needed"]) for name, scope in scopes.items()} == {
        LEARNING: (3, 1000),
        SCORING: (2, 400),
        CERTIFYING: (300, ONE_FALSE),
        STUCK: (90, None),
        CERTIFIED: (1500, None),
        TRIPPED: (1500, None),
    }
    certified = scopes[CERTIFIED]
    assert 0 < certified.pop("false_hit_bound") <= 0.005
    assert certified.pop("updated_at").endswith("Z")
    assert certified == {
        "scope": CERTIFIED,
        "model": "chat",
        "shared_by": "key",
        "key": "k1",
        "tenant": "research",
        "organisation": "acme",
        "state": "certified",
        "phase": "certified",
        "progress": 1500,
        "progress_needed": None,
        "threshold": 3.0,
        "budget": 0.005,
        "labels": 1000,
        "same": 1200,
        "different": 30,
        "lookups": 1234567,
        "audits": 1500,
        "served": 200,
        "saved_tokens": 54321,
        "false_hits": 1,
        "encoder": "e1",
        "verifier": "v1",
    }
    assert (scopes[LEARNING]["false_hit_bound"], scopes[LEARNING]["threshold"]) == (None, None)


async def test_who_shares_answers_is_shown(operator):
    owners = {
        name: (scope["shared_by"], scope["key"], scope["tenant"], scope["organisation"])
        for name, scope in (await shown(operator)).items()
    }
    assert owners == {
        LEARNING: ("tenant", None, "acme", "acme"),
        SCORING: ("tenant", None, "research", "acme"),
        CERTIFIED: ("key", "k1", "research", "acme"),
        CERTIFYING: ("organisation", None, None, "acme"),
        STUCK: ("public", None, None, None),
        TRIPPED: ("tenant", None, "other", "other"),
    }


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ({"model": "chat"}, {LEARNING, CERTIFIED}),
        ({"tenant": "acme"}, {LEARNING, CERTIFIED, CERTIFYING, SCORING}),
        ({"tenant": "research"}, {CERTIFIED, SCORING}),
        ({"tenant": "acme", "model": "code"}, {CERTIFYING, SCORING}),
        ({"tenant": "nobody"}, set()),
    ],
)
async def test_scopes_are_filtered(operator, query, names):
    listed = await operator.system.done("GET", "cache/semantic", query=query)
    assert {scope["scope"] for scope in listed["data"]} == names
    assert (listed["has_more"], listed["next"]) == (False, None)


@pytest.mark.parametrize("path", ["cache/semantic", "cache/semantic/labels"])
@pytest.mark.parametrize("limit", [1, 2, 4])
async def test_pages_make_up_the_list(operator, path, limit):
    whole = (await operator.system.done("GET", path))["data"]
    found, after = [], ""
    while after is not None:
        page = await operator.system.done("GET", path, query={"limit": limit, "after": after})
        assert len(page["data"]) <= limit
        assert page["has_more"] == (page["next"] is not None)
        found, after = found + page["data"], page["next"]
    assert found == whole


async def test_labels_are_shown_the_newest_first(operator):
    listed = await operator.system.done("GET", "cache/semantic/labels", query={"scope": LEARNING})
    assert [(label["asked"], label["cached"], label["same"]) for label in listed["data"]] == [
        ("Is it\nopen?", "Are you open?", True),
        ("Where is my card?", "Where is my money?", False),
        ("How do I pay?", "How can I pay?", True),
    ]
    assert all(label["scope"] == LEARNING and label["created_at"].endswith("Z") for label in listed["data"])


@pytest.mark.parametrize(
    ("query", "number"),
    [
        ({}, 4),
        ({"model": "chat"}, 3),
        ({"tenant": "other"}, 1),
        ({"tenant": "other", "model": "chat"}, 0),
        ({"same": "true"}, 2),
        ({"same": "false"}, 2),
        ({"same": "false", "scope": LEARNING}, 1),
    ],
)
async def test_labels_are_filtered(operator, query, number):
    assert len((await operator.system.done("GET", "cache/semantic/labels", query=query))["data"]) == number


@pytest.mark.parametrize(
    ("query", "message"),
    [({"after": "x"}, "after must be"), ({"after": "9" * 19}, "after must be"), ({"limit": "0"}, "limit must be")],
)
async def test_what_is_no_page_is_refused(operator, query, message):
    error = await operator.system.refused("GET", "cache/semantic/labels", 400, query=query)
    assert message in error["message"]


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        ({"scope": TRIPPED}, {TRIPPED}),
        ({"model": "chat"}, {LEARNING, CERTIFIED}),
        ({"tenant": "acme", "model": "code"}, {CERTIFYING, SCORING}),
        ({"scope": TRIPPED, "model": "chat"}, set()),
        ({"all": True}, set(NAMES)),
    ],
)
@pytest.mark.parametrize("verb", ["reset", "remove"])
async def test_what_is_selected_changes_and_the_service_hears_of_it(operator, verb, selection, names):
    system, before = operator.system, await shown(operator)
    if verb == "reset":
        changed = await system.done("POST", "cache/semantic/reset", selection)
    else:
        query = {name: "true" if value is True else value for name, value in selection.items()}
        changed = await system.done("DELETE", "cache/semantic", query=query)
    assert changed == {"object": "changed_scopes", "changed": len(names)}
    assert set(system.changed_scopes) == names
    after = await shown(operator)
    for name in NAMES:
        if name not in names:
            assert after[name] == before[name]
        elif verb == "remove":
            assert name not in after
        else:
            assert (after[name]["phase"], after[name]["labels"], after[name]["verifier"]) == ("learning", 0, "")
    labels = await system.done("GET", "cache/semantic/labels")
    assert names.isdisjoint(label["scope"] for label in labels["data"])


async def test_labels_can_be_kept_for_the_next_verifier(operator):
    body = {"scope": TRIPPED, "keep_labels": True}
    await operator.system.done("POST", "cache/semantic/reset", body)
    tripped = (await shown(operator))[TRIPPED]
    assert (tripped["phase"], tripped["labels"], tripped["threshold"]) == ("training", 1000, None)
    listed = await operator.system.done("GET", "cache/semantic/labels", query={"scope": TRIPPED})
    assert len(listed["data"]) == 1


async def test_what_an_encoder_of_the_past_has_learnt_can_be_removed(operator):
    system = operator.system
    for number, name in enumerate(NAMES[:3]):
        old = ScopeRecord(encoder=f"e{number % 2 + 2}")
        await system.scopes.change(name, old.encoder, lambda _, old=old: (old, []))

    async def listed():
        page = await system.done("GET", "cache/semantic", query={"limit": 4})
        rest = await system.done("GET", "cache/semantic", query={"after": page["next"]})
        return sorted((scope["encoder"], scope["scope"]) for scope in page["data"] + rest["data"])

    now = [("e1", name) for name in NAMES]
    assert await listed() == [*now, ("e2", NAMES[0]), ("e2", NAMES[2]), ("e3", NAMES[1])]
    remove = ("cache", "semantic", "remove", "--encoder")
    assert await operator.does(*remove, "e2", "--scope", NAMES[0]) == "Removed 1 scope.\n"
    assert await listed() == [*now, ("e2", NAMES[2]), ("e3", NAMES[1])]
    assert await operator.does(*remove, "e3") == "Removed 1 scope.\n"
    assert await operator.does("cache", "semantic", "reset", "--encoder", "e2") == "Reset 1 scope.\n"
    assert await listed() == [*now, ("e2", NAMES[2])]
    assert {scope["phase"] for scope in (await shown(operator)).values()} > {"certified", "tripped"}


async def test_scopes_go_with_their_tenant(operator):
    for tenant in ({"id": "acme"}, {"id": "research", "parent": "acme"}):
        await operator.system.done("POST", "tenants", tenant)
    await operator.system.done("DELETE", "tenants/research")
    assert set(await shown(operator)) == {LEARNING, CERTIFYING, STUCK, TRIPPED}
    await operator.system.done("DELETE", "tenants/acme")
    assert set(await shown(operator)) == {STUCK, TRIPPED}


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ({}, "Which scopes are meant?"),
        ({"model": ""}, "Which scopes are meant?"),
        ({"all": True, "tenant": "acme"}, "all=true means all scopes"),
        ({"keep": True}, "keep"),
    ],
)
async def test_nothing_changes_where_it_is_not_clear_what(operator, selection, message):
    before = await shown(operator)
    query = {name: "true" if value is True else value for name, value in selection.items()}
    for method, path, more in (
        ("POST", "cache/semantic/reset", {"body": selection}),
        ("DELETE", "cache/semantic", {"query": query}),
    ):
        error = await operator.system.refused(method, path, 400, **more)
        assert message in error["message"]
    assert await shown(operator) == before
    assert operator.system.changed_scopes == []


async def test_only_administrators(operator):
    for method, path in (
        ("GET", "cache/semantic"),
        ("GET", "cache/semantic/labels"),
        ("POST", "cache/semantic/reset"),
        ("DELETE", "cache/semantic"),
    ):
        response = await operator.system.call(method, path, headers={"authorization": "Bearer sk-none"})
        assert response.status_code == 401


async def test_commands(operator):
    assert rows(await operator.does("cache", "semantic", "list")) == [
        ["MODEL", "WHO", "ENCODER", "STATE", "PROGRESS", "BOUND", "LOOKUPS", "SERVED", "SAVED TOKENS"],
        [
            "chat",
            "key k1 of research",
            "e1",
            "certified",
            "certified",
            "0.500 % of 0.5 %",
            "1,234,567",
            "200",
            "54,321",
        ],
        ["chat", "tenant acme", "e1", "shadow", "learning: 3 of 1,000 labels", "-", "40", "0", "0"],
        [
            "code",
            "organisation acme",
            "e1",
            "shadow",
            f"certifying: 300 of {ONE_FALSE:,} audits",
            bound(300, 1),
            "0",
            "0",
            "0",
        ],
        ["code", "everybody", "e1", "shadow", "certifying: cannot pass any more", bound(90, 40), "0", "0", "0"],
        ["code", "tenant other", "e1", "tripped", "tripped", bound(1500, 7), "0", "0", "0"],
        ["code", "tenant research", "e1", "shadow", "scoring: 2 of 400 scores", "-", "0", "0", "0"],
    ]
    listed = json.loads(await operator.does("cache", "semantic", "list", "--model", "chat", "--json"))
    assert [scope["scope"] for scope in listed] == [CERTIFIED, LEARNING]
    labels = rows(await operator.does("cache", "semantic", "labels", "--tenant", "acme", "--limit", "2"))
    assert labels[0] == ["COMPARED", "SAME", "ASKED", "CACHED"]
    assert [label[1:] for label in labels[1:]] == [
        ["yes", "Is it open?", "Are you open?"],
        ["no", "Where is my card?", "Where is my money?"],
    ]
    wrong = json.loads(await operator.does("cache", "semantic", "labels", "--different", "--scope", LEARNING, "--json"))
    assert [label["asked"] for label in wrong] == ["Where is my card?"]
    reset = ("cache", "semantic", "reset")
    assert await operator.does(*reset, "--tenant", "other", "--keep-labels") == "Reset 1 scope.\n"
    assert (await shown(operator))[TRIPPED]["phase"] == "training"
    assert await operator.does(*reset, "--model", "chat", "--tenant", "research") == "Reset 1 scope.\n"
    assert await operator.does("cache", "semantic", "remove", "--model", "code") == "Removed 4 scopes.\n"
    for verb in ("reset", "remove"):
        assert "Pass --model, --tenant, --scope or --encoder" in await operator.cannot("cache", "semantic", verb)
        assert "all=true" in await operator.cannot("cache", "semantic", verb, "--all", "--model", "chat")
    assert await operator.does("cache", "semantic", "remove", "--all") == "Removed 2 scopes.\n"
    assert await shown(operator) == {}
