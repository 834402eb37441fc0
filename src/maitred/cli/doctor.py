"""`maitred doctor`: what holds a running server up, and which settings of a file will."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maitred.cli.options import ADMIN_KEY_VARIABLE, DEFAULT_URL, KEY_VARIABLE, UrlOption, load_settings
from maitred.cli.output.tables import print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maitred.observe.diagnosis.finding import DiagnosisFinding
    from maitred.observe.diagnosis.snapshot import HealthSnapshot

EXAMPLES = """
Examples:

    maitred doctor

    maitred doctor --url http://10.0.0.5:8000 --for 30

    maitred doctor --config maitred.yaml

    maitred doctor --json
"""
_LOOKS = 10
_FOUND = 1
_INDENT = (0, 0, 0, 3)


def doctor(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="PATH",
            help="Check this YAML file for traps, instead of a running server; and the Ray cluster that it names.",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--for", metavar="SECONDS", min=1.0, max=3600.0, help="How long to look at the server.")
    ] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    url: UrlOption = DEFAULT_URL,
    key: Annotated[
        str | None,
        typer.Option(
            "--key",
            metavar="KEY",
            envvar=[ADMIN_KEY_VARIABLE, KEY_VARIABLE],
            help="A key with the scope metrics, where the server asks for one.",
        ),
    ] = None,
) -> None:
    """Name what holds a server up, with the evidence and the remedy, most important first.

    Exits with 0 if nothing was found, and with 1 otherwise.
    """
    import asyncio

    if config is not None:
        import os

        from maitred.config.suspicious import ray_finding, suspicious_settings
        from maitred.fleet.ray.traps import cluster_traps

        settings = load_settings(config, None, {}).config
        findings = suspicious_settings(settings, cores=os.cpu_count() or 1)
        if settings.model.backend == "ray":
            findings += map(ray_finding, asyncio.run(cluster_traps(settings.ray)))
        healthy = f"No trap in {config}."
    else:
        from maitred.observe.diagnosis.diagnosis import diagnose

        vitals = asyncio.run(_watch(url, key, seconds))
        findings = diagnose(vitals)
        healthy = f"Nothing holds the server up: {vitals.ended:.0f} requests ended in {vitals.seconds:.0f} s."
    if as_json:
        print_json({"healthy": not findings, "findings": findings})
    else:
        _print(findings, healthy)
    if findings:
        raise typer.Exit(_FOUND)


async def _watch(url: str, key: str | None, seconds: float) -> "HealthSnapshot":
    import asyncio
    import time

    import aiohttp

    from maitred.cli.client import CONNECT_TIMEOUT_S, bearer, open_client, refusal, server_root, unknown_server
    from maitred.observe.diagnosis.watch import ScrapeWatcher
    from maitred.observe.samples import MetricSamples, parse_metrics

    address = f"{server_root(url)}/metrics"
    fault = "shows no metrics of maitred"
    looks: list[MetricSamples] = []
    times_s: list[float] = []
    timeout = aiohttp.ClientTimeout(total=60.0, sock_connect=CONNECT_TIMEOUT_S)
    headers = bearer(key, "MAITRED_API_KEY") if key else {}
    with open_client(url, fault):
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            while not times_s or times_s[-1] - times_s[0] < seconds:
                if times_s:
                    await asyncio.sleep(seconds / _LOOKS)
                async with session.get(address) as response:
                    body = await response.read()
                    times_s.append(time.monotonic())
                    if response.status != 200:
                        raise refusal(response.status, body)
                try:
                    looks.append(MetricSamples(parse_metrics(body.decode())))
                except ValueError as error:
                    raise unknown_server(url, fault) from error
    if "maitred_in_flight" not in looks[0]:
        raise unknown_server(url, fault)
    return ScrapeWatcher(looks, times_s[-1] - times_s[0]).snapshot()


def _print(findings: "Sequence[DiagnosisFinding]", healthy: str) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(highlight=False)
    if not findings:
        console.print(Text(healthy, style="green"))
        return
    for number, finding in enumerate(findings, 1):
        where = f" ({finding.where})" if finding.where else ""
        console.print(Text.assemble((f"{number}. {finding.kind.value}", "bold"), f"{where}: {finding.summary}"))
        for line in finding.evidence:
            console.print(Padding(Text(line), _INDENT, expand=False))
        console.print(Padding(Text.assemble(("→ ", "bold"), finding.remedy), _INDENT, expand=False))
