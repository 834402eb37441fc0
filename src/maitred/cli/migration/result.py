"""Result of an import on the command line: the file that is written, and the report."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maitred.core.errors import ConfigInvalid

if TYPE_CHECKING:
    from maitred.migration.litellm.converter import Migration

OutputOption = Annotated[
    Path, typer.Option("--output", metavar="PATH", help="File to write; one that exists is not overwritten.")
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print the configuration and the report, and write nothing.")
]
DEFAULT_OUTPUT = Path("maitred.yaml")


def deliver(migration: "Migration", output: Path, *, dry_run: bool) -> None:
    """Writes the new configuration, or prints it, and prints the report.

    Raises:
        ConfigInvalid: The file exists, or cannot be written.
    """
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
