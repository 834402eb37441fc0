"""What holds of every workload: counts follow the rate, seeds decide everything, and what a trace shares is shared."""

import itertools
import math
import random
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from maitred.config.tree import BUNDLED_MODEL
from maitred.load.spec import ArrivalsSpec, LoadSpec, LoadTenant, ShapeSpec
from maitred.load.workload.arrivals import arrival_times, parse_profile
from maitred.load.workload.generator import make_workload
from maitred.load.workload.prompts import PromptWriter
from maitred.load.workload.session import LoadSession, SessionTurn, Workload
from maitred.load.workload.traces.mooncake import read_mooncake
from maitred.load.workload.traces.recorded import read_recorded, write_recorded
from maitred.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(BUNDLED_MODEL)
MOONCAKE = Path(__file__).parents[2] / "data" / "traces" / "mooncake.jsonl"

seconds = st.integers(1, 200)
factors = st.sampled_from([0, 0.25, 1, 3, 10])
profiles = st.one_of(
    st.just("steady"),
    st.builds("ramp:from={},to={},over={}".format, factors, factors, st.integers(1, 200)),
    st.builds("spike:at={},for={},factor={}".format, seconds, seconds, factors),
    st.builds(lambda calm, burst, f: f"bursts:every={calm + burst},for={burst},factor={f}", seconds, seconds, factors),
    st.lists(st.tuples(st.integers(0, 300), factors), min_size=1, max_size=6, unique_by=lambda point: point[0]).map(
        lambda points: "points:" + ",".join(f"{at_s}={factor}" for at_s, factor in sorted(points))
    ),
).filter(lambda text: not (text.startswith(("ramp", "points")) and not any(map(float, _factors(text)))))


def _factors(text):
    numbers = [part.partition("=")[2] for part in text.partition(":")[2].split(",")]
    return numbers[:2] if text.startswith("ramp") else numbers


@given(profiles, st.floats(0, 2000))
@settings(deadline=None)
def test_the_inverse_undoes_the_integral(text, at_s):
    profile = parse_profile(text)
    area = profile.integral(at_s)
    found_s = profile.inverse(area)
    assert profile.integral(found_s) == pytest.approx(area, rel=1e-9, abs=1e-9)
    # Where the factor is 0 the integral stands still, and the inverse is where it came to a stand.
    assert found_s <= at_s + 1e-6
    if min(profile.factor(at_s), profile.factor(max(0.0, at_s - 1e-3))) > 1e-3:
        assert found_s == pytest.approx(at_s, rel=1e-6, abs=1e-4)


@given(profiles, st.floats(0, 1000), st.floats(0, 1000))
@settings(deadline=None)
def test_the_integral_is_the_area_under_the_factor(text, begin_s, length_s):
    profile = parse_profile(text)
    steps = 2000
    middles = (begin_s + length_s * (place + 0.5) / steps for place in range(steps))
    area = sum(map(profile.factor, middles)) * length_s / steps
    found = profile.integral(begin_s + length_s) - profile.integral(begin_s)
    # At each of the curve's jumps, of 10 at most, half a step may be on the wrong side.
    jumps = 2 * length_s / 2 + 8 if text.startswith("bursts") else 8
    assert found == pytest.approx(area, abs=min(jumps, 2 * steps) * 10 * length_s / steps + 1e-6)


