"""Addresses of upstreams from what LiteLLM's configuration says of a deployment."""

from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from maitred.core.errors import ConfigInvalid
from maitred.migration.litellm.providers import Provider
from maitred.replica.upstream.url import UpstreamUrl


class UpstreamAddress(Struct, frozen=True):
    """Address and API of an upstream.

    Attributes:
        url: Where its API begins.
        model: What it calls the model.
        kind: API that it speaks, `openai` or `anthropic`.
        notes: What is different from LiteLLM's way to it.
        fault: Why it cannot be used, with what to do; empty: it can.
    """

    url: str
    model: str
    kind: str = "openai"
    notes: tuple[str, ...] = ()
    fault: str = ""


def upstream_address(provider: Provider, base: str, model: str, places: dict[str, str]) -> UpstreamAddress:
    """Makes the address of a deployment.

    Args:
        provider: Its provider.
        base: Its `api_base`; empty: it has none.
        model: The provider's name of the model.
        places: Region, project and location, as far as they are known; see the placeholders of `Provider.url`.
    """
    given, note = _reachable(base)
    url = given or provider.url
    notes = tuple(each for each in (provider.why, note) if each)
    match provider.shape:
        case "openai" | "url":
            return UpstreamAddress(url, model, notes=notes)
        case "ollama":
            return UpstreamAddress(_with_end(url, "/v1"), model, notes=notes)
        case "anthropic":
            return UpstreamAddress(_with_end(url.removesuffix("/messages"), "/v1"), model, "anthropic", notes)
        case "azure":
            return _azure(url, model, notes)
        case "azure_ai":
            return _azure_ai(url, model, notes)
        case "bedrock":
            return _bedrock(given, url, model, places, notes)
        case "vertex":
            return _vertex(given, url, model, places, notes)


def is_url(text: str) -> bool:
    """Whether a text is the URL of an upstream."""
    try:
        UpstreamUrl(text)
    except ConfigInvalid:
        return False
    return True


def may_carry_key(url: str) -> bool:
    """Whether a key may be sent there: by TLS, or on this machine."""
    return UpstreamUrl(url).is_confidential


def host_of(url: str) -> str:
    """Returns host and port of a URL."""
    return UpstreamUrl(url).host_and_port


def _reachable(base: str) -> tuple[str, str]:
    """Returns a base without the path of one call and without a query, and with an address that can be called."""
    url, query, _ = base.strip().partition("?")
    url = url.rstrip("/")
    for path in ("/chat/completions", "/completions", "/embeddings", "/responses"):
        url = url.removesuffix(path)
    if "//0.0.0.0" in url:
        return url.replace("//0.0.0.0", "//127.0.0.1", 1), "0.0.0.0 is an address to listen at; 127.0.0.1 is called."
    return url, "What stands behind the ? of its address is left out: it may be a key." if query else ""


def _with_end(url: str, end: str) -> str:
    return url if not url or url.endswith(end) else f"{url}{end}"


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _azure(url: str, model: str, notes: tuple[str, ...]) -> UpstreamAddress:
    """Azure's API without dated versions: below ``/openai/v1``, with the deployment as `model`."""
    note = "Azure is asked by its v1 API (`/openai/v1`), which has no dated versions; `model` is the deployment."
    return UpstreamAddress(f"{_origin(url)}/openai/v1" if url else "", model, notes=(*notes, note))


def _azure_ai(url: str, model: str, notes: tuple[str, ...]) -> UpstreamAddress:
    if not url:
        return UpstreamAddress("", model, notes=notes)
    if "/anthropic" in url or "claude" in model:
        return UpstreamAddress(f"{_origin(url)}/anthropic/v1", model, "anthropic", notes)
    if url.endswith("/v1"):
        return UpstreamAddress(url, model, notes=notes)
    end = "/v1" if ".inference.ai.azure.com" in url or ".models.ai.azure.com" in url else "/openai/v1"
    return UpstreamAddress(f"{_origin(url)}{end}", model, notes=notes)


def _bedrock(given: str, url: str, model: str, places: dict[str, str], notes: tuple[str, ...]) -> UpstreamAddress:
    if model.startswith(("agent/", "agentcore/")):
        return UpstreamAddress("", model, fault="This is an agent of Bedrock, not a model. Call it directly.")
    if model.startswith("async_invoke/"):
        return UpstreamAddress("", model, fault="Bedrock's asynchronous calls are not spoken. Call it directly.")
    name = model
    for route in ("converse/", "converse_like/", "invoke/", "nova/", "llama/", "deepseek_r1/", "openai/", "qwen3/"):
        name = name.removeprefix(route)
    region = places.get("REGION", "")
    first, slash, rest = name.partition("/")
    if slash and first.count("-") >= 2 and first[-1:].isdigit():  # bedrock/us-west-2/MODEL names its region
        region, name = first, rest
    target = given or url.replace("REGION", region or "us-west-2")
    if not region and not given:
        notes = (*notes, "No region is named; us-west-2 is LiteLLM's default.")
    return UpstreamAddress(target, name, notes=notes)


def _vertex(given: str, url: str, model: str, places: dict[str, str], notes: tuple[str, ...]) -> UpstreamAddress:
    if "claude" in model:
        return UpstreamAddress(
            "",
            model,
            fault="Vertex AI has Anthropic's models only behind `rawPredict`, which is not spoken. Ask Anthropic"
            " itself (`kind: anthropic`), or Bedrock.",
        )
    if "/" not in model and not model.startswith("gemini"):
        return UpstreamAddress(
            "", model, fault="Only Gemini models, and those with a publisher, are behind Vertex AI's OpenAI endpoint."
        )
    if given:
        return UpstreamAddress(given, model, notes=notes)
    location = places.get("LOCATION", "us-central1")
    if location == "global":
        url = url.replace("LOCATION-", "", 1)
    url = url.replace("LOCATION", location).replace("PROJECT", places.get("PROJECT", "PROJECT"))
    return UpstreamAddress(url, f"google/{model}" if model.startswith("gemini") else model, notes=notes)


def upstream_entry(address: UpstreamAddress, provider: Provider) -> dict[str, Any]:
    """Returns the entry of `upstreams` for an address, without its credential."""
    entry: dict[str, Any] = {"url": address.url}
    if address.kind == "anthropic":
        entry["kind"] = "anthropic"
    elif provider.dialect != "generic":
        entry["dialect"] = provider.dialect
    return entry
