"""A reload reaches every part: no live setting's old value is left anywhere in a gateway.

Every number that can be reloaded gets a value of its own, and then another one. Then all objects are walked that can be
reached from the gateway. A part that keeps a copy of a setting and does not get the new one is found by that, whoever
has written it.
"""

import asyncio
import gc
import math
import os
import types
from collections import deque

import msgspec
from msgspec import inspect
from msgspec.structs import replace

from maitred.admission.config import PriceConfig
from maitred.app.assembly.services import open_resources
from maitred.app.gateway import open_gateway
from maitred.app.reload import Reloader
from maitred.config.comparison import restart_reason
from maitred.config.loader import LoadedConfig
from maitred.config.tree import Config, TextModelConfig
from maitred.config.walker import unwrap
from maitred.core.clock import SystemClock
from maitred.core.flow import PriorityClass
from maitred.core.secret import Secret
from maitred.identity.declared_config import KeyConfig, OrganisationConfig
from maitred.observe.config import SloConfig
from maitred.replica.upstream.config import UpstreamConfig
from maitred.store.config import StoreConfig
from tests.support.stores import DEADLINE_S

LEAST_CHOICES = 5_000
"""A number that can have fewer values than these may be found anywhere, and is not looked for."""
SMALL = next(number for number in (4_000, 2_050) if not number - 500 <= os.getpid() <= number + 1_000)
"""Where small numbers begin: far from the ids of this process and its threads, which can be reached, too."""
PASSED_BY = (type, types.ModuleType, types.FrameType, types.TracebackType, Config, str, bytes)
"""Who has the whole configuration has no copy of a setting. Frames are those of tasks, or of errors that are kept."""
ELSEWHERE = {
    "server.drain_grace_s": "the shutdown",
    "server.unread_tokens": "engines, of which there are none here",
    **{
        f"model.autoscaling.{name}": "scalers, of which there are none here"
        for name in (
            *("ttft_s", "itl_s", "confidence", "target_utilisation"),
            *("gpus_per_replica", "max_gpus", "usd_per_hour", "max_usd_per_hour"),
        )
    },
}
"""Settings that are kept outside of what is walked, and where."""


class Numbers:
    """Values that occur nowhere else, each within the bounds of its setting.

    Args:
        offset: Different for two configurations that are to have no value in common.
    """

    def __init__(self, offset):
        self.offset = offset
        self.given = {}

    def fill(self, struct, place=""):
        """The same section with other numbers."""
        changes = {}
        for field in inspect.type_info(type(struct)).fields:
            value, name = getattr(struct, field.name), f"{place}.{field.name}" if place else field.name
            pattern = name.replace("models.", "models.*.").replace("slos.", "slos.*.")
            if isinstance(value, msgspec.Struct):
                changes[field.name] = self.fill(value, name)
            elif isinstance(value, dict) and value and isinstance(next(iter(value.values())), msgspec.Struct):
                changes[field.name] = {key: self.fill(entry, name) for key, entry in value.items()}
            elif isinstance(value, list) and value and isinstance(value[0], msgspec.Struct):
                changes[field.name] = [self.fill(entry, name) for entry in value]
            elif restart_reason(pattern) is None:
                kind, _ = unwrap(field.type)
                if isinstance(kind, inspect.UnionType):
                    kind, _ = unwrap(next(k for k in kind.types if not isinstance(k, inspect.NoneType)))
                if isinstance(kind, inspect.DictType) and isinstance(unwrap(kind.value_type)[0], inspect.FloatType):
                    changes[field.name] = {key: self.number(unwrap(kind.value_type)[0], name) for key in value}
                elif isinstance(kind, inspect.FloatType | inspect.IntType):
                    number = self.number(kind, name)
                    changes[field.name] = value if number is None else number
        return replace(struct, **changes)

    def number(self, kind, name):
        least = kind.ge if kind.ge is not None else kind.gt if kind.gt is not None else 0
        most = kind.le if kind.le is not None else kind.lt if kind.lt is not None else math.inf
        count = len(self.given) + 1
        if isinstance(kind, inspect.FloatType):
            part = (0.37 + count * 1e-4 + self.offset * 1e-6) * (1 + 1e-9 * count)
            number = least + part * (min(most, least + 7) - least)
        else:
            if most - least < LEAST_CHOICES:
                return None
            number = (
                least + SMALL + 7 * count + self.offset if most < 10**6 else least + 90_001 + 11 * count + self.offset
            )
        self.given[number] = name
        return number


