"""Targets of another gateway's file as upstreams, models and names of ours.

Each file is a tree of targets: alternatives that share the load, and those that follow when one fails. It becomes
ranks: the targets of one rank are the upstreams of one model, and a name leads to the models of its ranks, one after
the other.
"""

import re
from collections.abc import Sequence
from typing import Any

from msgspec import Struct, field

from maitred.migration.litellm.address import UpstreamAddress, host_of, is_url, may_carry_key
from maitred.migration.litellm.credentials import CredentialNames
from maitred.migration.litellm.providers import PROVIDERS, SAME_AS, UNSUPPORTED_PROVIDERS, Provider
from maitred.migration.source_keys import SourceKey

ANY = "*"
"""Name of a model that the caller chooses."""


class ImportedTarget(Struct):
    """One target as an upstream.

    Attributes:
        upstream: The entry of `upstreams`.
        model: The provider's name of the model; ``*``: as the caller says.
        mode: What the model is asked for.
        prices: Entry of `admission.prices`.
    """

    upstream: dict[str, Any]
    model: str = ANY
    mode: str = "chat"
    prices: dict[str, float] = field(default_factory=dict)


Ranks = list[list[ImportedTarget]]
"""Targets in the order in which they are asked; those of one rank share the load."""


class ImportedConfig:
    """Configuration that grows with every name that is taken over.

    Attributes:
        config: The configuration.
        missing: What must be completed by hand.
    """

    def __init__(self) -> None:
        self.config: dict[str, Any] = {"models": {}}
        self.missing: list[str] = []

    def add(self, name: str, ranks: Ranks) -> None:
        """Adds a name that leads to ranks of targets; a rank without targets is left out."""
        models: dict[str, Any] = self.config["models"]
        targets: list[dict[str, str]] = []
        for rank, members in enumerate([each for each in ranks if each]):
            pool = "any model" if name == ANY else name
            pool = pool if not rank else f"{pool} ({rank + 1})"
            while pool in models:
                pool = f"{pool} again"
            upstreams = []
            taken: set[str] = set()
            for target in members:
                upstream = dict(target.upstream)
                if target.model not in (ANY, pool):
                    upstream["model"] = target.model
                label = own = host_of(upstream["url"]) if is_url(upstream["url"]) else "server"
                number = 1
                while label in taken:
                    number += 1
                    label = f"{own} ({number})"
                taken.add(label)
                if number > 1:
                    upstream["name"] = label
                upstreams.append(upstream)
            models[pool] = {"upstreams": upstreams}
            if members[0].mode != "chat":
                models[pool]["mode"] = members[0].mode
            prices = {kind: max(each.prices.get(kind, 0.0) for each in members) for kind in ("prompt", "output")}
            if any(prices.values()):
                self.config.setdefault("admission", {}).setdefault("prices", {})[pool] = prices
            is_any = name == ANY and members[0].model == ANY
            targets.append({"pool": pool, "model": ANY} if is_any else {"pool": pool})
        if len(targets) > 1 or (targets and name == ANY):
            self.config.setdefault("routing", {}).setdefault("names", {})[name] = targets

    def set(self, path: str, value: object) -> None:
        """Sets a setting by its dotted name, unless it is set."""
        section = self.config
        *sections, name = path.split(".")
        for each in sections:
            section = section.setdefault(each, {})
        section.setdefault(name, value)

    def finish(self) -> dict[str, Any]:
        """Returns the configuration; without a model it says that one is missing."""
        if not self.config["models"]:
            del self.config["models"]
            self.missing.append(
                "No model could be taken over, so `maitred serve` serves the small one that comes with it."
            )
        return self.config


def find_provider(name: str, same_as: dict[str, str]) -> Provider | str:
    """Returns a provider by the name that another gateway has for it; or what to do, if it is not spoken."""
    own = same_as.get(name, name)
    own = SAME_AS.get(own, own)
    if (provider := PROVIDERS.get(own) or PROVIDERS.get(own.replace("-", "_"))) is not None:
        return provider
    return UNSUPPORTED_PROVIDERS.get(
        own, f"Provider {name!r} is not known here. If it speaks OpenAI's API, name its URL in `upstreams[].url`."
    )


def read_places(keys: dict[str, SourceKey], place: str) -> dict[str, str]:
    """Returns what stands in the address of a provider, such as its region.

    Args:
        keys: Part of the address -> the key of the source that may have it.
        place: The upstream, for the report.
    """
    found: dict[str, str] = {}
    for part, key in keys.items():
        if key.value:
            found[part] = re.sub(r"[^A-Za-z0-9.:_-]", "-", str(key.value))
            key.map_to(f"{place}.url")
    return found


def note_address(address: UpstreamAddress, node: SourceKey, keys: Sequence[SourceKey], place: str, mapped: str) -> bool:
    """Says what became of the keys that name a server; returns whether it can be asked.

    Args:
        address: The address of the upstream.
        node: The target, which is refused if its server cannot be asked.
        keys: The keys.
        place: The upstream, for the report.
        mapped: Setting that they became, if the address is as in the source.
    """
    if address.fault:
        node.refuse(address.fault)
        return False
    notes = " ".join(address.notes)
    for key in keys:
        if notes:
            key.approximate(f"{place}.url", notes)
        else:
            key.map_to(f"{place}.{mapped}")
    return True


def add_key(
    key: SourceKey, value: str, upstream: dict[str, Any], credentials: CredentialNames, name: str, place: str
) -> None:
    """Adds the credential of a target by reference.

    Args:
        key: The key of the source that has it.
        value: The credential, or ``os.environ/NAME``.
        upstream: The upstream that gets it.
        credentials: Names of the secrets.
        name: What the variable of a literal is called after.
        place: The upstream, for the report.
    """
    if not is_url(upstream["url"]) or not may_carry_key(upstream["url"]):
        key.refuse("A key would go over the network in the open. Use https, and set `upstreams[].api_key`.")
        return
    upstream["api_key"] = credentials.reference(value, f"{name}_API_KEY", f"the value of {key.path}")
    key.map_to(f"{place}.api_key")
