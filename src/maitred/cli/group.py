"""The command group: our errors become one sentence on stderr and an exit code, never a traceback.

Exit codes: 0 done; 2 the caller must change something (arguments, configuration, request); 1 anything else of ours;
130 stopped with Ctrl-C. A traceback means a bug in maitred.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from typer.core import TyperGroup

from maitred.core.errors import CallerError, MaitredError, StoreUnavailable

INTERRUPTED = 130


@contextmanager
def explain_errors() -> Iterator[None]:
    """Says what went wrong inside.

    Raises:
        typer.Exit: With the exit code, once it is said.
    """
    try:
        yield
    except MaitredError as error:
        typer.echo(_explain(error), err=True)
        raise typer.Exit(2 if isinstance(error, CallerError) else 1) from error
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _explain(error: MaitredError) -> str:
    if not isinstance(error, StoreUnavailable) or error.__cause__ is None:
        return error.message
    from maitred.store.outage import explain_outage  # slow to import, and `maitred --help` must be quick

    return explain_outage(error)


class CommandGroup(TyperGroup):
    """Runs a command and explains its failure."""

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        """Runs a command, and turns its errors into sentences."""
        with explain_errors():
            return super().invoke(ctx)
