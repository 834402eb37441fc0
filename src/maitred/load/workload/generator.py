"""Generator of the sessions of a spec: tenants, lengths and times.

Every purpose has its own stream of random numbers, which depends on the seed and the purpose's name. So other lengths
do not move any arrival, and another mix of tenants does not change any length: two runs differ only in what was
changed.
"""

import itertools
import random
from bisect import bisect
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec.structs import replace

from maitred.core.errors import ConfigInvalid
from maitred.load.spec import LoadSpec, LoadTenant, ShapeSpec
from maitred.load.workload.arrivals import arrival_times, parse_profile
from maitred.load.workload.lengths import LengthPairs, parse_distribution
from maitred.load.workload.session import LoadSession, SessionTurn, Workload
from maitred.load.workload.sizing import LengthScaling
from maitred.load.workload.traces import load_trace

DEFAULT_TENANT = "default"
HOW_TO_ARRIVE = (
    "Set `arrivals.users` for so many users who ask one question after the other, or `arrivals.rate_per_s` for so "
    "many sessions per second whatever the server does"
)
SAID_BY_TRACE = ("prompt_tokens", "output_tokens", "lengths", "turns", "prefixes", "prefix_tokens")


def make_workload(spec: LoadSpec) -> Workload:
    """Makes the workload of a run from its spec.

    * Closed loop (`users`): sessions have no times. The sessions of a trace are played in its order, without its times.
    * Open loop (`rate_per_s`): the arrival process gives the times; the sessions of a trace get these times, in order.
    * Neither: the trace gives the times, which it must have.

    Raises:
        ConfigInvalid: The spec sets both or neither, or settings contradict each other.
        InvalidRequest: A distribution, a profile or a file cannot be parsed.
    """
    _check(spec)
    if spec.shape.trace is None:
        workload = Workload(_drawn_sessions(spec), description=_description(spec))
    else:
        workload = load_trace(spec.shape, spec.seed)
    return Workload(
        _schedule(_with_tenants(workload.sessions, spec), spec), workload.block_tokens, workload.description
    )


def _check(spec: LoadSpec) -> None:
    """Rejects settings that contradict each other or have no effect."""
    arrivals, shape = spec.arrivals, spec.shape
    if arrivals.users is not None and arrivals.rate_per_s is not None:
        raise ConfigInvalid(f"arrivals has both users and a rate. {HOW_TO_ARRIVE}; not both.")
    parse_profile(arrivals.profile)
    usual = ShapeSpec()
    if shape.trace is not None:
        for name in SAID_BY_TRACE:
            if getattr(shape, name) != getattr(usual, name):
                raise ConfigInvalid(f"shape.{name}: a trace brings its own. Remove shape.{name} or shape.trace.")
        return
    if arrivals.users is None and arrivals.rate_per_s is None:
        raise ConfigInvalid(f"Nothing says when sessions begin. {HOW_TO_ARRIVE}, or `shape.trace` for recorded times.")
    if shape.speed != usual.speed:
        raise ConfigInvalid("shape.speed is for a trace's clock. Set shape.trace, or change arrivals.rate_per_s.")
    if bool(shape.prefixes) != bool(shape.prefix_tokens):
        raise ConfigInvalid("shape.prefixes and shape.prefix_tokens go together: how many there are, and how long.")


def _stream(spec: LoadSpec, purpose: str) -> random.Random:
    return random.Random(f"{spec.seed}:{purpose}")


