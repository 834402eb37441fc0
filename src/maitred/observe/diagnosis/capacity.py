"""Rules about compute capacity: engines, their memory, and the queues before them.

A waiting request lacks a slot in a batch, space in the KV cache, a replica, or none of these. The queue records the
causes of waiting (see `maitred.dispatch.policy.waits`); while no request leaves the queue, the free resources of the
replicas show the same.
"""

from collections.abc import Iterator

from maitred.observe.diagnosis.finding import DiagnosisFinding, FindingKind
from maitred.observe.diagnosis.snapshot import EngineVitals, HealthSnapshot, QueueVitals

_MIN_WAITING = 1.0
"""Least mean number of waiting requests that matters.

Some requests always wait for a moment when they arrive in bursts.
"""
_BUSY_SHARE = 0.7
"""Share of the time in steps above which an engine counts as busy."""
_RECOMPUTED_SHARE = 0.05
_PROMPT_BOUND_SHARE = 0.7
"""Share of prompt tokens above which prompts keep an engine busy."""
_RESOURCE_CAUSES = ("slots", "kv_full", "cold_start")
_REJECTION_REASONS = ("queue_full", "deadline_unmeetable", "deadline_exceeded")


def check_kv_memory(snapshot: HealthSnapshot) -> Iterator[DiagnosisFinding]:
    """Finds KV caches that are too small: requests wait for blocks, or preempt each other."""
    for queue_vitals in snapshot.queues:
        engines = snapshot.engines_for(queue_vitals.model)
        recomputed = _recomputed_share(engines)
        kv_full_share = waiting_causes(queue_vitals).get("kv_full", 0.0)
        if not engines or (kv_full_share < 0.5 and recomputed < _RECOMPUTED_SHARE):
            continue
        capacity = sum(engine.kv_capacity_tokens for engine in engines)
        preemptions = sum(engine.preemptions for engine in engines)
        yield DiagnosisFinding(
            kind=FindingKind.KV_MEMORY,
            where=queue_vitals.model,
            weight=max(queue_vitals.pressure * kv_full_share, recomputed),
            summary="The KV cache is too small for what is asked at once.",
            evidence=(
                *_waiting_evidence(queue_vitals, f"{kv_full_share:.0%} of them for room in the KV cache"),
                f"The KV cache holds {capacity:,.0f} tokens; {_mean_kv_free_share(engines):.0%} of its blocks are "
                "free, and "
                f"{queue_vitals.free_slots:.1f} of {queue_vitals.total_slots:.0f} places in the batch.",
                *([f"{preemptions:.0f} preemptions; {recomputed:.0%} of the work was done before."] * (recomputed > 0)),
            ),
            remedy="Raise engine.kv_memory_bytes, or take a smaller engine.kv_dtype (int8); add replicas; or have "
            "requests ask for less: lower admission.default_output_tokens and engine.context_tokens.",
        )


def check_compute(snapshot: HealthSnapshot) -> Iterator[DiagnosisFinding]:
    """Finds engines that compute all the time with full batches."""
    for queue_vitals in snapshot.queues:
        engines = snapshot.engines_for(queue_vitals.model)
        slots_share, busy = waiting_causes(queue_vitals).get("slots", 0.0), _mean_busy_share(engines)
        if slots_share < 0.5 or busy < _BUSY_SHARE:
            continue
        tokens = sum(engine.computed_tokens for engine in engines)
        prompts = sum(engine.prefill_tokens for engine in engines) / tokens if tokens else 0.0
        step_s = max(engine.step_s for engine in engines)
        yield DiagnosisFinding(
            kind=FindingKind.COMPUTE,
            where=queue_vitals.model,
            weight=queue_vitals.pressure * slots_share,
            summary="The engines compute all the time with full batches, and more requests wait.",
            evidence=(
                *_waiting_evidence(queue_vitals, f"{slots_share:.0%} of them for a place in a batch"),
                f"Engines spend {busy:.0%} of the time in steps of {step_s * 1000:.1f} ms; all "
                f"{queue_vitals.total_slots:.0f} "
                "places are taken.",
                f"{tokens / snapshot.seconds:,.0f} tokens a second, {prompts:.0%} of them of prompts.",
            ),
            remedy="Add replicas (model.replicas, model.engines) or a faster device; engine.quantization and "
            "engine.speculation make more of this one. "
            + (
                "Most of the work is prompts: see that engine.prefix_cache is on, and pin what many share."
                if prompts >= _PROMPT_BOUND_SHARE
                else "If readers can bear slower tokens, raise engine.max_sequences."
            ),
        )


