"""Rules about what computes: engines, their memory, and the queues before them.

A request that waits lacks a place in a batch, or room in the KV cache, or a replica, or none of these. The queue keeps
an account of it (see `maitred.dispatch.policy.waits`); while nobody leaves the queue, what the replicas have left says
the same.
"""

from collections.abc import Iterator

from maitred.observe.diagnosis.finding import DiagnosisFinding, FindingKind
from maitred.observe.diagnosis.snapshot import EngineVitals, HealthSnapshot, QueueVitals

_LEAST_WAITING = 1.0
"""On average. Somebody always waits for a moment where requests come in crowds."""
_BUSY = 0.7
"""An engine that steps for more of the time has nothing better to do between its steps."""
_RECOMPUTED = 0.05
_PROMPTS = 0.7
"""From this part of the tokens on, it is prompts that keep an engine busy."""
_BLOCKED = ("slots", "kv_full", "cold_start")
_REFUSED = ("queue_full", "deadline_unmeetable", "deadline_exceeded")


def kv_memory(vitals: HealthSnapshot) -> Iterator[DiagnosisFinding]:
    """Requests wait for room in the KV cache, or push each other out of it."""
    for line in vitals.lines:
        engines = vitals.engines_of(line.model)
        recomputed = _recomputed(engines)
        lacking = lacks(line).get("kv_full", 0.0)
        if not engines or (lacking < 0.5 and recomputed < _RECOMPUTED):
            continue
        capacity = sum(engine.kv_capacity_tokens for engine in engines)
        preemptions = sum(engine.preemptions for engine in engines)
        yield DiagnosisFinding(
            kind=FindingKind.KV_MEMORY,
            where=line.model,
            weight=max(line.pressure * lacking, recomputed),
            summary="The KV cache is too small for what is asked at once.",
            evidence=(
                *_waiting(line, f"{lacking:.0%} of them for room in the KV cache"),
                f"The KV cache holds {capacity:,.0f} tokens; {_kv_free(engines):.0%} of its blocks are free, and "
                f"{line.free_slots:.1f} of {line.total_slots:.0f} places in the batch.",
                *([f"{preemptions:.0f} preemptions; {recomputed:.0%} of the work was done before."] * (recomputed > 0)),
            ),
            remedy="Raise engine.kv_memory_bytes, or take a smaller engine.kv_dtype (int8); add replicas; or have "
            "requests ask for less: lower admission.default_output_tokens and engine.context_tokens.",
        )


def compute(vitals: HealthSnapshot) -> Iterator[DiagnosisFinding]:
    """The batch is full, and the engines compute all the time."""
    for line in vitals.lines:
        engines = vitals.engines_of(line.model)
        lacking, busy = lacks(line).get("slots", 0.0), _busy(engines)
        if lacking < 0.5 or busy < _BUSY:
            continue
        tokens = sum(engine.computed_tokens for engine in engines)
        prompts = sum(engine.prefill_tokens for engine in engines) / tokens if tokens else 0.0
        step_s = max(engine.step_s for engine in engines)
        yield DiagnosisFinding(
            kind=FindingKind.COMPUTE,
            where=line.model,
            weight=line.pressure * lacking,
            summary="The engines compute all the time with full batches, and more requests wait.",
            evidence=(
                *_waiting(line, f"{lacking:.0%} of them for a place in a batch"),
                f"Engines spend {busy:.0%} of the time in steps of {step_s * 1000:.1f} ms; all {line.total_slots:.0f} "
                "places are taken.",
                f"{tokens / vitals.seconds:,.0f} tokens a second, {prompts:.0%} of them of prompts.",
            ),
            remedy="Add replicas (model.replicas, model.engines) or a faster device; engine.quantization and "
            "engine.speculation make more of this one. "
            + (
                "Most of the work is prompts: see that engine.prefix_cache is on, and pin what many share."
                if prompts >= _PROMPTS
                else "If readers can bear slower tokens, raise engine.max_sequences."
            ),
        )


