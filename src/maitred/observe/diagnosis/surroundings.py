"""Rules about what is around the engines: the gateway itself, servers of others, readers, limits, stores; and leaks."""

from collections.abc import Iterator

from maitred.observe.diagnosis.capacity import lacks
from maitred.observe.diagnosis.finding import DiagnosisFinding, FindingKind
from maitred.observe.diagnosis.snapshot import HealthSnapshot

_LOOP_BUSY = 0.85
"""A thread that is ready to run for more of the time makes every event wait for several others: in an M/D/1 queue the
mean wait is nearly three times the work from here on (Pollaczek and Khinchine)."""
_CORES_SHORT = 0.5
"""Seconds in a second that threads wait for a core."""
_FILES_FULL = 0.8
_SLOW_FIRST_TOKEN_S = 1.0
_SLOW_TOKEN_S = 0.2
"""Five tokens a second, which is about how fast people read: 238 words a minute (M. Brysbaert, *How many words do we
read per minute?*, Journal of Memory and Language 109, 2019)."""
_PAUSED = 0.2
_REFUSED = 0.02
_BACKLOG_AGE_S = 3.0
"""The ledger writes twice a second."""
_STALE_DIRECTORY_S = 10.0
_CERTAIN = 0.6
"""Agreement of pairs about the direction; see `maitred.observe.trend`."""
_LEAKS = {"memory_bytes": 16 << 20, "open_fds": 20.0, "threads": 4.0, "tasks": 20.0}
"""Resource -> growth in an hour that is worth a word, if it is also a hundredth of what there is."""


def gateway(vitals: HealthSnapshot) -> Iterator[DiagnosisFinding]:
    """The event loop has no time, the machine no core, or the process no file descriptors left."""
    process = vitals.gateway
    demand = process.loop_cpu_share + process.loop_wait_share
    short = process.cpu_wait_share >= _CORES_SHORT and process.cpu_share >= 0.5
    if demand >= _LOOP_BUSY or short:
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
    if process.max_fds and process.open_fds >= _FILES_FULL * process.max_fds:
        yield DiagnosisFinding(
            kind=FindingKind.GATEWAY,
            weight=process.open_fds / process.max_fds,
            summary="The gateway runs out of file descriptors: new connections will be turned away.",
            evidence=(f"{process.open_fds:,.0f} of {process.max_fds:,.0f} are open.",),
            remedy="Raise the limit of the process (LimitNOFILE of its systemd unit, ulimit -n).",
        )


def upstream(vitals: HealthSnapshot) -> Iterator[DiagnosisFinding]:
    """Servers of others are away or slow, or the way there is."""
    for server in vitals.upstreams:
        away = max(1.0 - server.up, server.breaker_open)
        model = next((one for one in vitals.models if one.model == server.model), None)
        line = next((one for one in vitals.lines if one.model == server.model), None)
        within_s = (model and model.first_token_within_s) or _SLOW_FIRST_TOKEN_S
        slowness = 0.0
        evidence = [f"{server.open_requests:.1f} of our requests are there; it says that {server.waiting:.1f} wait."]
        if model and model.answered:
            slowness = max(
                1 - within_s / max(model.prefill_s, within_s), 1 - _SLOW_TOKEN_S / max(model.tpot_s, _SLOW_TOKEN_S)
            )
            evidence.append(
                f"Without our own queue, first tokens took {model.prefill_s:.2f} s and further ones "
                f"{model.tpot_s * 1000:.0f} ms; expected are {within_s:g} s and {_SLOW_TOKEN_S * 1000:.0f} ms."
            )
        elif server.open_requests >= 1 and vitals.seconds >= 2 * within_s:
            slowness = 0.5
            evidence.append(f"None of its answers has begun in {vitals.seconds:.0f} s.")
        full = line.pressure if line is not None and lacks(line) else 0.0
        if full:
            evidence.append("Requests wait here until it has room for more.")
        failures = vitals.unserved.get(server.model, 0.0)
        if away:
            evidence.append(f"It was away, or kept from requests, at {away:.0%} of the looks; {failures:.0f} failed.")
        if not (weight := max(away, slowness, full)):
            continue
        yield DiagnosisFinding(
            kind=FindingKind.UPSTREAM,
            where=f"{server.model}/{server.upstream}",
            weight=weight,
            summary="A server behind this one, or the network there, is "
            + ("away." if away >= max(slowness, full) else "slow."),
            evidence=tuple(evidence),
            remedy="Look at that server and at the way there. Meanwhile: a second upstream for the model, "
            "routing.fallbacks to another model, dispatch.hedging for late first tokens.",
        )


