"""Configurations of LiteLLM, as people write them, become ours: every key has its fate, and the models answer.

Each file of a collection (`--data`) is converted. None may raise, none may have a key without a
fate that the converter knows or says to be unknown, none may show a secret, and each result has to pass the checks of
`maitred config check`. Then one gateway takes each result that has models, by a reload, with the addresses of all
servers replaced by that of a scripted one; paths, dialects, keys and names stay. Every name has to answer.
"""

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import uvloop
import yaml

from benchmarks.support.report import Report
from benchmarks.support.requirements import RequirementMissing
from maitred.config.loader import load
from maitred.core.errors import ConfigInvalid
from maitred.migration.litellm.converter import Migration, read_litellm
from maitred.migration.report import KeyFate
from maitred.migration.source_keys import leaf_paths
from maitred.testing.scripted_anthropic import Reply, ScriptedAnthropic, text
from maitred.testing.scripted_media import ScriptedMedia
from maitred.testing.server_process import ServerProcess, serving

FILE = "migration/litellm_configs.json"
QUICK_STEP = 24
"""A quick run takes one in so many."""
SPOKEN = frozenset(
    {"openai", "azure", "azure_ai", "anthropic", "hosted_vllm", "ollama", "ollama_chat", "text-completion-openai"}
)
"""Prefixes of providers whose own API we speak; so do names without a prefix that begin as theirs do."""
SPOKEN_NAMES = ("gpt-", "claude-", "o1", "o3", "*")
TRIES = 100
PAUSE_S = 0.05
AT_ONCE = 8
ADMIN_KEY = "sk-mtd-admin00000000000-" + "a" * 43
SECRET_NAMES = frozenset(
    {"api_key", "master_key", "aws_secret_access_key", "password", "redis_password", "client_secret"}
)
CHUNK = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "scripted"}
CHAT = (
    {**CHUNK, "choices": [{"index": 0, "delta": {"role": "assistant", "content": "Yes."}, "finish_reason": None}]},
    {**CHUNK, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    {**CHUNK, "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}},
)


QUESTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", {"messages": [{"role": "user", "content": "Is anybody there?"}]}),
    "embedding": ("embeddings", {"input": "Is anybody there?"}),
    "image_generation": ("images/generations", {"prompt": "Nobody."}),
    "audio_speech": ("audio/speech", {"input": "Is anybody there?", "voice": "alloy"}),
    "audio_transcription": ("audio/transcriptions", {}),
    "moderation": ("moderations", {"input": "Is anybody there?"}),
}
"""Mode of a model -> path and fields of a request."""


class Converted(NamedTuple):
    """One configuration of the collection, and what became of it."""

    page: str
    document: dict[str, Any]
    migration: Migration
    fault: str


def main() -> int:
    """Runs the benchmark; the exit code says whether all bars were met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"one configuration in {QUICK_STEP}")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help=f"folder with {FILE}")
    arguments = parser.parse_args()
    if not (arguments.data / FILE).is_file():
        raise RequirementMissing(f"{arguments.data / FILE} is not there. Name its folder with --data.")
    report = Report("migration", seed=0, quick=arguments.quick)
    documents = list(read_collection(arguments.data / FILE))[:: QUICK_STEP if arguments.quick else 1]
    with TemporaryDirectory(prefix="maitred-migration-") as folder:
        file = Path(folder) / "maitred.yaml"
        converted = convert(documents, file, report)
        uvloop.run(answer(converted, file, report))
    print(json.dumps(report.figures, indent=1))
    return report.finish()


def read_collection(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields page and document of each configuration, be it one of a single section."""
    for page, source in json.loads(file.read_text()):
        document = yaml.safe_load(source)
        if isinstance(document, dict):
            yield page, document


def convert(documents: list[tuple[str, dict[str, Any]]], file: Path, report: Report) -> list[Converted]:
    """Converts all, and checks keys, secrets and results."""
    converted: list[Converted] = []
    crashes, lost_keys, shown_secrets = Counter[str](), 0, 0
    fates, unknown = Counter[str](), Counter[str]()
    for page, document in documents:
        try:
            migration = read_litellm(document, {})
        except Exception as error:  # whatever it is, it is what is looked for
            crashes[f"{page}: {error!r}"] += 1
            continue
        entries = migration.report.entries
        found = Counter(key for entry in entries for key in entry.keys)
        lost_keys += len(set(leaf_paths(document)) ^ set(found)) + sum(count - 1 for count in found.values())
        for entry in entries:
            fates[entry.fate] += len(entry.keys)
            if not entry.is_known:
                unknown[entry.path] += 1
        written = migration.yaml() + migration.report.text()
        shown_secrets += sum(secret in written for secret in literal_secrets(document))
        file.write_text(migration.yaml())
        converted.append(Converted(page, document, migration, check(file, migration)))
    faulty = [each for each in converted if each.fault]
    silent = [each for each in faulty if not each.migration.report.missing]
    report.figures = {
        "configurations": len(documents),
        "of these, with a list of models": sum("model_list" in document for _, document in documents),
        "models of these lists": sum(len(list(models_of(document))) for _, document in documents),
        "of these, upstreams of the results": sum(map(count_upstreams, converted)),
        "keys": {str(fate): fates[fate] for fate in KeyFate},
        "keys said to be unknown": dict(unknown),
        "results that pass `config check`": len(converted) - len(faulty),
        "results with something missing that the report says": sum(bool(e.migration.report.missing) for e in converted),
        "faults": [f"{each.page}: {each.fault}" for each in faulty[:5]],
    }
    report.require("crashes", len(crashes), at_most=0)
    report.require("keys without exactly one fate", lost_keys, at_most=0)
    report.require("secrets shown", shown_secrets, at_most=0)
    report.require("results with a fault that the report does not say", len(silent), at_most=0)
    return converted


def check(file: Path, migration: Migration) -> str:
    """Returns what `maitred config check` says where all variables are set; empty: nothing."""
    try:
        load(file, environment_of(migration))
    except ConfigInvalid as fault:
        return str(fault)
    return ""


def environment_of(migration: Migration) -> dict[str, str]:
    """Returns the variables as they are after somebody has set them."""
    urls = {each.name: "redis://127.0.0.1:1" for each in migration.report.variables if each.name.endswith("_URL")}
    return {**{each.name: "sk-scripted" for each in migration.report.variables}, **urls, **migration.environment}


def literal_secrets(value: object, name: str = "") -> Iterator[str]:
    """Yields the secrets that a source has as they are."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from literal_secrets(child, str(key))
    elif isinstance(value, list):
        for child in value:
            yield from literal_secrets(child, name)
    elif isinstance(value, str) and name in SECRET_NAMES and len(value) > 6 and not value.startswith("os.environ/"):
        yield value


async def answer(converted: list[Converted], file: Path, report: Report) -> None:
    """Has one gateway take each result with models, and asks for an answer of every name."""
    answered, partly = Counter[bool](), Counter[bool]()
    reasons: Counter[str] = Counter()
    async with (
        ScriptedMedia() as media,
        ScriptedAnthropic([Reply(text("Yes."))]) as messages,
        ScriptedAnthropic([Reply([*(f"data: {json.dumps(chunk)}\n\n" for chunk in CHAT), "data: [DONE]\n\n"])]) as chat,
    ):
        origins = {"anthropic": _origin(messages.url), "openai": _origin(chat.url), "media": _origin(media.url)}
        served = [each for each in converted if each.migration.config.get("models")]
        await asyncio.to_thread(file.write_text, yaml.safe_dump(scripted(served[0], origins)))
        # Whatever reads a variable gets the same key; the scripted servers take any.
        names = {v.name for each in served for v in each.migration.report.variables}
        environment = {**dict.fromkeys(names, "sk-scripted"), "ADMIN": ADMIN_KEY}
        with ExitStack() as stack:
            # The scripted servers run in this event loop, so nothing may wait in it.
            start = partial(stack.enter_context, serving("--config", str(file), environment=environment))
            server = await asyncio.to_thread(start)
            headers = {"authorization": f"Bearer {ADMIN_KEY}"}
            async with aiohttp.ClientSession(headers=headers) as session:
                for each in served:
                    faults = await ask_all(session, server, each, file, origins)
                    is_spoken = only_spoken(each.document)
                    answered[is_spoken] += not faults
                    partly[is_spoken] += bool(faults)
                    reasons.update(f"{each.page}: {fault}" for fault in faults[:1])
            await asyncio.to_thread(stack.close)
    spoken = sum(only_spoken(each.document) for each in converted)
    in_scope = answered[True] + partly[True]
    report.figures |= {
        "results with a model": len(served),
        "of these, with every name answering": answered[True] + answered[False],
        "sources that name only providers whose own API is spoken": spoken,
        "of these, without a model that is served (realtime, video, batches), which the report says": spoken - in_scope,
        "of these, with every name answering ": answered[True],
        "names that did not answer": dict(reasons),
        "requests answered": len(messages.asked) + len(chat.asked) + len(media.asked),
        "of these, for embeddings, images, sound and moderations": len(media.asked),
    }
    share = answered[True] / in_scope if in_scope else 1.0
    report.require("share of sources with spoken providers whose models answer", share, at_least=0.95)
    everything = answered.total() / len(served) if served else 1.0
    report.require("share of all results with models whose models answer", everything, at_least=0.95)


async def ask_all(
    session: aiohttp.ClientSession, server: ServerProcess, each: Converted, file: Path, origins: dict[str, str]
) -> list[str]:
    """Returns what went wrong with the names of one result; empty: all answered."""
    config = scripted(each, origins)
    await asyncio.to_thread(file.write_text, yaml.safe_dump(config))
    async with session.post(f"{server.url}/admin/v1/config/reload") as response:
        if response.status != 200:
            return [f"reload: {await response.text()}"]
    modes = modes_of(config)
    routing = config.get("routing", {})
    names = {*config["models"], *routing.get("names", {}), *routing.get("aliases", {})}
    turns = asyncio.Semaphore(AT_ONCE)

    async def ask(name: str) -> str:
        async with turns:
            return await ask_one(session, server, name.replace("*", "some-model"), modes.get(name, "chat"))

    return [fault for fault in await asyncio.gather(*map(ask, sorted(names))) if fault]


def modes_of(config: dict[str, Any]) -> dict[str, str]:
    """Returns the mode of every name of a result that is not for chats."""
    modes = {name: model["mode"] for name, model in config["models"].items() if "mode" in model}
    routing = config.get("routing", {})
    for name, targets in routing.get("names", {}).items():
        if mode := modes.get(targets[0]["pool"]):
            modes[name] = mode
    for alias, name in routing.get("aliases", {}).items():
        if mode := modes.get(name):
            modes[alias] = mode
    return modes


async def ask_one(session: aiohttp.ClientSession, server: ServerProcess, name: str, mode: str) -> str:
    """Asks for one answer, again while its servers have not been looked at; returns what went wrong."""
    path, fields = QUESTIONS[mode]
    said = ""
    for _ in range(TRIES):
        body: dict[str, Any] = {}
        if mode == "audio_transcription":
            form = aiohttp.FormData()
            form.add_field("model", name)
            form.add_field("file", b"a sound", filename="question.mp3")
            body["data"] = form
        else:
            body["json"] = {"model": name, **fields}
        async with session.post(f"{server.url}/v1/{path}", **body) as response:
            said = (await response.read()).decode("utf-8", "replace")
            if response.status == 200:
                return "" if mode != "chat" or "Yes." in said else f"{name}: {said[:200]}"
            if response.status != 503:
                break
        await asyncio.sleep(PAUSE_S)
    return f"{name}: {said[:300]}"


def scripted(each: Converted, origins: dict[str, str]) -> dict[str, Any]:
    """Returns a result with the scripted servers in place of all others, and an admin key."""
    config: dict[str, Any] = json.loads(json.dumps(each.migration.config))
    for model in config["models"].values():
        for upstream in model["upstreams"]:
            url = urlsplit(upstream["url"])
            upstream.setdefault("name", url.netloc)
            kind = "media" if model.get("mode", "chat") != "chat" else upstream.get("kind", "openai")
            upstream["url"] = origins[kind] + url.path
    for section in ("counters", "cache"):  # whether there is a Redis is another question
        config.get(section, {}).pop("url", None)
    config.get("identity", {}).pop("limits", None)
    keys = {"admin": {"secret": {"env": "ADMIN"}, "scopes": ["admin", "inference"]}}
    config["tenants"] = {"operators": {"keys": keys}}
    return config


def models_of(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the entries of the list of models."""
    models = document.get("model_list")
    yield from (item for item in (models if isinstance(models, list) else []) if isinstance(item, dict))


def count_upstreams(each: Converted) -> int:
    """Counts the upstreams of a result."""
    return sum(len(model["upstreams"]) for model in each.migration.config.get("models", {}).values())


def only_spoken(document: dict[str, Any]) -> bool:
    """Whether a source names only providers whose own API is spoken, and at least one."""
    params = [item.get("litellm_params") or {} for item in models_of(document)]
    names = [str(each.get("model") or "") for each in params if isinstance(each, dict)]
    return bool(names) and all(
        name.partition("/")[0] in SPOKEN if "/" in name else name.startswith(SPOKEN_NAMES) for name in names
    )


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


if __name__ == "__main__":
    sys.exit(main())
