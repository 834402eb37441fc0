"""Metrics under the names of vLLM, so that tools made for vLLM can scrape this gateway.

Dashboards, KEDA's scalers and the routers of Kubernetes' gateways ask for ``vllm:num_requests_waiting`` and similar
metrics. Each is made from a metric of maitred that counts the same thing, at the moment of the scrape; nothing is
counted twice.

The label ``model_name`` is maitred's ``model``. The label ``engine`` is the replica, or `GATEWAY` for what is measured
in front of all of them: times and lengths of requests, and those that wait in the queue. So an autoscaler that adds up
``vllm:num_requests_waiting`` of a model sees all waiting requests; hardly any wait at the engines alone.

The names are those of vLLM's ``docs/design/metrics.md``, and older ones that dashboards still use.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

GATEWAY = "gateway"

_Sources = Mapping[str, Sequence[str]]

_GAUGES: _Sources = {
    "vllm:num_requests_running": ("maitred_engine_running",),
    "vllm:num_requests_waiting": ("maitred_engine_waiting", "maitred_dispatch_waiting"),
}
_COUNTERS: _Sources = {
    "vllm:prompt_tokens": ("maitred_engine_prompt_tokens",),
    "vllm:generation_tokens": ("maitred_engine_output_tokens",),
    "vllm:prompt_tokens_cached": ("maitred_engine_cached_tokens",),
    "vllm:prefix_cache_queries": ("maitred_engine_prompt_tokens",),
    "vllm:prefix_cache_hits": ("maitred_engine_cached_tokens",),
    "vllm:gpu_prefix_cache_queries": ("maitred_engine_prompt_tokens",),
    "vllm:gpu_prefix_cache_hits": ("maitred_engine_cached_tokens",),
    "vllm:num_preemptions": ("maitred_engine_preemptions",),
    "vllm:request_success": ("maitred_choices",),
}
_HISTOGRAMS: _Sources = {
    "vllm:time_to_first_token_seconds": ("maitred_ttft_seconds",),
    "vllm:inter_token_latency_seconds": ("maitred_itl_seconds",),
    "vllm:time_per_output_token_seconds": ("maitred_itl_seconds",),
    "vllm:request_time_per_output_token_seconds": ("maitred_tpot_seconds",),
    "vllm:e2e_request_latency_seconds": ("maitred_e2e_seconds",),
    "vllm:request_queue_time_seconds": ("maitred_queue_seconds",),
    "vllm:request_prefill_time_seconds": ("maitred_prefill_seconds",),
    "vllm:request_decode_time_seconds": ("maitred_decode_seconds",),
    "vllm:request_inference_time_seconds": ("maitred_inference_seconds",),
    "vllm:request_prefill_kv_computed_tokens": ("maitred_request_computed_tokens",),
    "vllm:iteration_tokens_total": ("maitred_step_tokens",),
    "vllm:request_prompt_tokens": ("maitred_request_prompt_tokens",),
    "vllm:request_generation_tokens": ("maitred_request_output_tokens",),
    "vllm:request_params_n": ("maitred_request_choices",),
    "vllm:request_params_max_tokens": ("maitred_request_max_tokens",),
}
_RATIOS: Mapping[str, tuple[str, str, str, bool]] = {
    "vllm:kv_cache_usage_perc": (
        "The part of our maitred_engine_kv_blocks_total that is not free, from 0 to 1.",
        *("maitred_engine_kv_blocks_free", "maitred_engine_kv_blocks_total", True),
    ),
    "vllm:gpu_cache_usage_perc": (
        "The older name of vllm:kv_cache_usage_perc.",
        *("maitred_engine_kv_blocks_free", "maitred_engine_kv_blocks_total", True),
    ),
    "vllm:gpu_prefix_cache_hit_rate": (
        "Our maitred_engine_cached_tokens over maitred_engine_prompt_tokens, since the engine's start.",
        *("maitred_engine_cached_tokens", "maitred_engine_prompt_tokens", False),
    ),
}
"""Gauges that are ratios: text, numerator, denominator, and whether the gauge is 1 minus the ratio."""
_LABELS: Mapping[str, str] = {"model": "model_name", "replica": "engine", "finish_reason": "finished_reason"}


def vllm_families(families: Iterable[Metric]) -> Iterator[Metric]:
    """Makes vLLM's metrics from maitred's metrics.

    Args:
        families: All metrics of maitred.
    """
    ours = {family.name: family for family in families}
    for kind, table in (("gauge", _GAUGES), ("counter", _COUNTERS), ("histogram", _HISTOGRAMS)):
        for name, sources in table.items():
            family = Metric(name, f"Our {' and '.join(sources)}.", kind)
            for source in sources:
                family.samples += _rename_samples(name, source, ours[source].samples)
            yield family
    for name, (text, numerator, denominator, inverted) in _RATIOS.items():
        family, numerators = Metric(name, text, "gauge"), _by_replica(ours[numerator])
        for (model, replica), total in _by_replica(ours[denominator]).items():
            share = numerators[model, replica] / total if total else float(inverted)
            family.add_sample(name, {"model_name": model, "engine": replica}, 1.0 - share if inverted else share)
        yield family
    yield _cache_config(ours)


def _rename_samples(name: str, source: str, samples: Iterable[Sample]) -> Iterator[Sample]:
    """Renames samples; those that differ only in a label that vLLM does not have are added up."""
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in samples:
        known = {_LABELS.get(label, label): value for label, value in sample.labels.items() if label != "class"}
        labels = {"model_name": "", "engine": GATEWAY} | known
        key = (name + sample.name.removeprefix(source), tuple(labels.items()))
        sums[key] = sums.get(key, 0.0) + sample.value
    for (full_name, pairs), value in sums.items():
        yield Sample(full_name, dict(pairs), value)


def _cache_config(ours: Mapping[str, Metric]) -> Metric:
    """Makes the info metric of the KV cache's size, which routers read from its labels."""
    family = Metric("vllm:cache_config_info", "How large the KV cache is, said by its labels.", "gauge")
    tokens = _by_replica(ours["maitred_engine_kv_capacity_tokens"])
    for (model, replica), blocks in _by_replica(ours["maitred_engine_kv_blocks_total"]).items():
        if blocks and (capacity := tokens[model, replica]):
            labels = {"block_size": str(round(capacity / blocks)), "num_gpu_blocks": str(round(blocks))}
            family.add_sample(family.name, {"model_name": model, "engine": replica} | labels, 1.0)
    return family


def _by_replica(family: Metric) -> dict[tuple[str, str], float]:
    return {(sample.labels["model"], sample.labels["replica"]): sample.value for sample in family.samples}
