"""LiteLLM's `model_list` as models, names and prices of ours.

All deployments of one name are the upstreams of one model, and requests go to any of them. Deployments of a later
`order` are a model of their own, which the name leads to second.
"""

from typing import Any

from msgspec import Struct, field

from maitred.migration.litellm.address import host_of, is_url
from maitred.migration.litellm.deployment import Deployment, DeploymentReader
from maitred.migration.source_keys import SourceKey

_LONGEST_NAME = 256


class ImportedModels(Struct):
    """Models, names, prices and limits that a `model_list` became.

    Attributes:
        models: The section `models`.
        names: The section `routing.names`.
        prices: The section `admission.prices`.
        limits: Name -> requests and tokens a minute of all its deployments.
    """

    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    names: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    prices: dict[str, dict[str, Any]] = field(default_factory=dict)
    limits: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def all_names(self) -> set[str]:
        """All names that requests can use."""
        return {*self.models, *self.names}


def read_models(model_lists: list[SourceKey], reader: DeploymentReader) -> ImportedModels:
    """Reads the lists of a file and of those that it includes, and says of all their keys what became of them."""
    imported = ImportedModels()
    items = [item for model_list in model_lists for item in model_list.items()]
    for model_list in model_lists:
        if model_list.value is not None and not isinstance(model_list.value, list):
            model_list.refuse("It is no list of models. Write each as an item, beginning with `- model_name`.")
    found: dict[str, dict[int, list[Deployment]]] = {}
    orders = _orders(items)
    for item in items:
        name = _name(item)
        if not name:
            item.refuse("It has no `model_name`. Give it one, or remove it.")
        elif name.count("*") > 1 or len(name) > _LONGEST_NAME or not name.isprintable():
            item.refuse("A name has one `*` and 256 printable characters at most. Write the names out.")
        else:
            rank = orders[name].index(_order(item))
            deployments = found.setdefault(name, {}).setdefault(rank, [])
            deployment = reader.read(item, name, _pool(name, rank), len(deployments))
            if deployment is not None:
                deployments.append(deployment)
    for name, ranks in found.items():
        _add(imported, name, {rank: ranks[rank] for rank in sorted(ranks) if ranks[rank]})
    return imported


def _name(item: SourceKey) -> str:
    value = item.child("model_name").value
    return str(value).strip() if isinstance(value, str | int | float) and not isinstance(value, bool) else ""


def _order(item: SourceKey) -> int:
    """Returns the order of a deployment; the least is asked first."""
    value = item.child("litellm_params").child("order").value
    return value if isinstance(value, int) else 1 << 30


def _orders(items: list[SourceKey]) -> dict[str, list[int]]:
    found: dict[str, set[int]] = {}
    for item in items:
        found.setdefault(_name(item), set()).add(_order(item))
    return {name: sorted(orders) for name, orders in found.items()}


def _pool(name: str, rank: int) -> str:
    return name if rank == 0 else f"{name} ({rank + 1})"


def _add(imported: ImportedModels, name: str, ranks: dict[int, list[Deployment]]) -> None:
    """Adds one name with its deployments."""
    if not ranks:
        return
    targets: list[dict[str, str]] = []
    for rank, deployments in ranks.items():
        pool = _pool(name, rank)
        model: dict[str, Any] = {"upstreams": [dict(each.upstream) for each in deployments]}
        _name_upstreams(model["upstreams"])
        if (mode := deployments[0].mode) != "chat":
            model["mode"] = mode
        contexts = [each.context_tokens for each in deployments if each.context_tokens is not None]
        if contexts:
            model["context_tokens"] = min(contexts)
        capabilities = [each.capabilities for each in deployments if each.capabilities is not None]
        if capabilities:
            model["capabilities"] = [each for each in capabilities[0] if all(each in other for other in capabilities)]
        regions = {each.region for each in deployments}
        if len(regions) == 1 and (region := regions.pop()):
            model["region"] = region
        imported.models[pool] = model
        wildcard = next((each.wildcard for each in deployments if each.wildcard), "")
        targets.append({"pool": pool, "model": wildcard} if wildcard and "*" in name else {"pool": pool})
    if len(targets) > 1 or "*" in name or 0 not in ranks:
        imported.names[name] = targets
    everyone = [each for deployments in ranks.values() for each in deployments]
    prices: dict[str, Any] = {}
    for each in everyone:
        for kind, price in each.prices.items():
            known = prices.get(kind, price)
            prices[kind] = (
                max(price, known) if isinstance(price, float) else max(price, known, key=lambda one: one["*"])
            )
    if prices:
        imported.prices[name] = prices
    for kind in ("requests_per_minute", "tokens_per_minute"):
        values = [each.limits[kind] for each in everyone if kind in each.limits]
        if values and len(values) == len(everyone):  # one without a limit leaves the name without one
            imported.limits.setdefault(name, {})[kind] = sum(values)


def _name_upstreams(upstreams: list[dict[str, Any]]) -> None:
    """Gives those upstreams a name that would else be called alike: by host and port."""
    taken: set[str] = set()
    for upstream in upstreams:
        own = str(upstream.get("name") or (host_of(upstream["url"]) if is_url(upstream["url"]) else ""))
        name, number = own, 1
        while name in taken:
            number += 1
            name = f"{own} ({number})"
        taken.add(name)
        if number > 1:
            upstream["name"] = name
