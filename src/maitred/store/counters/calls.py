"""Calls of the Lua scripts: their names, and claims in the format that the scripts read."""

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import msgspec
from redis.exceptions import NoScriptError

from maitred.core.counters import LimitClaim
from maitred.redis.link import RedisLink

_SCRIPTS = resources.files(__package__) / "scripts"


class LuaScript:
    """Script from the folder `scripts/`, preceded by the text that all scripts share.

    Args:
        name: Its file name without the extension.
    """

    def __init__(self, name: str) -> None:
        self.text = _read_script("common") + _read_script(name)
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    async def run(self, link: RedisLink, prefix: str, arguments: Mapping[str, object]) -> list[Any]:
        """Runs the script and returns its reply.

        Args:
            link: Connection to Redis.
            prefix: First part of every key.
            arguments: What the script gets.

        Raises:
            LinkLost: Redis failed; see `maitred.redis.link`.
        """
        payload = msgspec.msgpack.encode(arguments)
        try:
            replies = await link.send(("EVALSHA", self.sha, 1, prefix, payload))
        except NoScriptError:
            replies = await link.send(("EVAL", self.text, 1, prefix, payload))
        return msgspec.msgpack.decode(replies[0], type=list[Any])


@cache
def _read_script(name: str) -> str:
    return (_SCRIPTS / f"{name}.lua").read_text()


HELLO = LuaScript("hello")
RESERVE = LuaScript("reserve")
SETTLE = LuaScript("settle")
RENEW = LuaScript("renew")
READ = LuaScript("read")
SLICE = LuaScript("slice")
REGISTER = LuaScript("register")
RELEASE = LuaScript("release")


def pack_claim(
    claim: LimitClaim, *, output: int = 0, least_output: int = 0, last_charged: int = -1, spent: int = -1
) -> tuple[object, ...]:
    """Packs a claim in the order in which `scripts/common.lua` reads it.

    Amounts are computed here, in whole numbers of any size.

    Args:
        claim: The claim.
        output: Number of output tokens that the request asks for.
        least_output: Smallest number of output tokens that is useful to the request.
        last_charged: For a budget: the charged total that this gateway saw last; -1 if it never saw one.
        spent: For a budget: the charged total in the database; -1 if the database was not asked.
    """
    return (
        claim.counter,
        claim.kind.value,
        claim.capacity,
        claim.fixed,
        claim.per_output,
        claim.divisor,
        claim.refill_per_s,
        claim.ends_s or 0.0,
        claim.hard,
        claim.clamps,
        claim.amount(output),
        claim.amount(least_output),
        last_charged,
        spent,
    )
