"""`maitred import litellm`: a configuration of LiteLLM's proxy becomes ours."""

import os
from pathlib import Path
from typing import Annotated

import typer

from maitred.cli.migration.result import DEFAULT_OUTPUT, DryRunOption, OutputOption, deliver

EXAMPLES = """
Examples:

    maitred import litellm config.yaml --dry-run

    maitred import litellm config.yaml --output maitred.yaml

    maitred import litellm config.yaml --keys-from "$DATABASE_URL"

    maitred import litellm config.yaml --keys-from "$DATABASE_URL" --salt-key-env LITELLM_SALT_KEY
"""


def litellm(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Configuration file of LiteLLM's proxy.")],
    output: OutputOption = DEFAULT_OUTPUT,
    keys_from: Annotated[
        str | None,
        typer.Option(
            "--keys-from",
            metavar="SOURCE",
            help="LiteLLM's database (postgres://…), or a JSON file with its rows: keys, teams and budgets come along.",
        ),
    ] = None,
    salt_key_env: Annotated[
        str | None,
        typer.Option(
            "--salt-key-env",
            metavar="NAME",
            help="Variable with LiteLLM's salt key (LITELLM_SALT_KEY, else its master key): models in its database "
            "are decrypted and come along; their credentials become variables to set.",
        ),
    ] = None,
    dry_run: DryRunOption = False,
) -> None:
    """Convert a configuration of LiteLLM's proxy, and say what became of every key of it.

    Secrets are not written: where the source has one, the configuration refers to an environment variable, and the
    report names it. Variables that the source names in settings that are no secrets are read now, from the environment.
    """
    from maitred.migration.litellm.converter import read_litellm_file, with_accounts
    from maitred.migration.litellm.database import read_accounts
    from maitred.migration.litellm.stored_models import take_stored_models

    salt_key = _salt_key(salt_key_env, keys_from)
    accounts, source = None, ""
    if keys_from is not None:
        accounts, source = read_accounts(keys_from), "database" if "://" in keys_from else Path(keys_from).name
    stored = None if accounts is None else take_stored_models(accounts, source, salt_key)
    migration = read_litellm_file(file, os.environ, stored)
    if accounts is not None:
        migration = with_accounts(migration, accounts, source)
    deliver(migration, output, dry_run=dry_run)


def _salt_key(name: str | None, keys_from: str | None) -> str | None:
    """Returns the salt key from the variable that was named.

    Raises:
        ConfigInvalid: It is not set, or there is no database to read with it.
    """
    from maitred.core.errors import ConfigInvalid

    if name is None:
        return None
    if keys_from is None:
        raise ConfigInvalid("--salt-key-env reads models of LiteLLM's database. Name that with --keys-from.")
    if not os.environ.get(name):
        raise ConfigInvalid(f"The variable {name} is not set. Set it to the salt key that LiteLLM runs with.")
    return os.environ[name]