@given(profiles, st.sampled_from(["constant", "poisson", "gamma"]), st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_counts_follow_the_integral_of_the_rate(text, process, seed):
    """Within six standard deviations: of a renewal process in the long run cv times the root of the count."""
    arrivals = ArrivalsSpec(rate_per_s=3, process=process, cv=1.5, profile=text)
    expected = 3 * parse_profile(text).integral(400)
    assume(expected < 20_000)
    times = list(itertools.takewhile(lambda at_s: at_s <= 400, arrival_times(arrivals, random.Random(seed))))
    cv = {"constant": 0.0, "poisson": 1.0, "gamma": 1.5}[process]
    assert abs(len(times) - expected) <= 6 * cv * math.sqrt(expected) + 6 * cv**2 + 1
    assert times == sorted(times)
    assert all(at_s >= 0 for at_s in times)


shapes = st.builds(
    ShapeSpec,
    prompt_tokens=st.sampled_from(["50", "uniform:1..90", "lognormal:mean=60,cv=2"]),
    output_tokens=st.sampled_from(["50", "exponential:mean=20"]),
    turns=st.sampled_from(["1", "uniform:1..4"]),
    scale=st.sampled_from([0.1, 1.0, 3.0]),
)


def sessions(count=60, **spec):
    return list(itertools.islice(make_workload(LoadSpec(**spec)).sessions, count))


@given(shapes, shapes, st.integers(0, 1000), st.sampled_from(["poisson", "gamma"]))
@settings(deadline=None, max_examples=40)
def test_a_seed_decides_everything_and_purposes_do_not_disturb_each_other(one, other, seed, process):
    arrivals = ArrivalsSpec(rate_per_s=2, process=process)
    tenants = {"a": LoadTenant(), "b": LoadTenant(share=2)}
    first = sessions(arrivals=arrivals, shape=one, tenants=tenants, seed=seed)
    assert first == sessions(arrivals=arrivals, shape=one, tenants=tenants, seed=seed)
    second = sessions(arrivals=arrivals, shape=other, tenants=tenants, seed=seed)
    assert [(s.at_s, s.tenant) for s in first] == [(s.at_s, s.tenant) for s in second]
    alone = sessions(arrivals=ArrivalsSpec(users=1), shape=one, seed=seed)
    assert [s.turns for s in alone] == [s.turns for s in first]
    assert [s.at_s for s in first] != [s.at_s for s in sessions(arrivals=arrivals, shape=one, seed=seed + 1)]


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=5), st.integers(0, 10**6))
@settings(deadline=None, max_examples=25)
def test_tenants_have_their_shares_and_prefixes_their_popularity(shares, seed):
    count = 3000
    tenants = {f"t{place}": LoadTenant(share=share) for place, share in enumerate(shares)}
    shape = ShapeSpec(prefixes=5, prefix_tokens=20, prefix_skew=1.5)
    asked = sessions(count, arrivals=ArrivalsSpec(users=1), shape=shape, tenants=tenants, seed=seed)
    weights = [(place + 1) ** -1.5 for place in range(5)]
    wanted = {("tenant", name): tenant.share / sum(shares) for name, tenant in tenants.items()}
    wanted |= {("prefix", place): weight / sum(weights) for place, weight in enumerate(weights)}
    for (field, value), share in wanted.items():
        found = sum(getattr(session, field) == value for session in asked) / count
        assert abs(found - share) <= 6 * math.sqrt(share * (1 - share) / count) + 1 / count


@given(st.integers(0, 100), st.sampled_from([4, 16, 64]), st.booleans())
@settings(deadline=None, max_examples=12)
def test_prompts_share_as_many_tokens_as_their_blocks(seed, block_tokens, with_tokenizer):
    """To the token: where two prompts part in the trace, the tokens part, and not before."""
    writer = PromptWriter(
        tokens_per_word=1.3,
        template_tokens=0.0,
        block_tokens=block_tokens,
        seed=seed,
        tokenizer=TOKENIZER if with_tokenizer else None,
    )
    turns = [session.turns[0] for session in itertools.islice(read_mooncake(MOONCAKE).sessions, 30)]
    prompts = []
    for turn in turns:
        text = writer.blocks(turn.blocks, len(turn.blocks) * block_tokens * 2)
        prompts.append((turn.blocks, text.split(" "), TOKENIZER.encode(text, add_special_tokens=False)))
    lengths = {id_: len(writer.blocks((id_,), 10**6).split(" ")) for turn in turns for id_ in turn.blocks}
    for (a_ids, a_words, a_tokens), (b_ids, b_words, b_tokens) in itertools.combinations(prompts, 2):
        shared = _common(a_ids, b_ids)
        words = sum(lengths[id_] for id_ in a_ids[:shared])
        # The first word after it spells another id.
        assert words <= _common(a_words, b_words) <= words + 1
        tokens = len(TOKENIZER.encode(" ".join(a_words[:words]), add_special_tokens=False))
        assert tokens <= _common(a_tokens, b_tokens) <= tokens + 3
        if with_tokenizer and shared:
            assert shared * block_tokens <= tokens <= shared * block_tokens + 3


def _common(a, b):
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


turns = st.builds(
    SessionTurn,
    prompt_tokens=st.integers(1, 10**6),
    output_tokens=st.integers(1, 10**6),
    think_s=st.floats(0, 1e6),
    blocks=st.lists(st.integers(-(2**40), 2**60), max_size=4).map(tuple),
)
played = st.lists(
    st.builds(
        LoadSession,
        id=st.integers(0, 10**9),
        turns=st.lists(turns, min_size=1, max_size=3).map(tuple),
        tenant=st.text(max_size=8),
        prefix=st.none() | st.integers(0, 99),
        prefix_tokens=st.integers(0, 999),
    ),
    max_size=5,
)


@given(played, st.integers(1, 999), st.text(max_size=20), st.booleans())
@settings(deadline=None, max_examples=60)
def test_what_is_recorded_is_read_again(tmp_path_factory, own, block_tokens, description, timed):
    path = tmp_path_factory.mktemp("recorded") / "trace.jsonl"
    if timed:
        own = [LoadSession(**{**_fields(session), "at_s": float(place)}) for place, session in enumerate(own)]
    assert write_recorded(path, Workload(iter(own), block_tokens, description)) == len(own)
    workload = read_recorded(path)
    assert list(workload.sessions) == own
    assert (workload.block_tokens, workload.description) == (block_tokens, description)


def _fields(session):
    return {name: getattr(session, name) for name in session.__struct_fields__}
