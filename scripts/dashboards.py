"""Writes the Grafana dashboards to ``deploy/grafana``: ``make docs``, or ``python -m scripts.dashboards``.

Grafana's own format has forty lines for what this script says of a panel in two, and nobody can review a change of it.
Here a dashboard is rows of panels, and a panel is a title, a unit, and queries with their legends.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "deploy" / "grafana"
COLUMNS = 24
"""Of Grafana's grid, over which the panels of a row are spread."""
HEIGHT = {"timeseries": 8, "stat": 4}

RATE = "[$__rate_interval]"
MODEL = '{model=~"$model"}'
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

Query = tuple[str, str]
"""An expression and the legend of its series."""


@dataclass(frozen=True)
class Panel:
    """One chart, or one number."""

    title: str
    unit: str
    queries: Sequence[Query]
    kind: str = "timeseries"
    about: str = ""


def rate(metric: str, by: str, selector: str = MODEL) -> Query:
    """How fast a counter grows, by labels."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return f"sum by ({by}) (rate({metric}{selector}{RATE}))", legend


def quantiles(histogram: str, by: str = "model") -> list[Query]:
    """The median and the slow ones."""
    return [
        (
            f"histogram_quantile({share}, sum by ({by}, le) (rate({histogram}_bucket{MODEL}{RATE})))",
            f"{{{{{by}}}}} {name}",
        )
        for name, share in QUANTILES.items()
    ]


def gauge(metric: str, by: str, selector: str = MODEL) -> Query:
    """A gauge, added up over the other labels."""
    return f"sum by ({by}) ({metric}{selector})", " ".join(f"{{{{{label}}}}}" for label in by.split(", "))


def share(part: str, whole: str, by: str) -> Query:
    """How much of what a counter counts another one does, by a label."""
    return f"sum by ({by}) (rate({part}{RATE})) / (sum by ({by}) (rate({whole}{RATE})) > 0)", f"{{{{{by}}}}}"


def per_replica(expression: str) -> Query:
    """Something that every replica has of its own."""
    return expression, "{{model}} {{replica}}"


OVERVIEW: Sequence[Sequence[Panel]] = [
    [
        Panel("Requests", "reqps", [("sum(rate(maitred_model_requests_total" + MODEL + RATE + "))", "")], "stat"),
        Panel(
            "Failed or turned away",
            "percentunit",
            [
                (
                    f'sum(rate(maitred_model_requests_total{{model=~"$model", outcome=~"failed|refused"}}{RATE}))'
                    f" / (sum(rate(maitred_model_requests_total{MODEL}{RATE})) > 0)",
                    "",
                )
            ],
            "stat",
        ),
        Panel("In flight", "none", [("sum(maitred_in_flight)", "")], "stat"),
        Panel(
            "Output tokens per second", "none", [(f"sum(rate(maitred_output_tokens_total{MODEL}{RATE}))", "")], "stat"
        ),
        Panel("Least error budget left", "percentunit", [("min(maitred_slo_error_budget_left)", "")], "stat"),
    ],
    [
        Panel("Requests by end", "reqps", [rate("maitred_model_requests_total", "outcome")]),
        Panel("Requests by class", "reqps", [rate("maitred_model_requests_total", "class")]),
        Panel("Errors by code", "reqps", [rate("maitred_errors_total", "code", "")]),
    ],
    [
        Panel("Time to first token", "s", quantiles("maitred_ttft_seconds")),
        Panel("Time between tokens", "s", quantiles("maitred_itl_seconds")),
        Panel("Time of a whole answer", "s", quantiles("maitred_e2e_seconds")),
    ],
    [
        Panel("Waiting", "none", [gauge("maitred_dispatch_waiting", "model, class")]),
        Panel(
            "Predicted wait of a newcomer",
            "s",
            [("max by (model, class) (maitred_dispatch_predicted_wait_seconds" + MODEL + ")", "{{model}} {{class}}")],
        ),
        Panel(
            "What requests waited for",
            "s",
            [rate("maitred_dispatch_queue_seconds_sum", "cause")],
            about="Seconds of waiting per second: how many requests waited for each cause, on average.",
        ),
    ],
    [
        Panel(
            "Error budget that is used up",
            "none",
            [("slo:maitred_slo_errors:ratio_rate1h / slo:maitred_slo_error_budget:ratio", "{{slo}}")],
            about="Over the last hour; 1 uses the whole budget up in exactly its window.",
        ),
        Panel("Error budget left", "percentunit", [("min by (slo) (maitred_slo_error_budget_left)", "{{slo}}")]),
        Panel(
            "Second chances",
            "ops",
            [
                ("sum(rate(maitred_recoveries_total" + MODEL + RATE + "))", "recoveries"),
                ("sum(rate(maitred_continued_total" + MODEL + RATE + "))", "continuations"),
                ("sum(rate(maitred_hedges_total" + MODEL + RATE + "))", "hedges"),
                (f"sum(rate(maitred_fallbacks_total{RATE}))", "fallbacks"),
                ("sum(rate(maitred_escalations_total" + MODEL + RATE + "))", "escalations"),
            ],
        ),
    ],
]

TENANTS: Sequence[Sequence[Panel]] = [
    [
        Panel("Requests", "reqps", [rate("maitred_tenant_requests_total", "tenant", '{tenant=~"$tenant"}')]),
        Panel(
            "Turned away",
            "percentunit",
            [
                share(
                    'maitred_tenant_requests_total{tenant=~"$tenant", outcome="refused"}',
                    'maitred_tenant_requests_total{tenant=~"$tenant"}',
                    "tenant",
                )
            ],
        ),
    ],
    [
        Panel(
            "Prompt tokens per second",
            "none",
            [rate("maitred_tenant_prompt_tokens_total", "tenant", '{tenant=~"$tenant"}')],
        ),
        Panel(
            "Output tokens per second",
            "none",
            [rate("maitred_tenant_output_tokens_total", "tenant", '{tenant=~"$tenant"}')],
        ),
    ],
    [
        Panel(
            f"{title}, on average",
            "s",
            [share(metric + '_sum{tenant=~"$tenant"}', metric + '_count{tenant=~"$tenant"}', "tenant")],
        )
        for title, metric in (
            ("Time to first token", "maitred_tenant_ttft_seconds"),
            ("Time in the queue", "maitred_tenant_queue_seconds"),
        )
    ],
    [
        Panel(
            "Budgets used",
            "percentunit",
            [("max by (tenant, budget, model) (maitred_budget_used_ratio)", "{{tenant}} {{budget}} {{model}}")],
            about="`*` is everybody together, `other` the fullest budget of those without a name.",
        ),
        Panel(
            "What users think of answers, on average",
            "percentunit",
            [
                (
                    "sum by (model, version) (rate(maitred_feedback_score_sum[1h]))"
                    " / (sum by (model, version) (rate(maitred_feedback_score_count[1h])) > 0)",
                    "{{model}} {{version}}",
                )
            ],
            about="From 0, bad, to 1, good.",
        ),
    ],
    [
        Panel("Refused by limits", "reqps", [rate("maitred_limit_refusals_total", "limit", "")]),
        Panel(
            "Given less than asked",
            "reqps",
            [
                (f"sum(rate(maitred_clamped_requests_total{RATE}))", "clamped by a limit"),
                rate("maitred_degraded_requests_total", "step", ""),
            ],
        ),
        Panel(
            "Reservations and ledger",
            "none",
            [
                ("sum by (state) (maitred_leases)", "leases {{state}}"),
                ("sum(maitred_ledger_backlog)", "lines that wait for the database"),
                (f"sum(increase(maitred_soft_budgets_passed_total{RATE}))", "soft budgets passed"),
            ],
        ),
        Panel(
            "Cost per hour",
            "currencyUSD",
            [(f"3600 * sum by (model) (rate(maitred_ledger_cost_usd_total{RATE}))", "{{model}}")],
        ),
        Panel(
            "Tokens that engines have counted and the ledger has not",
            "none",
            [("sum by (model) (maitred_ledger_drift_tokens)", "{{model}}")],
        ),
    ],
]

ENGINES: Sequence[Sequence[Panel]] = [
    [
        Panel("Connected", "none", [per_replica("maitred_engine_up" + MODEL)], "stat"),
        Panel(
            "Starts again", "none", [per_replica("increase(maitred_engine_restarts_total" + MODEL + "[1d])")], "stat"
        ),
        Panel("Asleep", "none", [per_replica("maitred_engine_asleep" + MODEL)], "stat"),
    ],
    [
        Panel(
            "Sequences",
            "none",
            [
                (f"maitred_engine_{state}{MODEL}", f"{{{{replica}}}} {state}")
                for state in ("running", "waiting", "paused")
            ],
        ),
        Panel("Batch of a step", "none", quantiles("maitred_step_sequences", "replica")),
        Panel("Time of a step", "s", quantiles("maitred_step_seconds", "replica")),
    ],
    [
        Panel(
            "Tokens per step",
            "none",
            [
                (
                    f"rate(maitred_engine_{kind}_tokens_total{MODEL}{RATE})"
                    f" / (rate(maitred_engine_steps_total{MODEL}{RATE}) > 0)",
                    f"{{{{replica}}}} {kind}",
                )
                for kind in ("prefill", "decode")
            ],
        ),
        Panel("Tokens of a step", "none", quantiles("maitred_step_tokens", "replica")),
        Panel(
            "Drafts that were right",
            "percentunit",
            [
                per_replica(
                    f"rate(maitred_engine_accepted_tokens_total{MODEL}{RATE})"
                    f" / (rate(maitred_engine_drafted_tokens_total{MODEL}{RATE}) > 0)"
                )
            ],
        ),
    ],
    [
        Panel("KV cache in use", "percentunit", [per_replica("replica:maitred_kv_used:ratio" + MODEL)]),
        Panel(
            "Prompt tokens found in the cache",
            "percentunit",
            [per_replica("replica:maitred_prefix_hits:ratio_rate5m" + MODEL)],
        ),
        Panel(
            "Blocks that change hands",
            "ops",
            [
                (f"rate(maitred_engine_{what}_blocks_total{MODEL}{RATE})", f"{{{{replica}}}} {what}")
                for what in ("evicted", "swapped", "restored")
            ],
        ),
    ],
    [
        Panel("Preemptions", "ops", [per_replica(f"rate(maitred_engine_preemptions_total{MODEL}{RATE})")]),
        Panel(
            "Work for nothing",
            "none",
            [
                (f"rate(maitred_engine_{what}_tokens_total{MODEL}{RATE})", f"{{{{replica}}}} {what}")
                for what in ("recomputed", "wasted")
            ],
            about="Tokens per second: computed again after a preemption, or sampled for nobody.",
        ),
        Panel(
            "Processors in use",
            "none",
            [per_replica(f"rate(maitred_engine_process_cpu_seconds_total{MODEL}{RATE})")],
            about="Cores of the engine's process.",
        ),
    ],
    [
        Panel("Memory of the process", "bytes", [per_replica("maitred_engine_process_resident_memory_bytes" + MODEL)]),
        Panel("GPU busy", "percentunit", [("maitred_engine_gpu_busy_ratio" + MODEL, "{{replica}} {{gpu}}")]),
        Panel(
            "GPU memory in use",
            "percentunit",
            [
                (
                    f"maitred_engine_gpu_memory_used_bytes{MODEL} / maitred_engine_gpu_memory_total_bytes{MODEL}",
                    "{{replica}} {{gpu}}",
                )
            ],
        ),
    ],
]

CAPACITY: Sequence[Sequence[Panel]] = [
    [
        Panel(
            "Time in steps",
            "percentunit",
            [per_replica("replica:maitred_step_busy:ratio_rate5m" + MODEL)],
            about="Near 1, the engine computes all the time: more requests will wait.",
        ),
        Panel(
            "Places left",
            "none",
            [per_replica('maitred_dispatch_credits{model=~"$model", resource="slots", state="free"}')],
        ),
        Panel(
            "KV tokens left",
            "percentunit",
            [
                per_replica(
                    'maitred_dispatch_credits{model=~"$model", resource="kv_tokens", state="free"}'
                    " / on (instance, model, replica) "
                    'maitred_dispatch_credits{model=~"$model", resource="kv_tokens", state="total"}'
                )
            ],
        ),
    ],
    [
        Panel("Tokens that answers under way take", "none", [gauge("maitred_dispatch_outstanding_tokens", "model")]),
        Panel("Service per second, when full", "none", [gauge("maitred_dispatch_service_per_second", "model")]),
        Panel("Waiting", "none", [gauge("maitred_dispatch_waiting", "model, class")]),
    ],
    [
        Panel(
            "Predicted over actual time to first token",
            "none",
            [("maitred_dispatch_ttft_ratio" + MODEL, "{{model}} {{quantile}}")],
            about="1 is right; above it, predictions were pessimistic.",
        ),
        Panel("Refused by the queue", "reqps", [rate("maitred_dispatch_refusals_total", "model, reason")]),
        Panel("Left while they waited", "reqps", [rate("maitred_dispatch_left_waiting_total", "model")]),
    ],
    [
        Panel("Requests at servers of others", "none", [gauge("maitred_upstream_open_requests", "model, upstream")]),
        Panel(
            "Breakers",
            "none",
            [("maitred_upstream_breaker_open" + MODEL, "{{model}} {{upstream}}")],
            about="1 is open.",
        ),
        Panel(
            "Models in memory",
            "bytes",
            [
                ("sum by (model) (maitred_model_reserved_bytes)", "{{model}}"),
                ("sum(maitred_residency_budget_bytes)", "budget"),
            ],
        ),
    ],
    [
        Panel(
            "Processors of the gateway", "none", [(f"rate(maitred_process_cpu_seconds_total{RATE})", "{{instance}}")]
        ),
        Panel("Memory of the gateway", "bytes", [("maitred_process_resident_memory_bytes", "{{instance}}")]),
        Panel(
            "Tasks of the gateway",
            "none",
            [("maitred_process_tasks", "{{instance}}")],
            about="Growth that stays is a leak.",
        ),
        Panel(
            "Open files of the gateway",
            "percentunit",
            [("maitred_process_open_fds / maitred_process_max_fds", "{{instance}}")],
        ),
    ],
]

DASHBOARDS: Mapping[str, tuple[str, str, Sequence[Sequence[Panel]]]] = {
    "overview": ("maitred: overview", "model", OVERVIEW),
    "tenants": ("maitred: tenants", "tenant", TENANTS),
    "engines": ("maitred: engines", "model", ENGINES),
    "capacity": ("maitred: capacity", "model", CAPACITY),
}
"""File -> title, the label that is chosen by, and the rows."""
_CHOICES = {
    "model": "label_values(maitred_dispatch_running, model)",
    "tenant": "label_values(maitred_tenant_requests_total, tenant)",
}
_SOURCE = {"type": "prometheus", "uid": "${source}"}


def dashboard(name: str) -> dict[str, Any]:
    """One dashboard in Grafana's format."""
    title, choice, rows = DASHBOARDS[name]
    panels: list[dict[str, Any]] = []
    top = 0
    for row in rows:
        width = COLUMNS // len(row)
        for number, panel in enumerate(row):
            place = {"x": number * width, "y": top, "w": width, "h": HEIGHT[panel.kind]}
            panels.append(_panel(len(panels) + 1, panel, place))
        top += max(HEIGHT[panel.kind] for panel in row)
    return {
        "uid": f"maitred-{name}",
        "title": title,
        "tags": ["maitred"],
        "schemaVersion": 38,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {"type": "dashboards", "tags": ["maitred"], "asDropdown": False, "keepTime": True, "title": "maitred"}
        ],
        "templating": {"list": [{"name": "source", "type": "datasource", "query": "prometheus"}, _variable(choice)]},
        "panels": panels,
    }


def _variable(label: str) -> dict[str, Any]:
    return {
        "name": label,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": _CHOICES[label], "refId": label},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(number: int, panel: Panel, place: Mapping[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0} if panel.unit == "percentunit" else {"unit": panel.unit},
            "overrides": [],
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": query,
                "legendFormat": legend or panel.title,
            }
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }


def rendered(name: str) -> str:
    """The file, as it is committed."""
    return json.dumps(dashboard(name), indent=1) + "\n"


def main() -> None:
    """Writes all of them."""
    for name in DASHBOARDS:
        (FOLDER / f"{name}.json").write_text(rendered(name))


if __name__ == "__main__":
    main()
