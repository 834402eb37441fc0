"""`maitred config`: what is in force, where it came from, and what is wrong with it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maitred.cli.options import (
    DEFAULT_URL,
    AdminKeyOption,
    ConfigOption,
    JsonOption,
    ProfileOption,
    SetOption,
    UrlOption,
    load_settings,
)
from maitred.cli.output.tables import print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maitred.wire.admin.responses import ChangeBody

CHECK_EXAMPLES = """
Examples:

    maitred config check

    maitred config check /etc/maitred/maitred.yaml
"""
SHOW_EXAMPLES = """
Examples:

    maitred config show --origin

    MAITRED__SERVER__PORT=9000 maitred config show --origin

    maitred config show --profile team --origin

    maitred config show --set engine.max_sequences=64 > maitred.yaml
"""
RUNNING_EXAMPLES = """
Examples:

    maitred config running

    maitred config running --url http://10.0.0.5:8000
"""
RELOAD_EXAMPLES = """
Examples:

    maitred config reload --dry-run

    maitred config reload
"""


def check(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="YAML file. Default: ./maitred.yaml, if it exists.")
    ] = None,
    profile: ProfileOption = None,
    settings: SetOption = None,
) -> None:
    """Read all layers of the configuration and list every fault.

    Prints OK, or the faults with the line, variable or flag each stands in, and exits with 2.
    """
    load_settings(file, settings, {"profile": ("--profile", profile)})
    typer.echo("OK")


def show(
    profile: ProfileOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value came from.")] = False,
) -> None:
    """Print the settings in force as YAML.

    Secrets are printed as the references that they were given by.
    """
    from maitred.config.render import to_yaml

    typer.echo(
        to_yaml(load_settings(config, settings, {"profile": ("--profile", profile)}), with_origins=origin), nl=False
    )


def running(as_json: JsonOption = False, url: UrlOption = DEFAULT_URL, key: AdminKeyOption = None) -> None:
    """Print the settings in force in a running server, and where each value came from.

    Secrets are printed as the references that they were given by.
    """
    from maitred.cli.admin_client import administer
    from maitred.wire.admin.responses import ConfigBody

    body = administer(url, key, lambda client: client.get("config", ConfigBody))
    if as_json:
        print_json(body)
        return
    typer.echo(body.settings, nl=False)
    if body.fault is not None:
        typer.echo(f"\nThe last reload was refused. {body.fault}", err=True)
    if body.needs_restart:
        typer.echo("\nChanged, but needs a restart:", err=True)
        for change in body.needs_restart:
            typer.echo(f"  {change.setting}: {change.restart}", err=True)


def reload(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would change, and change nothing.")] = False,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """Have a running server read its configuration again: file, secrets, and the flags that it was started with.

    Requests that run are not touched. A configuration with faults is refused; the faults are printed, the server goes
    on with the one that it has, and this exits with 2.
    """
    from maitred.cli.admin_client import administer
    from maitred.wire.admin.responses import ReloadBody

    body = {"dry_run": dry_run}
    answer = administer(url, key, lambda client: client.send("POST", "config/reload", ReloadBody, body))
    if as_json:
        print_json(answer)
        return
    if not answer.changed and not answer.needs_restart:
        typer.echo("Nothing has changed.")
    if answer.changed:
        typer.echo("Would change:" if dry_run else "Changed:")
        _print_changes(answer.changed)
    if answer.needs_restart:
        typer.echo("Changed, but needs a restart:")
        _print_changes(answer.needs_restart)


def _print_changes(changes: "Sequence[ChangeBody]") -> None:
    rows = [(f"  {change.setting}", change.before, change.after, change.restart or "") for change in changes]
    print_table(["  Setting", "Before", "After", ""], rows)


def docs() -> None:
    """Print the reference of all settings as Markdown (docs/configuration.md)."""
    from maitred.config.render import configuration_reference

    typer.echo(configuration_reference(), nl=False)