def queue(vitals: HealthSnapshot) -> Iterator[DiagnosisFinding]:
    """Requests wait although there is room, or are refused by the queue's own bounds."""
    for line in vitals.lines:
        refused = {reason: line.refused.get(reason, 0.0) for reason in _REFUSED}
        asked = sum(refused.values()) + line.released
        if sum(refused.values()):
            yield DiagnosisFinding(
                kind=FindingKind.QUEUE,
                where=line.model,
                # Refusals follow from what the queue waits for, which is another finding: the cause comes first.
                weight=0.5 * min(1.0, sum(refused.values()) / asked),
                summary="The queue refuses requests.",
                evidence=(
                    ", ".join(f"{count:.0f} {reason}" for reason, count in refused.items() if count) + ".",
                    f"{line.waiting:.1f} wait; a newcomer is told {line.predicted_wait_s:.1f} s.",
                ),
                remedy="Remove what they wait for first. If callers can wait longer, raise dispatch.max_waiting "
                "(queue_full), dispatch.max_wait_s or dispatch.ttft_s (deadline_…); or give the model a degradation "
                "ladder.",
            )
        engines, lacking = vitals.engines_of(line.model), lacks(line).get("slots", 0.0)
        if engines and lacking >= 0.5 and _busy(engines) < _BUSY:
            yield DiagnosisFinding(
                kind=FindingKind.QUEUE,
                where=line.model,
                weight=line.pressure * lacking,
                summary="All places in the batch are taken, yet the engines have time left.",
                evidence=(
                    *_waiting(line, f"{lacking:.0%} of them for a place in a batch"),
                    f"Engines spend {_busy(engines):.0%} of the time in steps; {line.total_slots:.0f} places.",
                ),
                remedy="Raise engine.max_sequences; where engine.itl_objective_s keeps the batch small, raise that.",
            )
        held_back = 1.0 - sum(lacks(line).values())
        if line.waiting >= _LEAST_WAITING and held_back > 0.5:
            yield DiagnosisFinding(
                kind=FindingKind.QUEUE,
                where=line.model,
                weight=line.pressure * held_back,
                summary="Requests wait although there is room for them.",
                evidence=(
                    *_waiting(line, "for their turn"),
                    f"{line.free_slots:.1f} of {line.total_slots:.0f} places and {line.free_kv_tokens:,.0f} of "
                    f"{line.total_kv_tokens:,.0f} KV tokens are free.",
                ),
                remedy="Room is kept for others: lower dispatch.headroom, or the shares in dispatch.reserved, "
                "dispatch.pools and engine.kv_shares.",
            )


def replica(vitals: HealthSnapshot) -> Iterator[DiagnosisFinding]:
    """Engines are away that should be there, or were started again."""
    for engine in vitals.engines:
        away = 1.0 - engine.up
        unserved = vitals.unserved.get(engine.model, 0.0)
        missed = unserved or any("cold_start" in lacks(line) for line in vitals.lines if line.model == engine.model)
        if not engine.restarts and (not away or (engine.on_demand and not missed)):
            continue
        yield DiagnosisFinding(
            kind=FindingKind.REPLICA,
            where=f"{engine.model}/{engine.replica}",
            weight=max(away / len(vitals.engines_of(engine.model)), 0.3),
            summary="An engine is not there." if away else "An engine was started again.",
            evidence=(
                f"Away at {away:.0%} of the looks; started again {engine.restarts:.0f} times.",
                f"{unserved:.0f} requests failed because nothing could run them.",
            ),
            remedy="The server's log has the engine's last words. If it is being loaded, wait, or pin the model "
            "(models.NAME.pinned); if the system ended it for memory, lower engine.kv_memory_bytes or "
            "residency.memory_bytes.",
        )


CAPACITY = (kv_memory, compute, queue, replica)


def lacks(line: QueueVitals) -> dict[str, float]:
    """What the requests that wait lack, as shares of all who do; what is missing to 1 waits for its turn only."""
    if line.waiting < _LEAST_WAITING:
        return {}
    waited = {cause: line.waited_s.get(cause, 0.0) for cause in _BLOCKED}
    if total := sum(waited.values()):
        # Behind a head that lacks something, everybody else waits for a turn: what the head lacked counts for all.
        return {cause: seconds / total for cause, seconds in waited.items() if seconds}
    if not line.total_slots:
        return {"cold_start": 1.0}
    if line.free_slots < 1.0:
        return {"slots": 1.0}
    return {"kv_full": 1.0} if line.total_kv_tokens and line.free_kv_tokens < 0.1 * line.total_kv_tokens else {}


def _waiting(line: QueueVitals, what: str) -> Iterator[str]:
    if line.waiting >= _LEAST_WAITING:
        yield f"{line.waiting:.1f} requests wait beside {line.running:.1f} that run, {what}."


def _recomputed(engines: list[EngineVitals]) -> float:
    computed = sum(engine.computed_tokens for engine in engines)
    return sum(engine.recomputed_tokens for engine in engines) / computed if computed else 0.0


def _busy(engines: list[EngineVitals]) -> float:
    """Of those that compute at all."""
    busy = [engine.busy_share for engine in engines if engine.steps]
    return sum(busy) / len(busy) if busy else 0.0


def _kv_free(engines: list[EngineVitals]) -> float:
    return sum(engine.kv_free_share for engine in engines) / len(engines)