def slow_clients(vitals: HealthSnapshot) -> Iterator[DiagnosisFinding]:
    """Answers are not computed because nobody reads them."""
    paused = sum(engine.paused for engine in vitals.engines)
    running = sum(engine.running for engine in vitals.engines)
    share = paused / (paused + running) if paused >= 1 else 0.0
    cut = min(1.0, vitals.stalled / vitals.ended) if vitals.ended else 0.0
    if max(share, cut) >= _PAUSED:
        yield DiagnosisFinding(
            kind=FindingKind.SLOW_CLIENTS,
            weight=max(share, cut),
            summary="Clients read their answers more slowly than these are computed.",
            evidence=(
                f"{paused:.1f} sequences are paused for their readers, {running:.1f} run.",
                f"{vitals.stalled:.0f} of {vitals.ended:.0f} requests were cut because their clients had stopped "
                "reading.",
            ),
            remedy="Nobody else is held up, but connections and memory are: lower server.stall_grace_s to cut them "
            "sooner, or raise server.unread_tokens for readers that lag in bursts. Look for a proxy that buffers.",
        )


def limits(vitals: HealthSnapshot) -> Iterator[DiagnosisFinding]:
    """Limits and budgets turn requests away."""
    refused = sum(vitals.limit_refusals.values())
    share = min(1.0, refused / vitals.ended) if vitals.ended else 0.0
    if share < _REFUSED:
        return
    refusals = [each for each in vitals.refused_tenants.items() if each[1]]
    tenants = sorted(refusals, key=lambda each: -each[1])[:3]
    yield DiagnosisFinding(
        kind=FindingKind.LIMITS,
        where=", ".join(tenant for tenant, _ in tenants),
        weight=share,
        summary="Limits turn requests away.",
        evidence=(
            f"{refused:.0f} of {vitals.ended:.0f} requests: "
            + ", ".join(f"{count:.0f} by {kind}" for kind, count in sorted(vitals.limit_refusals.items()))
            + ".",
            *(f"{tenant}: {count:.0f} refused." for tenant, count in tenants),
        ),
        remedy="If they should be served, raise the limit (`maitred limits list` shows it, `maitred limits set` "
        "changes it). If token limits refuse small requests, set admission.default_output_tokens: a request that "
        "names no length reserves a whole window.",
    )


def store(vitals: HealthSnapshot) -> Iterator[DiagnosisFinding]:
    """The database, the counters or the journal do not keep up."""
    stores = vitals.stores
    late = stores.backlog and stores.backlog_age_s >= _BACKLOG_AGE_S
    stale = stores.directory_age_s >= _STALE_DIRECTORY_S
    refused = vitals.errors.get("store_unavailable", 0.0)
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


def leak(vitals: HealthSnapshot) -> Iterator[DiagnosisFinding]:
    """Something grows while the load does not."""
    for growth in vitals.growths:
        least = max(_LEAKS.get(growth.resource, 0.0), 0.01 * growth.level)
        if growth.trend < _CERTAIN or growth.per_hour < least:
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


def configuration(vitals: HealthSnapshot) -> Iterator[DiagnosisFinding]:
    """What somebody has written, and what is in force, are not the same."""
    if vitals.reload_refused:
        yield DiagnosisFinding(
            kind=FindingKind.CONFIG,
            weight=0.5,
            summary="The configuration has faults: the last reload was refused, and a restart would fail.",
            evidence=("The server goes on with the settings that it had before.",),
            remedy="Run `maitred config reload`: it lists the faults. Correct them, and run it again.",
        )
    if vitals.pending_settings:
        yield DiagnosisFinding(
            kind=FindingKind.CONFIG,
            weight=0.1,
            summary="Settings have changed that need a restart: until then the old ones are in force.",
            evidence=(f"{vitals.pending_settings:.0f} settings wait.",),
            remedy="`maitred config running` names them. Restart the server when it suits.",
        )


SURROUNDINGS = (gateway, upstream, slow_clients, limits, store, leak, configuration)
