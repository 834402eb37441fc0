"""From a spec to sessions: open and closed loop, conversations, tenants, prefixes, and what contradicts itself."""

import gzip
import itertools
from pathlib import Path

import pytest

from maitred.core.errors import ConfigInvalid, InvalidRequest
from maitred.load.spec import ArrivalsSpec, LoadSpec, LoadTenant, ShapeSpec
from maitred.load.workload.generator import make_workload
from maitred.load.workload.session import SessionTurn
from maitred.load.workload.sizing import LengthScaling

DATA = Path(__file__).parents[3] / "data" / "traces"
MOONCAKE = f"mooncake:{DATA / 'mooncake.jsonl'}"
AGENTIC = f"agentic:{DATA / 'agentic.jsonl.xz'}"
USERS, RATE, NEITHER = ArrivalsSpec(users=3), ArrivalsSpec(rate_per_s=5), ArrivalsSpec()


def sessions(count=None, *, arrivals=RATE, tenants=None, seed=0, **shape):
    spec = LoadSpec(arrivals=arrivals, shape=ShapeSpec(**shape), tenants=tenants or {}, seed=seed)
    return list(itertools.islice(make_workload(spec).sessions, count))


def test_the_usual_session_is_one_question():
    first, second = sessions(2)
    assert first.turns == second.turns == (SessionTurn(prompt_tokens=200, output_tokens=100),)
    assert (first.id, second.id) == (0, 1)
    assert 0 < first.at_s < second.at_s
    assert first.tenant == "default"
    assert first.prefix is None


def test_in_a_closed_loop_nobody_has_a_time_and_there_is_always_a_next():
    assert {session.at_s for session in sessions(1000, arrivals=USERS)} == {None}


def test_a_conversation_has_turns_and_pauses_but_none_before_the_first():
    for session in sessions(200, turns="uniform:1..4", think_s="uniform:1..2"):
        assert 1 <= len(session.turns) <= 4
        assert session.turns[0].think_s == 0
        assert all(1 <= turn.think_s <= 2 for turn in session.turns[1:])


def test_lengths_are_whole_and_at_least_1():
    asked = sessions(500, prompt_tokens="exponential:mean=2", output_tokens="0", turns="0")
    assert {type(session.turns[0].prompt_tokens) for session in asked} == {int}
    assert min(session.turns[0].prompt_tokens for session in asked) == 1
    assert {session.turns[0].output_tokens for session in asked} == {1}


def test_measured_pairs_stay_pairs():
    path = DATA / "sharegpt_lengths.csv.gz"
    asked = {(turn.prompt_tokens, turn.output_tokens) for s in sessions(2000, lengths=str(path)) for turn in s.turns}
    with gzip.open(path, "rt") as file:
        rows = {tuple(map(int, line.split(",")[:2])) for line in file.readlines()[1:]}
    assert asked <= rows
    assert len(asked) > 0.9 * len(rows)


def test_scale_and_limits():
    (session,) = sessions(1, prompt_tokens="1000", output_tokens="80", scale=0.5, max_output_tokens=30)
    assert session.turns == (SessionTurn(prompt_tokens=500, output_tokens=30),)
    (session,) = sessions(1, prefixes=1, prefix_tokens=100, scale=0.5, max_prompt_tokens=20)
    assert (session.prefix_tokens, session.turns[0].prompt_tokens) == (50, 20)


def test_sizing_keeps_the_blocks_that_are_needed():
    turn = SessionTurn(prompt_tokens=1000, output_tokens=10, blocks=(1, 2))
    assert LengthScaling(scale=1 / 8, own_block_tokens=512).turn(turn) == SessionTurn(
        prompt_tokens=125, output_tokens=1, blocks=(1, 2)
    )
    cut = LengthScaling(max_prompt_tokens=512, own_block_tokens=512).turn(turn)
    assert (cut.prompt_tokens, cut.blocks) == (512, (1,))
    tiny = LengthScaling(scale=0.0001, own_block_tokens=512)
    assert tiny.block_tokens == 1
    assert tiny.turn(turn).blocks == (1, 2)


def test_a_trace_comes_at_its_own_times_or_the_specs_or_none():
    own = sessions(arrivals=NEITHER, trace=MOONCAKE)
    assert len(own) == 60
    assert own[-1].at_s > own[0].at_s == 0
    fast = sessions(arrivals=NEITHER, trace=MOONCAKE, speed=4)
    assert [s.at_s * 4 for s in fast] == pytest.approx([s.at_s for s in own])
    drawn = sessions(trace=MOONCAKE)
    assert [s.turns for s in drawn] == [s.turns for s in own]
    assert [s.at_s for s in drawn] == [s.at_s for s in sessions(60)]
    assert {s.at_s for s in sessions(arrivals=USERS, trace=MOONCAKE)} == {None}


def test_a_trace_without_tenants_gets_those_of_the_spec():
    names = {
        s.tenant for s in sessions(arrivals=NEITHER, trace=MOONCAKE, tenants={"a": LoadTenant(), "b": LoadTenant()})
    }
    assert names == {"a", "b"}


@pytest.mark.parametrize(
    ("arrivals", "shape", "reason"),
    [
        (NEITHER, {}, "Nothing says when sessions begin. Set `arrivals.users`"),
        (ArrivalsSpec(users=1, rate_per_s=1), {}, "not both"),
        (NEITHER, {"trace": AGENTIC}, "its sessions have no times. Set `arrivals.users`"),
        (RATE, {"trace": MOONCAKE, "turns": "3"}, "Remove shape.turns or shape.trace"),
        (RATE, {"trace": MOONCAKE, "prefixes": 3}, "Remove shape.prefixes or shape.trace"),
        (RATE, {"speed": 2}, "shape.speed is for a trace's clock"),
        (RATE, {"prefixes": 2}, "go together"),
        (RATE, {"prefix_tokens": 2}, "go together"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(arrivals, shape, reason):
    with pytest.raises(ConfigInvalid) as raised:
        sessions(1, arrivals=arrivals, **shape)
    assert reason in raised.value.message


def test_an_empty_trace_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ConfigInvalid, match="no requests"):
        sessions(arrivals=NEITHER, trace=f"mooncake:{tmp_path / 'empty.jsonl'}")


@pytest.mark.parametrize("trace", ["mooncake", "mooncake:", "csv:x", ":x", "x"])
def test_a_trace_has_a_format_and_a_path(trace):
    with pytest.raises(InvalidRequest, match="FORMAT:PATH"):
        sessions(trace=trace)


@pytest.mark.parametrize(("name", "what"), [("prompt_tokens", "shape.prompt_tokens"), ("think_s", "shape.think_s")])
def test_a_bad_distribution_is_found_before_the_first_session(name, what):
    with pytest.raises(InvalidRequest, match=what):
        make_workload(LoadSpec(arrivals=RATE, shape=ShapeSpec(**{name: "x"})))
    with pytest.raises(InvalidRequest, match=r"arrivals\.profile"):
        make_workload(LoadSpec(arrivals=ArrivalsSpec(users=1, profile="x")))
