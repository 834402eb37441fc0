"""The plan of a rehearsal: what runs, which load, which faults at which times, and which promises must hold.

The structs hold what a YAML file may say; `check` finds what is wrong between the fields, all of it at once. A plan::

    installation:
      serve: maitred serve --port {port}
    load:
      arrivals: {users: 8}
      bounds: {duration_s: 30}
    faults:
      - {kind: kill, target: engine, at_s: 10}
      - {kind: hang, target: gateway, at_s: 18, for_s: 3}
    invariants:
      recovery_s: 15
"""

from itertools import combinations
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from maitred.core.errors import ConfigInvalid
from maitred.load.spec import Count, LoadSpec, PositiveSeconds, Seconds

_BYTES = {"unit": "bytes"}
Bytes = Annotated[int, Meta(ge=0, extra=_BYTES)]
BytesPerSecond = Annotated[int, Meta(gt=0, extra=_BYTES)]
LeftSpeed = Annotated[float, Meta(gt=0, lt=1)]
Amount = Annotated[float, Meta(ge=0)]
OffsetSeconds = Annotated[float, Meta(extra={"unit": "seconds"})]
ProcessId = Annotated[int, Meta(ge=2)]

FaultKind = Literal[
    "kill",
    "hang",
    "slow",
    "partition",
    "delay",
    "throttle",
    "store_down",
    "disk_full",
    "clock_jump",
    "memory",
    "leave",
    "stall",
]
How = Literal["kill", "hang", "refuse", "reset", "blackhole"]
Direction = Literal["both", "to_server", "to_client"]

GATEWAY = "gateway"
"""The role of the process that chaos starts, or that the plan names by `pid`."""