def check_queues(snapshot: HealthSnapshot) -> Iterator[DiagnosisFinding]:
    """Finds queues that hold or reject requests although there is free capacity."""
    for queue_vitals in snapshot.queues:
        rejected = {reason: queue_vitals.rejected.get(reason, 0.0) for reason in _REJECTION_REASONS}
        requests = sum(rejected.values()) + queue_vitals.dispatched
        if sum(rejected.values()):
            yield DiagnosisFinding(
                kind=FindingKind.QUEUE,
                where=queue_vitals.model,
                # Rejections result from the cause of waiting, which is another finding: the cause comes first.
                weight=0.5 * min(1.0, sum(rejected.values()) / requests),
                summary="The queue refuses requests.",
                evidence=(
                    ", ".join(f"{count:.0f} {reason}" for reason, count in rejected.items() if count) + ".",
                    f"{queue_vitals.waiting:.1f} wait; a newcomer is told {queue_vitals.predicted_wait_s:.1f} s.",
                ),
                remedy="Remove what they wait for first. If callers can wait longer, raise dispatch.max_waiting "
                "(queue_full), dispatch.max_wait_s or dispatch.ttft_s (deadline_…); or give the model a degradation "
                "ladder.",
            )
        engines, slots_share = snapshot.engines_for(queue_vitals.model), waiting_causes(queue_vitals).get("slots", 0.0)
        if engines and slots_share >= 0.5 and _mean_busy_share(engines) < _BUSY_SHARE:
            yield DiagnosisFinding(
                kind=FindingKind.QUEUE,
                where=queue_vitals.model,
                weight=queue_vitals.pressure * slots_share,
                summary="All places in the batch are taken, yet the engines have time left.",
                evidence=(
                    *_waiting_evidence(queue_vitals, f"{slots_share:.0%} of them for a place in a batch"),
                    f"Engines spend {_mean_busy_share(engines):.0%} of the time in steps; "
                    f"{queue_vitals.total_slots:.0f} places.",
                ),
                remedy="Raise engine.max_sequences; where engine.itl_objective_s keeps the batch small, raise that.",
            )
        held_back = 1.0 - sum(waiting_causes(queue_vitals).values())
        if queue_vitals.waiting >= _MIN_WAITING and held_back > 0.5:
            yield DiagnosisFinding(
                kind=FindingKind.QUEUE,
                where=queue_vitals.model,
                weight=queue_vitals.pressure * held_back,
                summary="Requests wait although there is room for them.",
                evidence=(
                    *_waiting_evidence(queue_vitals, "for their turn"),
                    f"{queue_vitals.free_slots:.1f} of {queue_vitals.total_slots:.0f} places and "
                    f"{queue_vitals.free_kv_tokens:,.0f} of "
                    f"{queue_vitals.total_kv_tokens:,.0f} KV tokens are free.",
                ),
                remedy="Room is kept for others: lower dispatch.headroom, or the shares in dispatch.reserved, "
                "dispatch.pools and engine.kv_shares.",
            )


def check_replicas(snapshot: HealthSnapshot) -> Iterator[DiagnosisFinding]:
    """Finds engines that are missing or were started again."""
    for engine in snapshot.engines:
        away = 1.0 - engine.up
        unserved = snapshot.unserved.get(engine.model, 0.0)
        is_needed = unserved or any(
            "cold_start" in waiting_causes(queue_vitals)
            for queue_vitals in snapshot.queues
            if queue_vitals.model == engine.model
        )
        if not engine.restarts and (not away or (engine.on_demand and not is_needed)):
            continue
        yield DiagnosisFinding(
            kind=FindingKind.REPLICA,
            where=f"{engine.model}/{engine.replica}",
            weight=max(away / len(snapshot.engines_for(engine.model)), 0.3),
            summary="An engine is not there." if away else "An engine was started again.",
            evidence=(
                f"Away at {away:.0%} of the looks; started again {engine.restarts:.0f} times.",
                f"{unserved:.0f} requests failed because nothing could run them.",
            ),
            remedy="The server's log has the engine's last words. If it is being loaded, wait, or pin the model "
            "(models.NAME.pinned); if the system ended it for memory, lower engine.kv_memory_bytes or "
            "residency.memory_bytes.",
        )


CAPACITY_RULES = (check_kv_memory, check_compute, check_queues, check_replicas)


def waiting_causes(queue_vitals: QueueVitals) -> dict[str, float]:
    """Returns the resources that waiting requests lack, as shares; the remainder to 1 waits for its turn only."""
    if queue_vitals.waiting < _MIN_WAITING:
        return {}
    waited = {cause: queue_vitals.waited_s.get(cause, 0.0) for cause in _RESOURCE_CAUSES}
    if total := sum(waited.values()):
        # Requests behind a head that lacks a resource wait only for their turn: the head's cause counts for all of
        # them.
        return {cause: seconds / total for cause, seconds in waited.items() if seconds}
    if not queue_vitals.total_slots:
        return {"cold_start": 1.0}
    if queue_vitals.free_slots < 1.0:
        return {"slots": 1.0}
    return (
        {"kv_full": 1.0}
        if queue_vitals.total_kv_tokens and queue_vitals.free_kv_tokens < 0.1 * queue_vitals.total_kv_tokens
        else {}
    )


def _waiting_evidence(queue_vitals: QueueVitals, detail: str) -> Iterator[str]:
    if queue_vitals.waiting >= _MIN_WAITING:
        yield f"{queue_vitals.waiting:.1f} requests wait beside {queue_vitals.running:.1f} that run, {detail}."


def _recomputed_share(engines: list[EngineVitals]) -> float:
    computed = sum(engine.computed_tokens for engine in engines)
    return sum(engine.recomputed_tokens for engine in engines) / computed if computed else 0.0


def _mean_busy_share(engines: list[EngineVitals]) -> float:
    """Returns the mean share of time in steps of the engines that compute at all."""
    busy = [engine.busy_share for engine in engines if engine.steps]
    return sum(busy) / len(busy) if busy else 0.0


def _mean_kv_free_share(engines: list[EngineVitals]) -> float:
    return sum(engine.kv_free_share for engine in engines) / len(engines)
