"""Metrics of engines, read from their last load reports at each scrape."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from maitred.core.replica import GpuState, LoadReport, ModelCard


@dataclass(frozen=True, slots=True)
class EngineState:
    """State of one engine at the moment of a scrape."""

    up: bool
    restarts: int
    load: LoadReport
    card: ModelCard | None
    """Card of its model; None before the engine has been ready."""


EngineStates = Mapping[tuple[str, str], EngineState]
"""States of engines by model and replica."""


_GAUGES: Mapping[str, tuple[str, Callable[[EngineState], float]]] = {
    "maitred_engine_up": ("1 while the engine is connected.", lambda state: state.up),
    "maitred_engine_asleep": ("1 while the engine sleeps.", lambda state: state.up and state.load.asleep),
    "maitred_engine_running": ("Sequences in the batch.", lambda state: state.load.running),
    "maitred_engine_waiting": ("Sequences that wait for a place in the batch.", lambda state: state.load.waiting),
    "maitred_engine_paused": (
        "Sequences that are not computed because their readers have fallen behind.",
        lambda state: state.load.paused,
    ),
    "maitred_engine_guests": (
        "Sequences that run beyond the places, because their tenants held fewer of them than others.",
        lambda state: state.load.guests,
    ),
    "maitred_engine_free_sequences": (
        "Sequences that the batch would take now, beside those that run and wait.",
        lambda state: state.load.free_sequences,
    ),
    "maitred_engine_step_tokens": ("Tokens that a step may compute now.", lambda state: state.load.step_tokens),
    "maitred_engine_waiting_prompt_tokens": (
        "Prompt tokens of what runs and waits that are still to be computed.",
        lambda state: state.load.waiting_prompt_tokens,
    ),
    "maitred_engine_kv_blocks_promised": (
        "KV blocks that what runs and waits is still expected to take.",
        lambda state: state.load.promised_blocks,
    ),
    "maitred_engine_kv_blocks_pinned": (
        "KV blocks that pinned prefixes hold.",
        lambda state: state.load.pinned_blocks,
    ),
    "maitred_engine_kv_blocks_free": (
        "KV blocks that can be allocated now, cached ones that nobody uses included.",
        lambda state: state.load.free_blocks,
    ),
    "maitred_engine_kv_blocks_total": ("KV blocks in all.", lambda state: state.load.total_blocks),
    "maitred_engine_kv_capacity_tokens": (
        "Tokens that the KV cache can hold.",
        lambda state: state.card.kv_capacity_tokens if state.card else 0,
    ),
    "maitred_engine_process_resident_memory_bytes": (
        "Memory in use by the engine's process.",
        lambda state: state.load.process.resident_bytes,
    ),
    "maitred_engine_process_open_fds": (
        "Open files and sockets of the engine's process.",
        lambda state: state.load.process.open_files,
    ),
    "maitred_engine_process_threads": (
        "Threads of the engine's process.",
        lambda state: state.load.process.threads,
    ),
}
_GPU_GAUGES: Mapping[str, tuple[str, Callable[[GpuState], float]]] = {
    "maitred_engine_gpu_busy_ratio": ("Part of the time in which the GPU computed.", lambda gpu: gpu.busy_share),
    "maitred_engine_gpu_memory_used_bytes": ("Memory of the GPU in use.", lambda gpu: gpu.used_bytes),
    "maitred_engine_gpu_memory_total_bytes": ("Memory of the GPU.", lambda gpu: gpu.total_bytes),
}
_COUNTERS: Mapping[str, tuple[str, Callable[[EngineState], float]]] = {
    "maitred_engine_restarts": ("Times that the engine was started again.", lambda state: state.restarts),
    "maitred_engine_steps": ("Model steps.", lambda state: state.load.steps),
    "maitred_engine_step_seconds": ("Time spent in model steps.", lambda state: state.load.step_s),
    "maitred_engine_prompt_tokens": (
        "Prompt tokens of admitted sequences, cached ones included.",
        lambda state: state.load.prompt_tokens,
    ),
    "maitred_engine_cached_tokens": (
        "Of these, tokens found in the prefix cache.",
        lambda state: state.load.cached_tokens,
    ),
    "maitred_engine_output_tokens": ("Tokens sampled.", lambda state: state.load.output_tokens),
    "maitred_engine_preemptions": (
        "Sequences that lost their KV blocks to others for a while.",
        lambda state: state.load.preemptions,
    ),
    "maitred_engine_recomputed_tokens": (
        "Tokens computed again after a preemption, or after another replica that was lost; never billed.",
        lambda state: state.load.recomputed_tokens,
    ),
    "maitred_engine_swapped_blocks": (
        "KV blocks of preempted sequences that were copied to the host's memory.",
        lambda state: state.load.swapped_blocks,
    ),
    "maitred_engine_restored_blocks": (
        "KV blocks that were copied back instead of being computed again.",
        lambda state: state.load.restored_blocks,
    ),
    "maitred_engine_pins_given_up": (
        "Pinned prefixes that went before their time, because a request would have waited for ever.",
        lambda state: state.load.pins_given_up,
    ),
    "maitred_engine_evicted_blocks": (
        "KV blocks whose cached content gave way to something else.",
        lambda state: state.load.evicted_blocks,
    ),
    "maitred_engine_prefill_tokens": (
        "Tokens that steps computed of prompts, and of what was computed again.",
        lambda state: state.load.prefill_tokens,
    ),
    "maitred_engine_decode_tokens": (
        "Tokens that steps computed of answers, wrong drafts included.",
        lambda state: state.load.decode_tokens,
    ),
    "maitred_engine_forced_tokens": (
        "Output tokens that a grammar left no choice for.",
        lambda state: state.load.forced_tokens,
    ),
    "maitred_engine_drafted_tokens": ("Drafts that steps computed.", lambda state: state.load.drafted_tokens),
    "maitred_engine_accepted_tokens": ("Of these, drafts that were right.", lambda state: state.load.accepted_tokens),
    "maitred_engine_process_cpu_seconds": (
        "CPU time of the engine's process, user and system.",
        lambda state: state.load.process.cpu_s,
    ),
    "maitred_engine_finished": ("Sequences that came to their end.", lambda state: state.load.finished),
    "maitred_engine_cancelled": ("Sequences that nobody wanted any more.", lambda state: state.load.cancelled),
    "maitred_engine_wasted_tokens": (
        "Tokens sampled for readers that left, or whose deadline passed with no use for a part.",
        lambda state: state.load.wasted_tokens,
    ),
}


class EngineMetrics(Collector):
    """Metrics of the gateway's load and of all engines.

    Args:
        in_flight: Returns the number of requests that are being answered.
        engines: Returns the state of each engine by the names of its model and of its replica.
        tasks: Returns the number of tasks of the event loop.
        websockets: Returns the number of open WebSockets.
    """

    def __init__(
        self,
        in_flight: Callable[[], int],
        engines: Callable[[], EngineStates],
        tasks: Callable[[], int],
        websockets: Callable[[], int],
    ) -> None:
        self._in_flight = in_flight
        self._websockets = websockets
        self._engines = engines
        self._tasks = tasks

    def collect(self) -> Iterable[Metric]:
        """Collects the state of all engines for Prometheus."""
        yield GaugeMetricFamily("maitred_in_flight", "Requests that are being answered.", self._in_flight())
        yield GaugeMetricFamily("maitred_websockets", "WebSockets that are open.", self._websockets())
        yield GaugeMetricFamily("maitred_process_tasks", "Tasks of the event loop.", self._tasks())
        engines = self._engines()
        for name, (text, read) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=["model", "replica"])
            for names, state in engines.items():
                gauge.add_metric(names, read(state))
            yield gauge
        for name, (text, read_gpu) in _GPU_GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=["model", "replica", "gpu"])
            for names, state in engines.items():
                if (gpu := state.load.process.gpu) is not None:
                    gauge.add_metric([*names, gpu.name], read_gpu(gpu))
            yield gauge
        for name, (text, read) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=["model", "replica"])
            for names, state in engines.items():
                counter.add_metric(names, read(state))
            yield counter
