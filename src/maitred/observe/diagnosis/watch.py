"""From several scrapes to vitals: the only place that knows the names of metrics."""

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

_ENGINE = ("model", "replica")
_UPSTREAM = ("model", "upstream")
_UNSERVED = ("replica_unavailable", "replica_lost", "model_loading", "model_load_failed")
_Key = tuple[str, ...]
_Read = Callable[[str], float]


class ScrapeWatcher:
    """Looks at one server, one after the other.

    Args:
        looks: At least two.
        seconds: Between the first and the last.
    """

    def __init__(self, looks: Sequence[MetricSamples], seconds: float) -> None:
        self._scrapes = looks
        self._seconds = seconds

    def vitals(self) -> HealthSnapshot:
        """What the server did meanwhile."""
        grown = self._grown
        return HealthSnapshot(
            seconds=self._seconds,
            ended=sum(grown("maitred_model_requests_total").values()),
            stalled=sum(grown("maitred_stalled_requests_total").values()),
            errors=_single(grown("maitred_errors_total", "code")),
            unserved=self._unserved(),
            limit_refusals=_single(grown("maitred_limit_refusals_total", "limit")),
            refused_tenants={
                tenant: count
                for (tenant, outcome), count in grown("maitred_tenant_requests_total", "tenant", "outcome").items()
                if outcome == "refused"
            },
            gateway=self._gateway(),
            engines=[self._engine(*key) for key in self._keys("maitred_engine_up", *_ENGINE)],
            lines=[self._line(model) for (model,) in self._keys("maitred_dispatch_running", "model")],
            models=[self._model(model) for (model,) in self._keys("maitred_ttft_seconds_count", "model")],
            upstreams=[self._upstream(*key) for key in self._keys("maitred_upstream_up", *_UPSTREAM)],
            stores=self._stores(),
            growths=self._growths(),
            reload_refused=self._scrapes[-1].by("maitred_config_reload_successful").get(()) == 0.0,
            pending_settings=self._scrapes[-1].by("maitred_config_pending_settings").get((), 0.0),
        )

    def _unserved(self) -> dict[str, float]:
        counts: defaultdict[str, float] = defaultdict(float)
        for (model, code), count in self._grown("maitred_errors_total", "model", "code").items():
            if code in _UNSERVED and count:
                counts[model] += count
        return dict(counts)

    def _gateway(self) -> GatewayVitals:
        def share(name: str) -> float:
            return self._grown(name).get((), 0.0) / self._seconds

        return GatewayVitals(
            cpu_share=share("maitred_process_cpu_seconds_total"),
            cpu_wait_share=share("maitred_process_cpu_wait_seconds_total"),
            loop_cpu_share=share("maitred_event_loop_cpu_seconds_total"),
            loop_wait_share=share("maitred_event_loop_cpu_wait_seconds_total"),
            open_fds=self._mean("maitred_process_open_fds").get((), 0.0),
            max_fds=self._mean("maitred_process_max_fds").get((), 0.0),
        )

    def _engine(self, model: str, replica: str) -> EngineVitals:
        mean, grown = self._one((model, replica), _ENGINE, "maitred_engine_")
        steps, step_s, blocks = grown("steps_total"), grown("step_seconds_total"), mean("kv_blocks_total")
        return EngineVitals(
            model=model,
            replica=replica,
            up=mean("up"),
            on_demand=(model,) in self._scrapes[-1].by("maitred_model_resident", "model"),
            restarts=grown("restarts_total"),
            busy_share=step_s / self._seconds,
            steps=steps,
            step_s=step_s / steps if steps else 0.0,
            running=mean("running"),
            waiting=mean("waiting"),
            paused=mean("paused"),
            kv_free_share=mean("kv_blocks_free") / blocks if blocks else 1.0,
            kv_capacity_tokens=mean("kv_capacity_tokens"),
            preemptions=grown("preemptions_total"),
            recomputed_tokens=grown("recomputed_tokens_total"),
            prefill_tokens=grown("prefill_tokens_total"),
            decode_tokens=grown("decode_tokens_total"),
        )

    def _line(self, model: str) -> QueueVitals:
        mean, _ = self._one((model,), ("model",), "maitred_dispatch_")
        waited, count = "maitred_dispatch_queue_seconds_sum", "maitred_dispatch_queue_seconds_count"
        credit = self._mean("maitred_dispatch_credits", "model", "resource", "state")
        waits = self._mean("maitred_dispatch_predicted_wait_seconds", "model", "class")
        return QueueVitals(
            model=model,
            waiting=mean("waiting"),
            running=mean("running"),
            predicted_wait_s=max((wait_s for (of, _), wait_s in waits.items() if of == model), default=0.0),
            released=self._grown(count, "model").get((model,), 0.0),
            waited_s=_second(self._grown(waited, "model", "cause"), model),
            refused=_second(self._grown("maitred_dispatch_refusals_total", "model", "reason"), model),
            free_slots=credit.get((model, "slots", "free"), 0.0),
            total_slots=credit.get((model, "slots", "total"), 0.0),
            free_kv_tokens=credit.get((model, "kv_tokens", "free"), 0.0),
            total_kv_tokens=credit.get((model, "kv_tokens", "total"), 0.0),
        )

    def _model(self, model: str) -> ModelVitals:
        _, grown = self._one((model,), ("model",), "maitred_")
        answered, decoded = grown("prefill_seconds_count"), grown("tpot_seconds_count")
        objectives = self._scrapes[-1].by("maitred_slo_within_seconds", "slo", "model", "indicator")
        within_s = [value for (_, of, what), value in objectives.items() if of in (model, "*") and what == "ttft"]
        return ModelVitals(
            model=model,
            answered=answered,
            prefill_s=grown("prefill_seconds_sum") / answered if answered else 0.0,
            tpot_s=grown("tpot_seconds_sum") / decoded if decoded else 0.0,
            first_token_within_s=min(within_s, default=None),
        )

    def _upstream(self, model: str, upstream: str) -> UpstreamVitals:
        mean, _ = self._one((model, upstream), _UPSTREAM, "maitred_upstream_")
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
            return last.by(name).get((), 0.0)

        return StoreVitals(
            down={store: 1 - up for (store,), up in self._mean("maitred_store_up", "store").items() if up < 1},
            backlog=now("maitred_ledger_backlog"),
            backlog_age_s=now("maitred_ledger_backlog_age_seconds"),
            leases_late=last.by("maitred_leases", "state").get(("late",), 0.0),
            directory_age_s=now("maitred_directory_age_seconds"),
        )

    def _growths(self) -> list[GrowthVitals]:
        last = self._scrapes[-1]
        trends = last.by("maitred_growth_trend", "process", "resource")
        levels = last.by("maitred_growth_level", "process", "resource")
        return [
            GrowthVitals(
                process=key[0], resource=key[1], per_hour=per_hour, trend=trends.get(key, 0.0), level=levels.get(key, 0)
            )
            for key, per_hour in last.by("maitred_growth_per_hour", "process", "resource").items()
        ]

    def _keys(self, name: str, *labels: str) -> list[_Key]:
        return sorted({key for look in self._scrapes for key in look.by(name, *labels)})

    def _one(self, key: _Key, labels: Sequence[str], prefix: str) -> tuple[_Read, _Read]:
        """Means and growths of what one thing has, by the rest of the metric's name."""

        def mean(name: str) -> float:
            return self._mean(prefix + name, *labels).get(key, 0.0)

        def grown(name: str) -> float:
            return self._grown(prefix + name, *labels).get(key, 0.0)

        return mean, grown

    def _mean(self, name: str, *labels: str) -> dict[_Key, float]:
        """Over all looks; where it was missing it counts as 0."""
        sums: defaultdict[_Key, float] = defaultdict(float)
        for look in self._scrapes:
            for key, value in look.by(name, *labels).items():
                sums[key] += value
        return {key: value / len(self._scrapes) for key, value in sums.items()}

    def _grown(self, name: str, *labels: str) -> dict[_Key, float]:
        """What was added; of a counter that began anew, what it has."""
        before, after = self._scrapes[0].by(name, *labels), self._scrapes[-1].by(name, *labels)
        grown = {key: value - before.get(key, 0.0) for key, value in after.items()}
        return {key: after[key] if by < 0 else by for key, by in grown.items()}


def _single(values: Mapping[_Key, float]) -> dict[str, float]:
    return {name: value for (name,), value in values.items() if value}


def _second(values: Mapping[_Key, float], first: str) -> dict[str, float]:
    return {second: value for (one, second), value in values.items() if one == first and value}
