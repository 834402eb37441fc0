"""The plan: what it takes, and a sentence for everything that cannot be played."""

import os
from pathlib import Path

import msgspec
import pytest
import yaml

from maitred.config.document import read_document
from maitred.core.errors import ConfigInvalid
from maitred.load.chaos.burst import burst_spec
from maitred.load.chaos.plan import ChaosFault, ChaosPlan, roles
from maitred.load.chaos.rehearsal import load_spec
from maitred.load.chaos.rules import check
from maitred.load.spec import LoadSpec

EXAMPLES = sorted(Path("examples/chaos").glob("*.yaml"))
SERVE = {"serve": "maitred serve --port {port}"}
LINKED = {**SERVE, "links": {"front": {}, "redis": {"to": "127.0.0.1:6379", "store": True}}}


def plan(faults=(), installation=None, **sections):
    sections = {"load": {"arrivals": {"users": 2}}} | sections
    return msgspec.convert({"installation": installation or LINKED, "faults": list(faults), **sections}, ChaosPlan)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_can_be_played(path):
    found = read_document(ChaosPlan, path, os.environ, subject="The chaos plan")
    check(found)
    assert found.faults
    assert found.load.bounds.duration_s > max(fault.at_s + (fault.for_s or 0) for fault in found.faults)


def test_there_are_examples_for_every_kind_of_fault_but_those_that_need_a_store():
    kinds = {fault["kind"] for path in EXAMPLES for fault in yaml.safe_load(path.read_text())["faults"]}
    assert kinds == set(msgspec.inspect.type_info(ChaosFault).fields[0].type.type.values) - {"store_down"}


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "kill", "target": "engine"},
        {"kind": "kill", "target": "gateway", "for_s": 2},
        {"kind": "hang", "target": "engine", "for_s": 2},
        {"kind": "slow", "target": "engine", "for_s": 2, "speed": 0.5},
        {"kind": "partition", "target": "front", "for_s": 2},
        {"kind": "partition", "target": "front", "for_s": 2, "direction": "to_server"},
        {"kind": "partition", "target": "front", "for_s": 2, "how": "reset"},
        {"kind": "store_down", "target": "redis", "for_s": 2, "how": "blackhole"},
        {"kind": "memory", "target": "engine", "for_s": 2, "spare_bytes": 0},
        {"kind": "clock_jump", "for_s": 2, "jump_s": -3600},
        {"kind": "leave", "clients": 5},
        {"kind": "stall", "clients": 5, "for_s": 2},
    ],
)
def test_sound_faults(fault):
    check(plan([{"at_s": 1, **fault}]))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"kind": "hang", "target": "engine"}, "for_s must be set."),
        ({"kind": "hang", "target": "engin", "for_s": 1}, "no process 'engin'. Processes: gateway, engine."),
        ({"kind": "partition", "target": "back", "for_s": 1}, "no link 'back'. Links: front, redis."),
        ({"kind": "kill", "target": "engine", "speed": 0.5}, "speed has no meaning here. Remove it."),
        ({"kind": "kill", "target": "engine", "for_s": 1}, "only the process that serve starts can be started again"),
        ({"kind": "slow", "target": "engine", "for_s": 1}, "speed must be set."),
        ({"kind": "leave", "clients": 2, "target": "engine"}, "target has no meaning here."),
        ({"kind": "partition", "target": "front", "for_s": 1, "how": "kill"}, "'kill' is not for links."),
        (
            {"kind": "partition", "target": "front", "for_s": 1, "how": "reset", "direction": "to_client"},
            "Only a blackhole can have one.",
        ),
        ({"kind": "store_down", "target": "engine", "how": "kill"}, "'engine' is no store."),
        ({"kind": "store_down", "target": "redis", "how": "kill"}, "needs a process, and 'redis' is a link."),
        ({"kind": "store_down", "target": "redis", "how": "refuse"}, "for_s must be set."),
    ],
)
def test_unsound_faults(fault, says):
    with pytest.raises(ConfigInvalid) as caught:
        check(plan([{"at_s": 1, **fault}]))
    assert f"faults[0] ({fault['kind']}): " in caught.value.message
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("installation", "says"),
    [
        ({}, "set serve, the command line to start, or the url"),
        ({"serve": "x {port}", "pid": 7}, "Keep one of them"),
        ({"serve": "maitred serve"}, "must hold {port}"),
        ({**SERVE, "processes": {"replica": {}}}, "set child_of or pid_file"),
        ({**SERVE, "processes": {"replica": {"child_of": "nobody"}}}, "'nobody' leads to no process"),
        ({**SERVE, "processes": {"a": {"child_of": "b"}, "b": {"child_of": "a"}}}, "leads to no process"),
        ({**SERVE, "links": {"x": {"to": "redis"}}}, "must be HOST:PORT, not 'redis'"),
        ({**SERVE, "links": {"x": {"listen": "h:99999"}}}, "must be HOST:PORT"),
        ({**SERVE, "clients_through": "x"}, "no link 'x'. The plan has no links."),
    ],
)
def test_unsound_installations(installation, says):
    with pytest.raises(ConfigInvalid) as caught:
        check(msgspec.convert({"installation": installation}, ChaosPlan))
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("load", "says"),
    [
        ({}, "users or rate_per_s, or a trace"),
        ({"arrivals": {"users": 1, "rate_per_s": 1}}, "Keep one of them"),
        ({"arrivals": {"users": 1}, "target": {"body": "{"}}, "must be a JSON object, not '{'"),
    ],
)
def test_unsound_loads(load, says):
    with pytest.raises(ConfigInvalid) as caught:
        check(plan(load=load))
    assert says in caught.value.message