def config_of(numbers, folder):
    slo = SloConfig(indicator="ttft", objective=0.9, within_s=1.0)
    upstream = UpstreamConfig(url="http://127.0.0.1:9/v1")
    key = KeyConfig(secret=Secret("sk-mtd-admin00000000000-" + "a" * 43, "{env: ADMIN}"), scopes=("admin",))
    config = Config(
        models={"m": TextModelConfig(upstreams=[upstream, replace(upstream, name="second")], context_tokens=9)},
        tenants={"operators": OrganisationConfig(keys={"admin": key})},
        slos={"prompt": slo},
        store=StoreConfig(folder=str(folder), deadline_s=DEADLINE_S),
    )
    config = replace(
        config,
        admission=replace(config.admission, prices={"m": PriceConfig(cached=1.0)}, default_output_tokens=9),
        dispatch=replace(
            config.dispatch,
            ttft_s={PriorityClass.INTERACTIVE: 1.0},
            tenant_ttft_s={"operators": 1.0},
            reserved={"x": 0.1},
        ),
    )
    # The log is the process's, and here that of the tests.
    return replace(numbers.fill(replace(config, tenants={})), tenants=config.tenants, log=config.log)


def reachable_numbers(*roots):
    """Every number that can be reached, and one thing that holds it."""
    here = asyncio.current_task()
    seen = {id(here), id(here.get_coro()), id(asyncio.get_running_loop())}
    found, waiting = {}, deque(roots)
    kept = []  # while it is walked nothing may take the identity of something that is gone
    while waiting:
        owner = waiting.popleft()
        if isinstance(owner, types.FunctionType):
            inside = [owner.__closure__, owner.__defaults__, owner.__kwdefaults__]
        else:
            inside = gc.get_referents(owner)
        for thing in inside:
            if isinstance(thing, int | float):
                found.setdefault(thing, owner)
            elif not isinstance(thing, PASSED_BY) and id(thing) not in seen:
                seen.add(id(thing))
                kept.append(thing)
                waiting.append(thing)
    return found


async def test_no_old_value_of_a_live_setting_is_left_and_every_new_one_is_there(tmp_path):
    before, after = Numbers(1), Numbers(2)
    old, new = config_of(before, tmp_path), config_of(after, tmp_path)
    assert not before.given.keys() & after.given.keys()
    configs = [LoadedConfig(new, {})]
    clock, reloader = SystemClock(), Reloader(LoadedConfig(old, {}), lambda: configs[0], SystemClock())
    async with (
        open_resources(old, None, clock, print) as resources,
        open_gateway(old, resources, reloader, clock) as gateway,
    ):
        there = reachable_numbers(gateway, resources)
        assert {name for number, name in before.given.items() if number not in there} == elsewhere(before)
        answer = await reloader.reload()
        assert not answer.needs_restart
        assert len(answer.changed) >= 80
        gc.collect()
        there = reachable_numbers(gateway, resources)
        assert {name: type(there[number]) for number, name in before.given.items() if number in there} == {}
        assert {name for number, name in after.given.items() if number not in there} == elsewhere(after)


def elsewhere(numbers):
    """What is not found: kept elsewhere, or (money, in limits) in billionths of a dollar."""
    return {
        name
        for name in numbers.given.values()
        if name in ELSEWHERE or name == "log.burst" or (".usd_" in name and not name.startswith("dispatch."))
    }
