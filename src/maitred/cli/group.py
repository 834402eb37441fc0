"""The command group: our errors become one sentence on stderr and an exit code, never a traceback.

Exit codes: 0 done; 2 the caller must change something (arguments, configuration, request); 1 anything else of ours;
130 stopped with Ctrl-C. A traceback means a bug in maitred.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import typer
from typer.core import TyperGroup

from maitred.core.errors import CallerError, MaitredError, StoreUnavailable

INTERRUPTED = 130

SERVE = "Serve"
TALK = "Talk with a model"
MODELS = "Models and engines"
TENANTS = "Tenants and money"
WATCH = "See what happens"
MEASURE = "Measure"
CONFIGURE = "Configure and move in"
PANELS = (SERVE, TALK, MODELS, TENANTS, WATCH, MEASURE, CONFIGURE)
"""Panels of `maitred --help`, in their order."""

_CONNECTION = ("url", "key")
"""Options about the connection; the server has other things by these names."""

_OTHER_NAMES = {"start": "since", "end": "until", "for_s": "duration"}
"""Parameters of commands by the fields of the server that they set."""


@contextmanager
def explain_errors(parameters: Callable[[], Mapping[str, str]] = dict) -> Iterator[None]:
    """Says what went wrong inside.

    Args:
        parameters: Returns how the parameters of the command are written on the command line. They stand in the message
            for the fields of the server.

    Raises:
        typer.Exit: With the exit code, once it is said.
    """
    try:
        yield
    except MaitredError as error:
        typer.echo(_with_parameters(_explain(error), error.param, parameters()), err=True)
        raise typer.Exit(2 if isinstance(error, CallerError) else 1) from error
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _explain(error: MaitredError) -> str:
    if not isinstance(error, StoreUnavailable) or error.__cause__ is None:
        return error.message
    from maitred.store.outage import explain_outage  # slow to import, and `maitred --help` must be quick

    return explain_outage(error)


def _with_parameters(message: str, field: str | None, parameters: Mapping[str, str]) -> str:
    """Returns a message with the option or argument of the command in place of the field that it begins with."""
    first, space, rest = message.partition(" ")
    if field is None or first != field:
        return message
    name = field.partition("[")[0]  # an option that may be repeated is a list
    names = (name, f"{name}s", name.removesuffix("_at").removesuffix("_s"), _OTHER_NAMES.get(name, ""))
    written = next((parameters[name] for name in names if parameters.get(name)), field)
    return f"{written}{space}{rest}"


class CommandGroup(TyperGroup):
    """Runs a command and explains its failure."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Returns the names of the commands in the order of the help: panel by panel."""
        return sorted(super().list_commands(ctx), key=lambda name: self._panel(self.commands[name]))

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        """Runs a command, and turns its errors into sentences."""
        with explain_errors(lambda: self._parameters(ctx)):
            return super().invoke(ctx)

    @staticmethod
    def _panel(command: object) -> int:
        """Returns the place of a command's panel; commands without one come first."""
        panel = getattr(command, "rich_help_panel", None)
        return PANELS.index(panel) if panel in PANELS else -1

    def _parameters(self, ctx: typer.Context) -> dict[str, str]:
        """Returns how the parameters of the invoked command are written, by their names in Python."""
        invoked = self.commands.get(ctx.invoked_subcommand or "")
        return {
            parameter.name: parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.metavar or ""
            for parameter in ([] if invoked is None else invoked.params)
            if parameter.name is not None and parameter.name not in _CONNECTION
        }