def test_all_faults_are_reported_at_once():
    with pytest.raises(ConfigInvalid) as caught:
        check(plan([{"kind": "hang", "at_s": 1}, {"kind": "stall", "at_s": 2}], load={"target": {"body": "[]"}}))
    for part in ("load.target.body", "faults[0] (hang): for_s", "faults[0] (hang): target", "faults[1] (stall)"):
        assert part in caught.value.message


def test_a_clock_can_only_be_set_for_what_is_started_here():
    running = {"url": "http://127.0.0.1:1", "pid": 7}
    with pytest.raises(ConfigInvalid, match=r"set installation\.serve"):
        check(plan([{"kind": "clock_jump", "at_s": 1, "for_s": 1, "jump_s": 5}], running))


@pytest.mark.parametrize("target", ["gateway", "engine"])
def test_of_a_server_that_is_only_an_address_no_process_is_known(target):
    with pytest.raises(ConfigInvalid, match=f"no process '{target}'. The plan has no processes"):
        check(plan([{"kind": "kill", "target": target, "at_s": 1}], {"url": "http://127.0.0.1:1"}))


@pytest.mark.parametrize(
    ("one", "other", "collide"),
    [
        ({"kind": "hang", "at_s": 1, "for_s": 3}, {"kind": "slow", "speed": 0.5, "at_s": 3, "for_s": 1}, True),
        ({"kind": "hang", "at_s": 1, "for_s": 2}, {"kind": "slow", "speed": 0.5, "at_s": 3, "for_s": 1}, False),
        ({"kind": "hang", "at_s": 1, "for_s": 3}, {"kind": "disk_full", "at_s": 2, "for_s": 1}, False),
        ({"kind": "disk_full", "at_s": 5, "for_s": 3}, {"kind": "disk_full", "at_s": 4, "for_s": 2}, True),
        ({"kind": "hang", "at_s": 1, "for_s": 3}, {"kind": "kill", "at_s": 2}, False),
    ],
)
def test_faults_that_would_undo_each_other_are_refused(one, other, collide):
    both = plan([{"target": "engine", **one}, {"target": "engine", **other}])
    if not collide:
        check(both)
        return
    with pytest.raises(ConfigInvalid, match="of engine at once"):
        check(both)


def test_the_plans_roles_win_over_the_known_ones():
    own = {**SERVE, "processes": {"engine": {"pid_file": "/run/engine.pid"}, "store": {"child_of": "gateway"}}}
    known = roles(plan(installation=own).installation)
    assert known["engine"].pid_file == "/run/engine.pid"
    assert known["engine"].child_of is None
    assert set(known) == {"engine", "gateway", "store"}


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        ("{}", {"temperature": 0, "seed": 7}),
        ('{"temperature": 0.8, "top_p": 0.9}', {"temperature": 0.8, "seed": 7, "top_p": 0.9}),
        ('{"seed": null}', {"temperature": 0, "seed": None}),
    ],
)
def test_answers_do_not_depend_on_chance(body, fields):
    spec = load_spec(plan(load={"seed": 7, "target": {"body": body}}), "http://127.0.0.1:9")
    assert msgspec.json.decode(spec.target.body) == fields
    assert spec.target.url == "http://127.0.0.1:9"


def test_the_users_of_a_burst_come_at_once_and_once():
    leave = burst_spec(LoadSpec(seed=3), ChaosFault(kind="leave", at_s=1, clients=20), 1)
    assert (leave.arrivals.users, leave.bounds.requests, leave.clients.retries) == (20, 20, 0)
    assert (leave.clients.cancel_share, leave.clients.cancel_after_s) == (1.0, "1")
    stall = burst_spec(LoadSpec(seed=3), ChaosFault(kind="stall", at_s=1, for_s=4, clients=5), 2)
    assert (stall.clients.stall_share, stall.clients.stall_s, stall.clients.cancel_share) == (1.0, 4.0, 0.0)
    assert len({3, leave.seed, stall.seed}) == 3
