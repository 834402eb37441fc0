"""`maitred import litellm`: a configuration of LiteLLM's proxy becomes ours."""

import os
from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """
Examples:

    maitred import litellm config.yaml --dry-run

    maitred import litellm config.yaml --output maitred.yaml

    maitred import litellm config.yaml --keys-from "$DATABASE_URL"
"""


def litellm(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Configuration file of LiteLLM's proxy.")],
    output: Annotated[
        Path, typer.Option("--output", metavar="PATH", help="File to write; one that exists is not overwritten.")
    ] = Path("maitred.yaml"),
    keys_from: Annotated[
        str | None,
        typer.Option(
            "--keys-from",
            metavar="SOURCE",
            help="LiteLLM's database (postgres://…), or a JSON file with its rows: keys, teams and budgets come along.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the configuration and the report, and write nothing.")
    ] = False,
) -> None:
    """Convert a configuration of LiteLLM's proxy, and say what became of every key of it.

    Secrets are not written: where the source has one, the configuration refers to an environment variable, and the
    report names it. Variables that the source names in settings that are no secrets are read now, from the environment.
    """
    from maitred.core.errors import ConfigInvalid
    from maitred.migration.litellm.converter import read_litellm_file, with_accounts
    from maitred.migration.litellm.database import read_accounts

    migration = read_litellm_file(file, os.environ)
    if keys_from is not None:
        is_url = "://" in keys_from
        migration = with_accounts(migration, read_accounts(keys_from), "database" if is_url else Path(keys_from).name)
    if dry_run:
        typer.echo(migration.yaml())
    else:
        try:
            with output.open("x", encoding="utf-8") as target:
                target.write(migration.yaml())
        except FileExistsError:
            raise ConfigInvalid(f"{output} exists already. Remove it, or name another file with --output.") from None
        except OSError as error:
            raise ConfigInvalid(f"{output} cannot be written: {error.strerror}.") from None
    typer.echo(migration.report.text(), nl=False)
    if not dry_run:
        typer.echo(f"\nWritten to {output}. Next: maitred config check {output}; maitred serve --config {output}")
