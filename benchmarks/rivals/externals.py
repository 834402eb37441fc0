"""Conformance of real servers: vLLM, llama.cpp and Transformers behind our adapter, and behind a whole gateway.

    python -m benchmarks externals install [NAME …]    makes an environment for each, below the user's cache
    python -m benchmarks externals [NAME …]            runs those that are installed, or these

Each server runs the bundled model on this machine, and is put to `exercise_text_replica`'s checks through the same code
that a gateway uses. Then a whole `maitred serve` is put before it, and asked with the official SDK.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import openai

from benchmarks.support.figures.external_table import write
from benchmarks.support.report import Report
from benchmarks.support.requirements import RequirementMissing
from benchmarks.support.rivals.external_servers import EXTERNALS, External, Running, started, under_test
from maitred.core.errors import MaitredError
from maitred.testing.replica_conformance import put_to
from maitred.testing.server_process import ServerProcess, serving
from maitred.testing.text_replica_conformance import LIMIT_S, TEXT_CHECKS, TextReplicaUnderTest

QUESTION = [{"role": "user", "content": "Tell me a story about a little dog."}]
KEPT, CANNOT = "kept", "cannot"


async def conformance(external: External) -> dict[str, str]:
    """What became of each check on a server that is started for it."""
    async with started(external) as running, under_test(running, external.abilities) as subject:
        async with asyncio.timeout(600):
            found = {
                check.__name__: await _put(check, needs, subject) for check, needs in list(TEXT_CHECKS.items())[:-1]
            }
            found |= {f"through a gateway: {name}": results for name, results in await _through_a_gateway(running)}
            last, needs = list(TEXT_CHECKS.items())[-1]
            return {**found, last.__name__: await _put(last, needs, subject)}


async def _put(check: Any, needs: Any, subject: TextReplicaUnderTest) -> str:  # noqa: ANN401
    if needs is not None and needs not in subject.abilities:
        return CANNOT
    try:
        await put_to(check, subject, LIMIT_S)
    except (AssertionError, MaitredError, TimeoutError) as failure:
        notes = "; ".join(getattr(failure, "__notes__", []))
        return f"{type(failure).__name__}: {failure} ({notes})"
    return KEPT


async def _through_a_gateway(running: Running) -> list[tuple[str, str]]:
    """The official SDK before a whole gateway before the server."""
    upstream = {**msgspec.to_builtins(running.config), "name": "behind"}
    settings = {name: value for name, value in upstream.items() if value not in (None, {})}
    with TemporaryDirectory(prefix="maitred-external-") as folder:
        config = Path(folder) / "maitred.yaml"
        config.write_text(json.dumps({"models": {"far": {"upstreams": [settings]}}}))
        return await asyncio.to_thread(_ask_sdk, config)


def _ask_sdk(config: Path) -> list[tuple[str, str]]:
    results = []
    with (
        serving("--config", str(config)) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="-", max_retries=0, timeout=60) as sdk,
    ):
        for check in (_whole, _streamed, _continued, _left):
            try:
                check(sdk, gateway)
            except (AssertionError, openai.OpenAIError) as failure:
                results.append((check.__name__.strip("_"), f"{type(failure).__name__}: {failure}"))
            else:
                results.append((check.__name__.strip("_"), KEPT))
    return results


def _whole(sdk: openai.OpenAI, _: ServerProcess) -> None:
    answer = sdk.chat.completions.create(model="far", messages=QUESTION, max_tokens=8, temperature=0)  # type: ignore[arg-type]
    assert answer.choices[0].message.content, "there is a text"
    assert answer.choices[0].finish_reason == "length", answer.choices[0].finish_reason
    assert answer.usage is not None, "there is a usage"
    assert answer.usage.completion_tokens == 8, answer.usage
    assert not getattr(answer.usage, "estimated", False), "the server has counted"


def _streamed(sdk: openai.OpenAI, _: ServerProcess) -> None:
    how: dict[str, Any] = {"model": "far", "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = sdk.chat.completions.create(**how).choices[0].message.content
    chunks = list(sdk.chat.completions.create(**how, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole, f"{text!r} is not {whole!r}"
    finishes = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert finishes == ["length"], finishes
    usage = chunks[-1].usage
    assert usage is not None, "there is a usage"
    assert usage.completion_tokens == 24, usage


def _continued(sdk: openai.OpenAI, _: ServerProcess) -> None:
    answer = sdk.completions.create(model="far", prompt="Once upon a time", max_tokens=8, temperature=0)
    assert answer.choices[0].text, "there is a text"
    assert answer.usage is not None, "there is a usage"
    assert answer.usage.completion_tokens == 8, answer.usage


def _left(sdk: openai.OpenAI, gateway: ServerProcess) -> None:
    """Who leaves frees everything here, and the connection to the server behind."""
    how: dict[str, Any] = {"model": "far", "messages": QUESTION, "max_tokens": 500, "stream": True}
    stream = sdk.chat.completions.create(**how)
    next(iter(stream))
    stream.close()
    until_s = time.monotonic() + 20
    while gateway.metrics()["maitred_in_flight"] or gateway.metrics()["maitred_upstream_open_requests"]:
        assert time.monotonic() < until_s, "something is still held"
        time.sleep(0.1)


def main() -> int:
    """Installs, or runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [external.name for external in EXTERNALS]
    parser.add_argument("words", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; before them, `install`")
    words: list[str] = parser.parse_args().words
    install = words[:1] == ["install"]
    wanted = words[1:] if install else words
    if unknown := set(wanted) - set(names):
        parser.error(f"There is no {', '.join(sorted(unknown))}. There are {', '.join(names)}.")
    chosen = [external for external in EXTERNALS if external.name in (wanted or names)]
    if install:
        for external in chosen:
            print(f"{external.name}: installing into {external.place} …", flush=True)
            external.install()
        return 0
    return run(chosen, quick=bool(wanted))


def run(chosen: Sequence[External], *, quick: bool) -> int:
    """Runs these, as far as they are installed.

    Raises:
        RequirementMissing: None of them is.
    """
    if not any(external.installed for external in chosen):
        raise RequirementMissing("None of its servers is installed: python -m benchmarks externals install")
    report = Report("externals", seed=0, quick=quick)
    found: dict[str, Any] = {}
    for external in chosen:
        if not external.installed:
            print(f"{external.name} is not installed: python -m benchmarks externals install {external.name}")
            continue
        checks = asyncio.run(conformance(external))
        found[external.name] = {"version": f"{external.package} {external.version}", "checks": checks}
        for name, results in checks.items():
            print(f"{external.name:14} {name:45} {results}", flush=True)
    broken = sum(results not in (KEPT, CANNOT) for entry in found.values() for results in entry["checks"].values())
    report.figures["servers"] = found
    report.require("promises broken", broken, at_most=0)
    code = report.finish()
    if not quick and len(found) == len(EXTERNALS):
        write(found)
    return code


if __name__ == "__main__":
    sys.exit(main())
