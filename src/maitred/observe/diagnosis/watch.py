"""Conversion of several scrapes to a health snapshot: the only module that knows the names of metrics."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from maitred.observe.diagnosis.snapshot import (
    EngineVitals,
    GatewayVitals,
    GrowthVitals,
    HealthSnapshot,
    ModelVitals,
    QueueVitals,
    StoreVitals,
    UpstreamVitals,
)
from maitred.observe.samples import MetricSamples

_ENGINE_LABELS = ("model", "replica")
_UPSTREAM_LABELS = ("model", "upstream")
_UNSERVED_CODES = ("replica_unavailable", "replica_lost", "model_loading", "model_load_failed")
_Key = tuple[str, ...]
_MetricReader = Callable[[str], float]


class ScrapeWatcher:
    """Series of scrapes of one server.

    Args:
        scrapes: At least two scrapes, the oldest first.
        seconds: Time between the first scrape and the last.
    """

    def __init__(self, scrapes: Sequence[MetricSamples], seconds: float) -> None:
        self._scrapes = scrapes
        self._seconds = seconds

    def snapshot(self) -> HealthSnapshot:
        """Makes the snapshot of the time between the scrapes."""
        increase = self._increase
        return HealthSnapshot(
            seconds=self._seconds,
            ended=sum(increase("maitred_model_requests_total").values()),
            stalled=sum(increase("maitred_stalled_requests_total").values()),
            errors=_by_first_label(increase("maitred_errors_total", "code")),
            unserved=self._unserved_counts(),
            limit_rejections=_by_first_label(increase("maitred_limit_refusals_total", "limit")),
            rejected_by_tenant={
                tenant: count
                for (tenant, outcome), count in increase("maitred_tenant_requests_total", "tenant", "outcome").items()
                if outcome == "refused"
            },
            gateway=self._gateway(),
            engines=[self._engine(*key) for key in self._keys("maitred_engine_up", *_ENGINE_LABELS)],
            queues=[self._queue(model) for (model,) in self._keys("maitred_dispatch_running", "model")],
            models=[self._model(model) for (model,) in self._keys("maitred_ttft_seconds_count", "model")],
            upstreams=[self._upstream(*key) for key in self._keys("maitred_upstream_up", *_UPSTREAM_LABELS)],
            stores=self._stores(),
            growth=self._growths(),
            reload_rejected=self._scrapes[-1].sum_by("maitred_config_reload_successful").get(()) == 0.0,
            pending_settings=self._scrapes[-1].sum_by("maitred_config_pending_settings").get((), 0.0),
        )

    def _unserved_counts(self) -> dict[str, float]:
        counts: defaultdict[str, float] = defaultdict(float)
        for (model, code), count in self._increase("maitred_errors_total", "model", "code").items():
            if code in _UNSERVED_CODES and count:
                counts[model] += count
        return dict(counts)

    def _gateway(self) -> GatewayVitals:
        def share(name: str) -> float:
            return self._increase(name).get((), 0.0) / self._seconds

        return GatewayVitals(
            cpu_share=share("maitred_process_cpu_seconds_total"),
            cpu_wait_share=share("maitred_process_cpu_wait_seconds_total"),
            loop_cpu_share=share("maitred_event_loop_cpu_seconds_total"),
            loop_wait_share=share("maitred_event_loop_cpu_wait_seconds_total"),
            open_fds=self._mean("maitred_process_open_fds").get((), 0.0),
            max_fds=self._mean("maitred_process_max_fds").get((), 0.0),
        )

    def _engine(self, model: str, replica: str) -> EngineVitals:
        mean, increase = self._metric_readers((model, replica), _ENGINE_LABELS, "maitred_engine_")
        steps, step_s, blocks = increase("steps_total"), increase("step_seconds_total"), mean("kv_blocks_total")
        return EngineVitals(
            model=model,
            replica=replica,
            up=mean("up"),
            on_demand=(model,) in self._scrapes[-1].sum_by("maitred_model_resident", "model"),
            restarts=increase("restarts_total"),
            busy_share=step_s / self._seconds,
            steps=steps,
            step_s=step_s / steps if steps else 0.0,
            running=mean("running"),
            waiting=mean("waiting"),
            paused=mean("paused"),
            kv_free_share=mean("kv_blocks_free") / blocks if blocks else 1.0,
            kv_capacity_tokens=mean("kv_capacity_tokens"),
            preemptions=increase("preemptions_total"),
            recomputed_tokens=increase("recomputed_tokens_total"),
            prefill_tokens=increase("prefill_tokens_total"),
            decode_tokens=increase("decode_tokens_total"),
        )

    def _queue(self, model: str) -> QueueVitals:
        mean, _ = self._metric_readers((model,), ("model",), "maitred_dispatch_")
        waited, count = "maitred_dispatch_queue_seconds_sum", "maitred_dispatch_queue_seconds_count"
        capacities = self._mean("maitred_dispatch_credits", "model", "resource", "state")
        waits = self._mean("maitred_dispatch_predicted_wait_seconds", "model", "class")
        return QueueVitals(
            model=model,
            waiting=mean("waiting"),
            running=mean("running"),
            predicted_wait_s=max((wait_s for (of_model, _), wait_s in waits.items() if of_model == model), default=0.0),
            dispatched=self._increase(count, "model").get((model,), 0.0),
            waited_s=_by_second_label(self._increase(waited, "model", "cause"), model),
            rejected=_by_second_label(self._increase("maitred_dispatch_refusals_total", "model", "reason"), model),
            free_slots=capacities.get((model, "slots", "free"), 0.0),
            total_slots=capacities.get((model, "slots", "total"), 0.0),
            free_kv_tokens=capacities.get((model, "kv_tokens", "free"), 0.0),
            total_kv_tokens=capacities.get((model, "kv_tokens", "total"), 0.0),
        )

    def _model(self, model: str) -> ModelVitals:
        _, increase = self._metric_readers((model,), ("model",), "maitred_")
        answered, decoded = increase("prefill_seconds_count"), increase("tpot_seconds_count")
        objectives = self._scrapes[-1].sum_by("maitred_slo_within_seconds", "slo", "model", "indicator")
        within_s = [
            value
            for (_, of_model, indicator), value in objectives.items()
            if of_model in (model, "*") and indicator == "ttft"
        ]
        return ModelVitals(
            model=model,
            answered=answered,
            prefill_s=increase("prefill_seconds_sum") / answered if answered else 0.0,
            tpot_s=increase("tpot_seconds_sum") / decoded if decoded else 0.0,
            first_token_within_s=min(within_s, default=None),
        )

    def _upstream(self, model: str, upstream: str) -> UpstreamVitals:
        mean, _ = self._metric_readers((model, upstream), _UPSTREAM_LABELS, "maitred_upstream_")
        return UpstreamVitals(
            model=model,
            upstream=upstream,
            up=mean("up"),
            open_requests=mean("open_requests"),
            waiting=mean("waiting"),
            kv_usage=mean("kv_usage"),
            breaker_open=mean("breaker_open"),
        )

    def _stores(self) -> StoreVitals:
        last = self._scrapes[-1]

        def now(name: str) -> float:
            return last.sum_by(name).get((), 0.0)

        return StoreVitals(
            down={store: 1 - up for (store,), up in self._mean("maitred_store_up", "store").items() if up < 1},
            backlog=now("maitred_ledger_backlog"),
            backlog_age_s=now("maitred_ledger_backlog_age_seconds"),
            leases_late=last.sum_by("maitred_leases", "state").get(("late",), 0.0),
            directory_age_s=now("maitred_directory_age_seconds"),
        )

    def _growths(self) -> list[GrowthVitals]:
        last = self._scrapes[-1]
        trends = last.sum_by("maitred_growth_trend", "process", "resource")
        levels = last.sum_by("maitred_growth_level", "process", "resource")
        return [
            GrowthVitals(
                process=key[0], resource=key[1], per_hour=per_hour, trend=trends.get(key, 0.0), level=levels.get(key, 0)
            )
            for key, per_hour in last.sum_by("maitred_growth_per_hour", "process", "resource").items()
        ]

    def _keys(self, name: str, *labels: str) -> list[_Key]:
        return sorted({key for scrape in self._scrapes for key in scrape.sum_by(name, *labels)})

    def _metric_readers(self, key: _Key, labels: Sequence[str], prefix: str) -> tuple[_MetricReader, _MetricReader]:
        """Returns readers of means and increases for one label set, by the rest of the metric's name."""

        def mean(name: str) -> float:
            return self._mean(prefix + name, *labels).get(key, 0.0)

        def grown(name: str) -> float:
            return self._increase(prefix + name, *labels).get(key, 0.0)

        return mean, grown

    def _mean(self, name: str, *labels: str) -> dict[_Key, float]:
        """Returns means over all scrapes; where a series is missing it counts as 0."""
        sums: defaultdict[_Key, float] = defaultdict(float)
        for scrape in self._scrapes:
            for key, value in scrape.sum_by(name, *labels).items():
                sums[key] += value
        return {key: value / len(self._scrapes) for key, value in sums.items()}

    def _increase(self, name: str, *labels: str) -> dict[_Key, float]:
        """Returns the increase of counters; of a counter that was reset, its value."""
        before, after = self._scrapes[0].sum_by(name, *labels), self._scrapes[-1].sum_by(name, *labels)
        increases = {key: value - before.get(key, 0.0) for key, value in after.items()}
        return {key: after[key] if increase < 0 else increase for key, increase in increases.items()}


def _by_first_label(values: Mapping[_Key, float]) -> dict[str, float]:
    return {name: value for (name,), value in values.items() if value}


def _by_second_label(values: Mapping[_Key, float], first: str) -> dict[str, float]:
    return {
        second_label: value for (first_label, second_label), value in values.items() if first_label == first and value
    }
