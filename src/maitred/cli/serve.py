"""`maitred serve`: the gateway and its engines."""

import os
from functools import partial
from typing import Annotated

import typer

from maitred.cli.options import (
    ADDRESS,
    MODEL,
    ConfigOption,
    DeviceOption,
    DtypeOption,
    KvMemoryOption,
    MaxSequencesOption,
    ProfileOption,
    SetOption,
    ThreadsOption,
    TinyOption,
    load_settings,
    require_model,
)

EXAMPLES = """
Examples:

    maitred serve

    maitred serve --tiny

    maitred serve ./models/Qwen2.5-0.5B-Instruct --port 9000

    maitred serve ./SmolLM2-135M-Instruct.Q8_0.gguf

    maitred serve --profile team

    maitred serve --config litellm_config.yaml

    maitred serve --workers 2

    maitred serve ./model --replicas 3

    maitred serve ./model --backend ray --replicas 2

    maitred serve ./model --engine tcp:10.0.0.1:9100 --engine tcp:10.0.0.2:9100

    maitred serve ./model --kv-memory 4GiB --max-sequences 256 --set server.strict=true
"""


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Folder of the model, a .gguf file, or the id of a model on the hub. Default: SmolLM2-135M-Instruct "
            "if it is installed, else the toy in maitred.",
        ),
    ] = None,
    tiny: TinyOption = False,
    served_name: Annotated[
        str | None,
        typer.Option(
            "--served-name", metavar="NAME", help="The name that clients put into `model`.", rich_help_panel=MODEL
        ),
    ] = None,
    replicas: Annotated[
        str | None,
        typer.Option(
            "--replicas",
            metavar="COUNT",
            help="Engines to start; they share this machine. Default: 1.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            metavar="NAME",
            help="What starts the engines: local, agents, kubernetes or ray. Default: local.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            metavar="ADDRESS",
            help="Use an engine that runs already: unix:/path or tcp:host:port. Repeatable. The section engine_link "
            "has the secret and the certificates.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option("--host", metavar="ADDRESS", help="Address to listen on.", rich_help_panel=ADDRESS),
    ] = None,
    port: Annotated[
        str | None,
        typer.Option("--port", metavar="PORT", help="Port; 0 takes a free one.", rich_help_panel=ADDRESS),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            "--workers",
            metavar="COUNT",
            help="Processes that speak HTTP, beside one that decides. Default: 1.",
            rich_help_panel=ADDRESS,
        ),
    ] = None,
    allow_unauthenticated: Annotated[
        bool,
        typer.Option(
            "--allow-unauthenticated",
            help="Serve requests without an API key on any address, not only on a loopback one.",
            rich_help_panel=ADDRESS,
        ),
    ] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    kv_memory: KvMemoryOption = None,
    max_sequences: MaxSequencesOption = None,
    log_level: Annotated[
        str | None, typer.Option("--log-level", metavar="NAME", help="debug, info, warning or error.")
    ] = None,
    profile: ProfileOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Serve a model over HTTP, with the API of OpenAI.

    Starts an engine process for the model and the HTTP server in front of it. Ctrl-C, or SIGTERM, lets running answers
    finish and then stops both.
    """
    read = partial(
        load_settings,
        config,
        settings,
        {
            "profile": ("--profile", profile),
            "model.path": ("MODEL", model),
            "model.served_name": ("--served-name", served_name),
            "model.replicas": ("--replicas", replicas),
            "model.backend": ("--backend", backend),
            "model.engines": ("--engine", f"[{', '.join(engine)}]" if engine else None),
            "server.host": ("--host", host),
            "server.port": ("--port", port),
            "server.workers": ("--workers", workers),
            "server.allow_unauthenticated": ("--allow-unauthenticated", "true" if allow_unauthenticated else None),
            "engine.device": ("--device", device),
            "engine.dtype": ("--dtype", dtype),
            "engine.threads": ("--threads", threads),
            "engine.kv_memory_bytes": ("--kv-memory", kv_memory),
            "engine.max_sequences": ("--max-sequences", max_sequences),
            "log.level": ("--log-level", log_level),
        },
        tiny=tiny,
    )
    loaded = read()
    if loaded.migration is not None:
        typer.echo(
            f"{loaded.migration.summary()}\n  `maitred import litellm` writes the file and says it all.", err=True
        )
    from maitred.config.default_model import notice

    if (about := notice(loaded, os.environ)) is not None:
        typer.echo(about, err=True)
    if loaded.config.has_engine:
        require_model(loaded)
    from maitred.app.start import run

    raise typer.Exit(run(loaded, read=read))
