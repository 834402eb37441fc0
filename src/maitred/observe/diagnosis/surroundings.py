"""Rules about everything but the engines: gateway process, upstream servers, clients, limits, stores and leaks."""

from collections.abc import Iterator

from maitred.observe.diagnosis.capacity import waiting_causes
from maitred.observe.diagnosis.finding import DiagnosisFinding, FindingKind
from maitred.observe.diagnosis.snapshot import HealthSnapshot

_LOOP_BUSY_SHARE = 0.85
"""Busy share of the event loop's thread above which each event waits for several others.

Busy time is time in which the thread is ready to run. In an M/D/1 queue the mean wait is nearly three times the work
from here on (Pollaczek and Khinchine).
"""
_CPU_WAIT_SHARE = 0.5
"""Seconds in a second that threads wait for a core."""
_OPEN_FILES_SHARE = 0.8
_SLOW_TTFT_S = 1.0
_SLOW_TPOT_S = 0.2
"""Five tokens a second, which is about how fast people read: 238 words a minute (M. Brysbaert, *How many words do we
read per minute?*, Journal of Memory and Language 109, 2019)."""
_PAUSED_SHARE = 0.2
_REJECTED_SHARE = 0.02
_BACKLOG_AGE_S = 3.0
"""The ledger writes twice a second."""
_STALE_DIRECTORY_S = 10.0
_MIN_TREND = 0.6
"""Agreement of pairs about the direction; see `maitred.observe.trend`."""
_LEAK_THRESHOLDS = {"memory_bytes": 16 << 20, "open_fds": 20.0, "threads": 4.0, "tasks": 20.0}
"""Resource -> least growth in an hour that is reported, if it is also a hundredth of the level."""


def check_gateway(snapshot: HealthSnapshot) -> Iterator[DiagnosisFinding]:
    """Finds a gateway process that lacks CPU time or file descriptors."""
    process = snapshot.gateway
    demand = process.loop_cpu_share + process.loop_wait_share
    lacks_cores = process.cpu_wait_share >= _CPU_WAIT_SHARE and process.cpu_share >= 0.5
    if demand >= _LOOP_BUSY_SHARE or lacks_cores:
        yield DiagnosisFinding(
            kind=FindingKind.GATEWAY,
            weight=min(1.0, max(demand, process.cpu_wait_share)),
            summary="The gateway's own work takes all the CPU time that it can get.",
            evidence=(
                f"The thread of its event loop ran {process.loop_cpu_share:.0%} of the time, and waited for a core "
                f"{process.loop_wait_share:.0%}.",
                f"All its threads took {process.cpu_share:.2f} cores, and waited for {process.cpu_wait_share:.2f}.",
            ),
            remedy=(
                "Others take its cores: lower engine.threads or engine.machine_share, or move engines to other "
                "machines (model.engines)."
                if process.loop_wait_share > process.loop_cpu_share
                else "Run several gateways that share store.url and counters.url. Long prompts cost it tokenising, "
                "streams and logprobs sending: send token ids, or ask for whole answers."
            ),
        )
    if process.max_fds and process.open_fds >= _OPEN_FILES_SHARE * process.max_fds:
        yield DiagnosisFinding(
            kind=FindingKind.GATEWAY,
            weight=process.open_fds / process.max_fds,
            summary="The gateway runs out of file descriptors: new connections will be turned away.",
            evidence=(f"{process.open_fds:,.0f} of {process.max_fds:,.0f} are open.",),
            remedy="Raise the limit of the process (LimitNOFILE of its systemd unit, ulimit -n).",
        )


