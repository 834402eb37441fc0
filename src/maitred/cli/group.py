"""The command group: our errors become one sentence on stderr and an exit code, never a traceback.

Exit codes: 0 done; 2 the caller must change something (arguments, configuration, request); 1 anything else of ours;
130 stopped with Ctrl-C. A traceback means a bug in maitred.
"""

import typer
from typer.core import TyperGroup

from maitred.core.errors import CallerError, MaitredError

INTERRUPTED = 130


class CommandGroup(TyperGroup):
    """Runs a command and explains its failure."""

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        """See `TyperGroup`."""
        try:
            return super().invoke(ctx)
        except MaitredError as error:
            typer.echo(error.message, err=True)
            ctx.exit(2 if isinstance(error, CallerError) else 1)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