def _drawn_sessions(spec: LoadSpec) -> Iterator[LoadSession]:
    """Yields endless sessions from the distributions of the shape, without times and tenants."""
    shape = spec.shape
    sizing = LengthScaling.of(shape)
    turns = parse_distribution(shape.turns, what="shape.turns")
    think = parse_distribution(shape.think_s, what="shape.think_s")
    lengths = _lengths(spec)
    draw_prefix = _zipf(shape.prefixes, shape.prefix_skew, _stream(spec, "prefixes"))
    prefix_tokens = sizing.tokens(shape.prefix_tokens) if shape.prefixes else 0
    turns_rng, think_rng = _stream(spec, "turns"), _stream(spec, "think")

    def session(number: int) -> LoadSession:
        asked: list[SessionTurn] = []
        for place in range(max(1, round(turns.draw(turns_rng)))):
            prompt, output = lengths()
            think_s = think.draw(think_rng) if place else 0.0
            own = SessionTurn(prompt_tokens=round(prompt), output_tokens=round(output), think_s=think_s)
            asked.append(sizing.turn(own))
        return LoadSession(id=number, turns=tuple(asked), prefix=draw_prefix(), prefix_tokens=prefix_tokens)

    return map(session, itertools.count())


def _lengths(spec: LoadSpec) -> Callable[[], tuple[float, float]]:
    """Draws the lengths of one turn: message and answer."""
    shape = spec.shape
    if shape.lengths is not None:
        pairs, rng = LengthPairs.load(Path(shape.lengths)), _stream(spec, "lengths")
        return lambda: pairs.draw(rng)
    prompt = parse_distribution(shape.prompt_tokens, what="shape.prompt_tokens")
    output = parse_distribution(shape.output_tokens, what="shape.output_tokens")
    prompt_rng, output_rng = _stream(spec, "prompt_tokens"), _stream(spec, "output_tokens")
    return lambda: (prompt.draw(prompt_rng), output.draw(output_rng))


def _zipf(count: int, skew: float, rng: random.Random) -> Callable[[], int | None]:
    """Draws one of `count` numbers; the k-th has the weight ``k ** -skew``; None if `count` is 0."""
    if not count:
        return lambda: None
    return _by_weight([(place + 1) ** -skew for place in range(count)], rng)


def _by_weight(weights: list[float], rng: random.Random) -> Callable[[], int]:
    """Draws an index of the list by its weight, with one random number per draw."""
    cumulative = list(itertools.accumulate(weights))
    return lambda: min(bisect(cumulative, rng.random() * cumulative[-1]), len(cumulative) - 1)


def _with_tenants(sessions: Iterator[LoadSession], spec: LoadSpec) -> Iterator[LoadSession]:
    """Assigns one of the spec's tenants, by share, to each session without a tenant."""
    tenants: dict[str, LoadTenant] = spec.tenants
    if not tenants:
        return sessions
    names = list(tenants)
    draw = _by_weight([tenant.share for tenant in tenants.values()], _stream(spec, "tenants"))
    return (
        replace(session, tenant=names[draw()]) if session.tenant == DEFAULT_TENANT else session for session in sessions
    )


def _schedule(sessions: Iterator[LoadSession], spec: LoadSpec) -> Iterator[LoadSession]:
    """Sets the times of sessions: by the arrival process, none in a closed loop, or from the trace."""
    arrivals = spec.arrivals
    if arrivals.users is not None:
        return (replace(session, at_s=None) for session in sessions)
    if arrivals.rate_per_s is not None:
        times = arrival_times(arrivals, _stream(spec, "arrivals"))
        return (replace(session, at_s=at_s) for at_s, session in zip(times, sessions, strict=False))
    first = next(sessions, None)
    if first is None:
        raise ConfigInvalid("shape.trace: there are no requests in it. Give another file or another part of it.")
    if first.at_s is None:
        raise ConfigInvalid(f"shape.trace: its sessions have no times. {HOW_TO_ARRIVE}.")
    return itertools.chain([first], sessions)


def _description(spec: LoadSpec) -> str:
    """Describes the workload in one line."""
    shape = spec.shape
    words = [
        f"lengths of {Path(shape.lengths).name}"
        if shape.lengths is not None
        else f"prompts {shape.prompt_tokens}, answers {shape.output_tokens} tokens"
    ]
    if shape.turns != "1":
        words.append(f"turns {shape.turns}, pauses {shape.think_s} s")
    if shape.prefixes:
        words.append(f"{shape.prefixes} shared prefixes of {shape.prefix_tokens} tokens")
    return ", ".join([*words, *filter(None, [str(LengthScaling.of(shape))])])