def check_upstreams(snapshot: HealthSnapshot) -> Iterator[DiagnosisFinding]:
    """Finds upstream servers that are away or slow, or behind a slow network."""
    for server in snapshot.upstreams:
        away_share = max(1.0 - server.up, server.breaker_open)
        model = next((entry for entry in snapshot.models if entry.model == server.model), None)
        queue_vitals = next((entry for entry in snapshot.queues if entry.model == server.model), None)
        within_s = (model and model.first_token_within_s) or _SLOW_TTFT_S
        slowness = 0.0
        evidence = [f"{server.open_requests:.1f} of our requests are there; it says that {server.waiting:.1f} wait."]
        if model and model.answered:
            slowness = max(
                1 - within_s / max(model.prefill_s, within_s), 1 - _SLOW_TPOT_S / max(model.tpot_s, _SLOW_TPOT_S)
            )
            evidence.append(
                f"Without our own queue, first tokens took {model.prefill_s:.2f} s and further ones "
                f"{model.tpot_s * 1000:.0f} ms; expected are {within_s:g} s and {_SLOW_TPOT_S * 1000:.0f} ms."
            )
        elif server.open_requests >= 1 and snapshot.seconds >= 2 * within_s:
            slowness = 0.5
            evidence.append(f"None of its answers has begun in {snapshot.seconds:.0f} s.")
        queue_pressure = queue_vitals.pressure if queue_vitals is not None and waiting_causes(queue_vitals) else 0.0
        if queue_pressure:
            evidence.append("Requests wait here until it has room for more.")
        failures = snapshot.unserved.get(server.model, 0.0)
        if away_share:
            evidence.append(
                f"It was away, or kept from requests, at {away_share:.0%} of the looks; {failures:.0f} failed."
            )
        if not (weight := max(away_share, slowness, queue_pressure)):
            continue
        yield DiagnosisFinding(
            kind=FindingKind.UPSTREAM,
            where=f"{server.model}/{server.upstream}",
            weight=weight,
            summary="A server behind this one, or the network there, is "
            + ("away." if away_share >= max(slowness, queue_pressure) else "slow."),
            evidence=tuple(evidence),
            remedy="Look at that server and at the way there. Meanwhile: a second upstream for the model, "
            "routing.fallbacks to another model, dispatch.hedging for late first tokens.",
        )


def check_slow_clients(snapshot: HealthSnapshot) -> Iterator[DiagnosisFinding]:
    """Finds clients that read their responses too slowly."""
    paused = sum(engine.paused for engine in snapshot.engines)
    running = sum(engine.running for engine in snapshot.engines)
    share = paused / (paused + running) if paused >= 1 else 0.0
    cut = min(1.0, snapshot.stalled / snapshot.ended) if snapshot.ended else 0.0
    if max(share, cut) >= _PAUSED_SHARE:
        yield DiagnosisFinding(
            kind=FindingKind.SLOW_CLIENTS,
            weight=max(share, cut),
            summary="Clients read their answers more slowly than these are computed.",
            evidence=(
                f"{paused:.1f} sequences are paused for their readers, {running:.1f} run.",
                f"{snapshot.stalled:.0f} of {snapshot.ended:.0f} requests were cut because their clients had stopped "
                "reading.",
            ),
            remedy="Nobody else is held up, but connections and memory are: lower server.stall_grace_s to cut them "
            "sooner, or raise server.unread_tokens for readers that lag in bursts. Look for a proxy that buffers.",
        )


def check_limits(snapshot: HealthSnapshot) -> Iterator[DiagnosisFinding]:
    """Finds limits and budgets that reject requests."""
    rejected = sum(snapshot.limit_rejections.values())
    share = min(1.0, rejected / snapshot.ended) if snapshot.ended else 0.0
    if share < _REJECTED_SHARE:
        return
    rejections = [entry for entry in snapshot.rejected_by_tenant.items() if entry[1]]
    tenants = sorted(rejections, key=lambda entry: -entry[1])[:3]
    yield DiagnosisFinding(
        kind=FindingKind.LIMITS,
        where=", ".join(tenant for tenant, _ in tenants),
        weight=share,
        summary="Limits turn requests away.",
        evidence=(
            f"{rejected:.0f} of {snapshot.ended:.0f} requests: "
            + ", ".join(f"{count:.0f} by {kind}" for kind, count in sorted(snapshot.limit_rejections.items()))
            + ".",
            *(f"{tenant}: {count:.0f} refused." for tenant, count in tenants),
        ),
        remedy="If they should be served, raise the limit (`maitred limits list` shows it, `maitred limits set` "
        "changes it). If token limits refuse small requests, set admission.default_output_tokens: a request that "
        "names no length reserves a whole window.",
    )