class Role(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to find one process of the installation. It is looked up when it is needed, so a restarted one is found."""

    child_of: Annotated[str | None, Meta(description="A role: the process is below it, at any depth.")] = None
    command_contains: Annotated[str | None, Meta(description="A part of its command line, to tell it apart.")] = None
    pid_file: Annotated[str | None, Meta(description="File that holds its process id.")] = None
    store: Annotated[bool, Meta(description="Whether it keeps state, and `store_down` may hit it.")] = False


class Link(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A TCP connection between two parts, led through chaos so that it can fail."""

    listen: Annotated[str, Meta(description="`HOST:PORT` to listen at; port 0 takes a free one.")] = "127.0.0.1:0"
    to: Annotated[
        str | None, Meta(description="`HOST:PORT` where it leads. Default: the installation's HTTP address.")
    ] = None
    store: Annotated[bool, Meta(description="Whether a store is behind it, and `store_down` may hit it.")] = False


class Installation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is tested: a command line that is started and stopped (`serve`), or something that runs already."""

    serve: Annotated[
        str | None,
        Meta(
            description="Command line to start, without a shell. `{port}` becomes a free port, `{link.NAME}` the "
            "`HOST:PORT` at which a link listens."
        ),
    ] = None
    pid: Annotated[ProcessId | None, Meta(description="In place of `serve`: the process of the role `gateway`.")] = None
    url: Annotated[
        str | None, Meta(description="Address of the server. Default with `serve`: http://127.0.0.1:{port}.")
    ] = None
    ready: Annotated[str, Meta(description="Path that answers 200 when requests can run.")] = "/health/ready"
    start_s: Annotated[PositiveSeconds, Meta(description="It must be ready within this.")] = 120.0
    stop_s: Annotated[PositiveSeconds, Meta(description="It must end within this after SIGTERM.")] = 60.0
    processes: Annotated[
        dict[str, Role],
        Meta(description="Role -> how to find it. `gateway` and `engine`, a child of it, are known already."),
    ] = {}
    links: Annotated[dict[str, Link], Meta(description="Name -> a connection that can be made to fail.")] = {}
    clients_through: Annotated[
        str | None, Meta(description="The link that the load goes through. Default: straight to the server.")
    ] = None


class Fault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that goes wrong, and is undone."""

    kind: Annotated[FaultKind, Meta(description="What happens.")]
    at_s: Annotated[Seconds, Meta(description="When, since the start of the load.")]
    target: Annotated[str, Meta(description="A role or a link.")] = ""
    for_s: Annotated[
        PositiveSeconds | None,
        Meta(description="For how long. With `kill`: after this, chaos starts it again, as a supervisor of it does."),
    ] = None
    speed: Annotated[LeftSpeed | None, Meta(description="`slow`: the share of its speed that is left.")] = None
    how: Annotated[
        How | None,
        Meta(
            description="`partition`: `refuse` new connections, `reset` them all, or `blackhole` (default). "
            "`store_down`: these on a link, `kill` or `hang` on a process."
        ),
    ] = None
    direction: Annotated[
        Direction | None, Meta(description="`blackhole`: `both` (default), `to_server` or `to_client`.")
    ] = None
    delay_s: Annotated[PositiveSeconds | None, Meta(description="`delay`: added to each direction.")] = None
    bytes_per_s: Annotated[BytesPerSecond | None, Meta(description="`throttle`: of each connection and direction.")] = (
        None
    )
    jump_s: Annotated[OffsetSeconds | None, Meta(description="`clock_jump`: so far, backwards where negative.")] = None
    spare_bytes: Annotated[Bytes | None, Meta(description="`memory`: so much more than it has now may be mapped.")] = (
        None
    )
    clients: Annotated[Count | None, Meta(description="`leave`, `stall`: so many more users at once.")] = None
    after_s: Annotated[Seconds | None, Meta(description="`leave`: they hang up so long after asking; default 1.")] = (
        None
    )


class Invariants(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must hold. null turns one off."""

    same_answers: Annotated[
        bool,
        Meta(description="A whole answer is the one of the calm run, token by token; a cut one is its beginning."),
    ] = True
    ends_within_s: Annotated[
        PositiveSeconds | None, Meta(description="Every request ends, and takes at most so long from when it was due.")
    ] = 120.0
    no_double_bill: Annotated[
        bool, Meta(description="The server's meter shows no more than its clients can have caused.")
    ] = True
    overshoot_tokens: Annotated[
        Amount | None, Meta(description="Tokens computed for nobody, for each client that has left, on average.")
    ] = 64.0
    recovery_s: Annotated[
        PositiveSeconds | None, Meta(description="From the end of a fault to the first whole answer asked after it.")
    ] = 30.0
    throughput_recovery_s: Annotated[
        PositiveSeconds | None, Meta(description="From the end of a fault until tokens flow as fast as in calm again.")
    ] = 45.0
    recovered_share: Annotated[float, Meta(gt=0, le=1, description="What counts as fast as in calm.")] = 0.9
    nothing_left_s: Annotated[
        PositiveSeconds | None,
        Meta(description="After the load, nothing is in flight, runs, waits or holds a KV block within this."),
    ] = 15.0
    clean_end: Annotated[
        bool, Meta(description="It ends by SIGTERM with exit code 0 and leaves no process behind.")
    ] = True


class Plan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole rehearsal."""

    installation: Installation
    load: LoadSpec = LoadSpec()
    faults: Annotated[list[Fault], Meta(description="In any order; they may overlap.")] = []
    invariants: Invariants = Invariants()


class _Form(NamedTuple):
    """What a kind of fault hits, and which fields it must and may have."""

    target: Literal["process", "link", "store", "none"]
    must: frozenset[str] = frozenset()
    may: frozenset[str] = frozenset()


_FOR = frozenset({"for_s"})
_FORMS: dict[FaultKind, _Form] = {
    "kill": _Form("process", may=_FOR),
    "hang": _Form("process", _FOR),
    "slow": _Form("process", _FOR | {"speed"}),
    "partition": _Form("link", _FOR, frozenset({"how", "direction"})),
    "delay": _Form("link", _FOR | {"delay_s"}),
    "throttle": _Form("link", _FOR | {"bytes_per_s"}),
    "store_down": _Form("store", frozenset({"how"}), _FOR | {"direction"}),
    "disk_full": _Form("process", _FOR),
    "clock_jump": _Form("none", _FOR | {"jump_s"}),
    "memory": _Form("process", _FOR | {"spare_bytes"}),
    "leave": _Form("none", frozenset({"clients"}), frozenset({"after_s"})),
    "stall": _Form("none", _FOR | {"clients"}),
}
_OPTIONAL = (
    "for_s",
    "speed",
    "how",
    "direction",
    "delay_s",
    "bytes_per_s",
    "jump_s",
    "spare_bytes",
    "clients",
    "after_s",
)
_ON_LINKS: frozenset[How] = frozenset({"refuse", "reset", "blackhole"})


def check(plan: Plan) -> None:
    """Everything that must hold between the fields of a plan.

    Raises:
        ConfigInvalid: The message lists all that does not.
    """
    wrong = [*_installation_faults(plan), *_load_faults(plan)]
    for number, fault in enumerate(plan.faults):
        wrong += [f"faults[{number}] ({fault.kind}): {sentence}" for sentence in _fault_faults(plan, fault)]
    if not wrong:  # with a wrong target or no end, whether two meet cannot be said
        wrong = _collisions(plan.faults)
    if wrong:
        raise ConfigInvalid("\n  ".join(["The chaos plan cannot be played:", *wrong]))


def roles(installation: Installation) -> dict[str, Role]:
    """All roles by name: those that the plan describes over those that every installation has."""
    known = {"engine": Role(child_of=GATEWAY, command_contains="engine")}
    if installation.serve or installation.pid:
        known[GATEWAY] = Role()
    return known | installation.processes


def _installation_faults(plan: Plan) -> list[str]:
    installation = plan.installation
    wrong = []
    given = [name for name in ("serve", "pid") if getattr(installation, name) is not None]
    if len(given) == 2:
        wrong.append("installation: serve starts a process and pid names a running one. Keep one of them.")
    if installation.serve is None and installation.url is None:
        wrong.append("installation: set serve, the command line to start, or the url of a server that runs.")
    if installation.serve is not None and installation.url is None and "{port}" not in installation.serve:
        wrong.append("installation.serve: must hold {port}, such as `maitred serve --port {port}`, or url must be set.")
    known = roles(installation)
    for name, role in installation.processes.items():
        key = f"installation.processes.{name}"
        if (role.child_of is None) == (role.pid_file is None) and name != GATEWAY:
            wrong.append(f"{key}: set child_of or pid_file, and not both.")
        if role.child_of is not None and (role.child_of not in known or _circular(name, known)):
            wrong.append(f"{key}.child_of: {role.child_of!r} leads to no process. There are: {', '.join(known)}.")
    for name, link in installation.links.items():
        for field, address in (("listen", link.listen), ("to", link.to)):
            if address is not None and not _is_address(address):
                wrong.append(f"installation.links.{name}.{field}: must be HOST:PORT, not {address!r}.")
    through = installation.clients_through
    if through is not None and through not in installation.links:
        wrong.append(f"installation.clients_through: no link {through!r}. {_listed('Links', installation.links)}")
    return wrong


def _load_faults(plan: Plan) -> list[str]:
    wrong = []
    arrivals = plan.load.arrivals
    if arrivals.users is not None and arrivals.rate_per_s is not None:
        wrong.append("load.arrivals: users wait for their answers, and a rate waits for nothing. Keep one of them.")
    if arrivals.users is None and arrivals.rate_per_s is None and plan.load.shape.trace is None:
        wrong.append("load.arrivals: say how the load arrives: users or rate_per_s, or a trace in load.shape.")
    try:
        body = msgspec.json.decode(plan.load.target.body)
    except msgspec.DecodeError:
        body = None
    if not isinstance(body, dict):
        wrong.append(f"load.target.body: must be a JSON object, not {plan.load.target.body!r}.")
    return wrong


def _fault_faults(plan: Plan, fault: Fault) -> list[str]:
    form = _FORMS[fault.kind]
    given = {name for name in _OPTIONAL if getattr(fault, name) is not None}
    wrong = [f"{name} must be set." for name in sorted(form.must - given)]
    wrong += [f"{name} has no meaning here. Remove it." for name in sorted(given - form.must - form.may)]
    known, links = roles(plan.installation), plan.installation.links
    match form.target:
        case "process" if fault.target not in known:
            wrong.append(f"target: no process {fault.target!r}. {_listed('Processes', known)}")
        case "link" if fault.target not in links:
            wrong.append(f"target: no link {fault.target!r}. {_listed('Links', links)}")
        case "store":
            wrong += _store_faults(known.get(fault.target), links.get(fault.target), fault)
        case "none" if fault.target:
            wrong.append("target has no meaning here. Remove it.")
    if fault.kind == "partition" and fault.how not in {None, *_ON_LINKS}:
        wrong.append(f"how: {fault.how!r} is not for links. Use refuse, reset or blackhole.")
    if fault.direction is not None and fault.how not in {None, "blackhole"}:
        wrong.append(f"direction: {fault.how} is for both directions. Only a blackhole can have one.")
    restarts = fault.for_s is not None and (fault.kind == "kill" or fault.how == "kill")
    if restarts and (fault.target != GATEWAY or plan.installation.serve is None):
        wrong.append("for_s: only the process that serve starts can be started again. Remove it.")
    if fault.kind == "clock_jump" and plan.installation.serve is None:
        wrong.append("the clock can only be set for an installation that chaos starts: set installation.serve.")
    return wrong


def _store_faults(role: Role | None, link: Link | None, fault: Fault) -> list[str]:
    if not ((role is not None and role.store) or (link is not None and link.store)):
        return [f"target: {fault.target!r} is no store. Mark its process or its link with `store: true`."]
    if fault.how in _ON_LINKS and link is None:
        return [f"how: {fault.how} needs a link, and {fault.target!r} is a process. Use kill or hang."]
    if fault.how in {"kill", "hang"} and (role is None or not role.store):
        return [f"how: {fault.how} needs a process, and {fault.target!r} is a link. Use refuse, reset or blackhole."]
    if fault.how != "kill" and fault.for_s is None:
        return ["for_s must be set."]
    return []


def _collisions(faults: list[Fault]) -> list[str]:
    """Pairs that would pull the same lever at once, so that the end of one would undo the other."""
    wrong = []
    for (first, one), (second, other) in combinations(enumerate(faults), 2):
        lever = _lever(one)
        if lever is not None and lever == _lever(other) and _overlap(one, other):
            wrong.append(
                f"faults[{first}] and faults[{second}]: both use the {lever[0]} of {lever[1] or 'all'} at once."
            )
    return wrong


def _lever(fault: Fault) -> tuple[str, str] | None:
    match fault.kind:
        case "hang" | "slow":
            return "signals", fault.target
        case "partition":
            return "break", fault.target
        case "store_down" if fault.how != "kill":
            return ("signals" if fault.how == "hang" else "break"), fault.target
        case "delay" | "throttle" | "disk_full" | "memory":
            return fault.kind, fault.target
        case "clock_jump":
            return "clock", ""
    return None


def _overlap(one: Fault, other: Fault) -> bool:
    first, second = sorted((one, other), key=lambda fault: fault.at_s)
    return second.at_s < first.at_s + (first.for_s or 0.0)


def _circular(name: str, known: dict[str, Role]) -> bool:
    seen = {name}
    parent = known[name].child_of
    while parent is not None and parent in known:
        if parent in seen:
            return True
        seen.add(parent)
        parent = known[parent].child_of
    return False


def _is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(host and colon) and port.isascii() and port.isdigit() and int(port) < 65536


def _listed(what: str, names: dict[str, Role] | dict[str, Link]) -> str:
    return f"{what}: {', '.join(names)}." if names else f"The plan has no {what.lower()}."
