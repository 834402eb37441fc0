"""The plan of a rehearsal: what runs, which load, which faults at which times, and which promises must hold.

The structs define the YAML file; `rules.check` finds settings that contradict each other. A plan::

    installation:
      serve: maitred serve --port {port}
    load:
      arrivals: {users: 8}
      bounds: {duration_s: 30}
    faults:
      - {kind: kill, target: engine, at_s: 10}
      - {kind: hang, target: gateway, at_s: 18, for_s: 3} invariants: recovery_s: 15
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

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
"""Role of the process that chaos starts, or that the plan names by `pid`."""


class ProcessRole(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rule to find one process of the installation, at each use, so that a restarted one is found."""

    child_of: Annotated[str | None, Meta(description="A role: the process is below it, at any depth.")] = None
    command_contains: Annotated[str | None, Meta(description="A part of its command line, to tell it apart.")] = None
    pid_file: Annotated[str | None, Meta(description="File that holds its process id.")] = None
    store: Annotated[bool, Meta(description="Whether it keeps state, and `store_down` may hit it.")] = False


class ChaosLink(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TCP connection between two parts that chaos relays so that it can fail."""

    listen: Annotated[str, Meta(description="`HOST:PORT` to listen at; port 0 takes a free one.")] = "127.0.0.1:0"
    to: Annotated[
        str | None, Meta(description="`HOST:PORT` where it leads. Default: the installation's HTTP address.")
    ] = None
    store: Annotated[bool, Meta(description="Whether a store is behind it, and `store_down` may hit it.")] = False


class Installation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Installation under test: a command line that is started and stopped (`serve`), or a running one."""

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
        dict[str, ProcessRole],
        Meta(description="Role -> how to find it. `gateway` and `engine`, a child of it, are known already."),
    ] = {}
    links: Annotated[dict[str, ChaosLink], Meta(description="Name -> a connection that can be made to fail.")] = {}
    clients_through: Annotated[
        str | None, Meta(description="The link that the load goes through. Default: straight to the server.")
    ] = None


class ChaosFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fault that is injected and later undone."""

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
    """Invariants that must hold; the value null turns one off."""

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


class ChaosPlan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Plan of a whole rehearsal."""

    installation: Installation
    load: LoadSpec = LoadSpec()
    faults: Annotated[list[ChaosFault], Meta(description="In any order; they may overlap.")] = []
    invariants: Invariants = Invariants()


def roles(installation: Installation) -> dict[str, ProcessRole]:
    """All roles by name: the plan's roles take precedence over the built-in roles."""
    known: dict[str, ProcessRole] = {}
    if installation.serve is not None or installation.pid is not None:
        known = {GATEWAY: ProcessRole(), "engine": ProcessRole(child_of=GATEWAY, command_contains="engine")}
    return known | installation.processes