def check_stores(snapshot: HealthSnapshot) -> Iterator[DiagnosisFinding]:
    """Finds a database, counters or a journal that does not keep up."""
    stores = snapshot.stores
    late = stores.backlog and stores.backlog_age_s >= _BACKLOG_AGE_S
    stale = stores.directory_age_s >= _STALE_DIRECTORY_S
    refused = snapshot.errors.get("store_unavailable", 0.0)
    if not (late or stale or stores.down or refused):
        return
    yield DiagnosisFinding(
        kind=FindingKind.STORE,
        where=", ".join(sorted(stores.down)) or "database",
        weight=max(0.9 if stores.down or refused else 0.0, min(0.8, 0.5 + stores.backlog_age_s / 60)),
        summary="The store does not keep up." if not stores.down else "A store does not answer.",
        evidence=(
            *(f"{name} was away at {share:.0%} of the looks." for name, share in sorted(stores.down.items())),
            f"{stores.backlog:,.0f} lines of usage wait to be written, the oldest for {stores.backlog_age_s:.1f} s.",
            f"{stores.leases_late:.0f} reservations wait to be settled; keys and limits are known as of "
            f"{stores.directory_age_s:.1f} s ago; {refused:.0f} requests were refused for it.",
        ),
        remedy="See what holds the database (disk, locks, network) or Redis up. Nothing is lost: usage is in the "
        "journal. For many writers take PostgreSQL (store.url) instead of SQLite; counters.answer_timeout_s says "
        "how long Redis may take.",
    )


def check_leaks(snapshot: HealthSnapshot) -> Iterator[DiagnosisFinding]:
    """Finds resources that grow while the load does not."""
    for growth in snapshot.growth:
        least = max(_LEAK_THRESHOLDS.get(growth.resource, 0.0), 0.01 * growth.level)
        if growth.trend < _MIN_TREND or growth.per_hour < least:
            continue
        yield DiagnosisFinding(
            kind=FindingKind.LEAK,
            where=growth.process,
            weight=min(0.4, 0.1 + 0.1 * growth.per_hour / max(growth.level, 1.0)),
            summary=f"{growth.resource} of {growth.process} grows while its load does not.",
            evidence=(
                f"{growth.per_hour:+,.0f} an hour at comparable load, now {growth.level:,.0f}.",
                f"Looks at it agree about the direction to {growth.trend:.0%}.",
            ),
            remedy="Restart the process before it runs out, and report it with the graphs of maitred_growth_level. "
            "Open files that grow are mostly connections that clients leave open: look at a proxy's keep-alive.",
        )


def check_configuration(snapshot: HealthSnapshot) -> Iterator[DiagnosisFinding]:
    """Finds settings that were written but are not in force."""
    if snapshot.reload_rejected:
        yield DiagnosisFinding(
            kind=FindingKind.CONFIG,
            weight=0.5,
            summary="The configuration has faults: the last reload was refused, and a restart would fail.",
            evidence=("The server goes on with the settings that it had before.",),
            remedy="Run `maitred config reload`: it lists the faults. Correct them, and run it again.",
        )
    if snapshot.pending_settings:
        yield DiagnosisFinding(
            kind=FindingKind.CONFIG,
            weight=0.1,
            summary="Settings have changed that need a restart: until then the old ones are in force.",
            evidence=(f"{snapshot.pending_settings:.0f} settings wait.",),
            remedy="`maitred config running` names them. Restart the server when it suits.",
        )


ENVIRONMENT_RULES = (
    check_gateway,
    check_upstreams,
    check_slow_clients,
    check_limits,
    check_stores,
    check_leaks,
    check_configuration,
)
