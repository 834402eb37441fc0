"""`maitred engine`: one engine process on a socket; `maitred agent`: those of a machine, which gateways start."""

from typing import Annotated

import typer

from maitred.cli.options import (
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
from maitred.core.parent_watch import follow_parent

EXAMPLES = """
Examples:

    maitred engine --listen unix:/tmp/engine.sock

    maitred engine ./model --listen tcp:127.0.0.1:9100 --device cuda

    maitred engine ./model --listen tcp:0.0.0.0:9100 --secret-file secret --cert-file engine.pem --key-file engine.key
"""
AGENT_EXAMPLES = """
Examples:

    maitred agent ./model --gateway 127.0.0.1:9300

    maitred agent ./model --gateway gateways.internal:9300 --listen-host gpu-1.internal --zone a --config agent.yaml

    maitred agent ./model --gateway gw-1:9300 --gateway gw-2:9300 --max-replicas 4 --name gpu-1
"""


def engine(
    listen: Annotated[
        str, typer.Option("--listen", metavar="ADDRESS", help="Where gateways connect: unix:/path or tcp:host:port.")
    ],
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Folder of the model, or a .gguf file. Default: as of `maitred serve`."),
    ] = None,
    tiny: TinyOption = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    kv_memory: KvMemoryOption = None,
    max_sequences: MaxSequencesOption = None,
    secret_file: Annotated[
        str | None, typer.Option("--secret-file", metavar="PATH", help="Holds the secret that gateways must know.")
    ] = None,
    cert_file: Annotated[
        str | None, typer.Option("--cert-file", metavar="PATH", help="Certificate (PEM); gateways then speak TLS.")
    ] = None,
    key_file: Annotated[str | None, typer.Option("--key-file", metavar="PATH", help="Its private key (PEM).")] = None,
    ca_file: Annotated[
        str | None, typer.Option("--ca-file", metavar="PATH", help="Take only gateways with a certificate of this one.")
    ] = None,
    profile: ProfileOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Run one engine without HTTP, for a gateway to connect to.

    `maitred serve` starts one by itself; start your own to put the engine on another machine or to restart the gateway
    without reloading the model.
    """
    from maitred.cli.local_engine import run
    from maitred.wire.address import parse_address

    follow_parent()
    loaded = load_settings(
        config,
        settings,
        {
            "profile": ("--profile", profile),
            "model.path": ("MODEL", model or None),
            "engine.device": ("--device", device),
            "engine.dtype": ("--dtype", dtype),
            "engine.threads": ("--threads", threads),
            "engine.kv_memory_bytes": ("--kv-memory", kv_memory),
            "engine.max_sequences": ("--max-sequences", max_sequences),
            "engine_link.secret.file": ("--secret-file", secret_file),
            "engine_link.certificate_file": ("--cert-file", cert_file),
            "engine_link.key_file": ("--key-file", key_file),
            "engine_link.ca_file": ("--ca-file", ca_file),
        },
        # What a token counts is said where requests wait, and has to be the same here.
        sections=("model", "engine", "dispatch", "engine_link", "log", "region"),
        tiny=tiny,
    )
    folder, ours = require_model(loaded), loaded.config
    parse_address(listen)
    run(folder, ours.engine, listen, ours.dispatch.service.weights, ours.engine_link, ours.log, ours.region)


def agent(
    gateway: Annotated[
        list[str],
        typer.Option(
            "--gateway",
            metavar="HOST:PORT",
            help="A gateway's agents.listen; all addresses of a name are dialed. Repeatable.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Folder of the model, or a .gguf file. Default: as of `maitred serve`."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Its name in those of its replicas. Default: the host's."),
    ] = None,
    listen_host: Annotated[
        str,
        typer.Option(
            "--listen-host", metavar="HOST", help="Address of this machine at which gateways reach its engines."
        ),
    ] = "127.0.0.1",
    first_port: Annotated[
        int,
        typer.Option(
            "--first-port",
            metavar="PORT",
            min=1024,
            max=65000,
            help="Port of the first engine; the next one has the next.",
        ),
    ] = 9200,
    max_replicas: Annotated[
        int,
        typer.Option("--max-replicas", metavar="COUNT", min=1, max=64, help="Most engines; they share this machine."),
    ] = 1,
    region: Annotated[
        str | None, typer.Option("--region", metavar="NAME", help="Where this machine is, such as eu.")
    ] = None,
    zone: Annotated[
        str, typer.Option("--zone", metavar="NAME", help="What fails as a whole; replicas are spread over zones.")
    ] = "",
    usd_per_hour: Annotated[
        float, typer.Option("--usd-per-hour", metavar="PRICE", min=0.0, help="Price of one replica.")
    ] = 0.0,
    tiny: TinyOption = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    kv_memory: KvMemoryOption = None,
    max_sequences: MaxSequencesOption = None,
    profile: ProfileOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Run the engines of this machine for gateways elsewhere, which start and stop them.

    It dials the gateways (`maitred serve --backend agents`) and dials again whenever a connection ends; its engines go
    on meanwhile. The section engine_link has the secret and the certificates. Ctrl-C, or SIGTERM, lets running answers
    finish and then stops the engines.
    """
    import socket

    follow_parent()
    loaded = load_settings(
        config,
        settings,
        {
            "profile": ("--profile", profile),
            "model.path": ("MODEL", model or None),
            "region": ("--region", region),
            "engine.device": ("--device", device),
            "engine.dtype": ("--dtype", dtype),
            "engine.threads": ("--threads", threads),
            "engine.kv_memory_bytes": ("--kv-memory", kv_memory),
            "engine.max_sequences": ("--max-sequences", max_sequences),
        },
        sections=("model", "engine", "dispatch", "engine_link", "log", "region"),
        tiny=tiny,
    )
    require_model(loaded)

    import uvloop

    from maitred.app.agent import AgentOptions, run_agent
    from maitred.observe.logs import configure_logging
    from maitred.wire.address import parse_tcp

    options = AgentOptions(
        gateways=[parse_tcp(text) for text in gateway],
        name=name or socket.gethostname(),
        listen_host=listen_host,
        first_port=first_port,
        max_replicas=max_replicas,
        zone=zone,
        usd_per_hour=usd_per_hour,
    )
    configure_logging(loaded.config.log)
    raise typer.Exit(uvloop.run(run_agent(loaded.config, options)))
