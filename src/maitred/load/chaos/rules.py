"""Rules between the settings of a plan; all errors are reported at once, before anything starts."""

from itertools import combinations
from typing import Literal, NamedTuple

import msgspec

from maitred.core.errors import ConfigInvalid
from maitred.load.chaos.plan import GATEWAY, ChaosFault, ChaosLink, ChaosPlan, FaultKind, How, ProcessRole, roles


class _Form(NamedTuple):
    """Form of a kind of fault: its target, and the fields that it must and may have."""

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


def check(plan: ChaosPlan) -> None:
    """Checks everything that must hold between the fields of a plan.

    Raises:
        ConfigInvalid: The plan breaks rules; the message lists all of them.
    """
    wrong = [*_installation_faults(plan), *_load_faults(plan)]
    for number, fault in enumerate(plan.faults):
        wrong += [f"faults[{number}] ({fault.kind}): {sentence}" for sentence in _fault_faults(plan, fault)]
    if not wrong:  # faults with a wrong target or no end cannot be checked for overlap
        wrong = _collisions(plan.faults)
    if wrong:
        raise ConfigInvalid("\n  ".join(["The chaos plan cannot be played:", *wrong]))


def _installation_faults(plan: ChaosPlan) -> list[str]:
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
        wrong.append(f"installation.clients_through: no link {through!r}. {_list_names('Links', installation.links)}")
    return wrong


def _load_faults(plan: ChaosPlan) -> list[str]:
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


def _fault_faults(plan: ChaosPlan, fault: ChaosFault) -> list[str]:
    form = _FORMS[fault.kind]
    given = {name for name in _OPTIONAL if getattr(fault, name) is not None}
    wrong = [f"{name} must be set." for name in sorted(form.must - given)]
    wrong += [f"{name} has no meaning here. Remove it." for name in sorted(given - form.must - form.may)]
    known, links = roles(plan.installation), plan.installation.links
    match form.target:
        case "process" if fault.target not in known:
            wrong.append(f"target: no process {fault.target!r}. {_list_names('Processes', known)}")
        case "link" if fault.target not in links:
            wrong.append(f"target: no link {fault.target!r}. {_list_names('Links', links)}")
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


def _store_faults(role: ProcessRole | None, link: ChaosLink | None, fault: ChaosFault) -> list[str]:
    if not ((role is not None and role.store) or (link is not None and link.store)):
        return [f"target: {fault.target!r} is no store. Mark its process or its link with `store: true`."]
    if fault.how in _ON_LINKS and link is None:
        return [f"how: {fault.how} needs a link, and {fault.target!r} is a process. Use kill or hang."]
    if fault.how in {"kill", "hang"} and (role is None or not role.store):
        return [f"how: {fault.how} needs a process, and {fault.target!r} is a link. Use refuse, reset or blackhole."]
    if fault.how != "kill" and fault.for_s is None:
        return ["for_s must be set."]
    return []


def _collisions(faults: list[ChaosFault]) -> list[str]:
    """Finds overlapping faults on the same resource: the end of one would undo the other."""
    wrong = []
    for (first, fault), (second, other) in combinations(enumerate(faults), 2):
        lever = _lever(fault)
        if lever is not None and lever == _lever(other) and _overlap(fault, other):
            wrong.append(
                f"faults[{first}] and faults[{second}]: both use the {lever[0]} of {lever[1] or 'all'} at once."
            )
    return wrong


def _lever(fault: ChaosFault) -> tuple[str, str] | None:
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


def _overlap(one: ChaosFault, other: ChaosFault) -> bool:
    first, second = sorted((one, other), key=lambda fault: fault.at_s)
    return second.at_s < first.at_s + (first.for_s or 0.0)


def _circular(name: str, known: dict[str, ProcessRole]) -> bool:
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


def _list_names(kind: str, names: dict[str, ProcessRole] | dict[str, ChaosLink]) -> str:
    return f"{kind}: {', '.join(names)}." if names else f"The plan has no {kind.lower()}."
