"""`maitred chat`: a conversation in the terminal, or from a pipe with one turn per line."""

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from maitred.cli.options import DEFAULT_URL, KeyOption, ModelOption, TemperatureOption, UrlOption
from maitred.core.errors import MaitredError

if TYPE_CHECKING:
    from maitred.cli.client import ChatOptions, ConversationTurn

EXAMPLES = """
Examples:

    maitred chat

    maitred chat --system "Answer in one sentence." --temperature 0.2

    echo "What is a KV cache?" | maitred chat
"""
_PROMPT = "> "


def chat(
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="Instructions for the model.")] = None,
    temperature: TemperatureOption = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", metavar="COUNT", min=1, help="Most tokens per answer.")
    ] = None,
    model: ModelOption = None,
    url: UrlOption = DEFAULT_URL,
    key: KeyOption = None,
) -> None:
    """Talk with a model.

    Ctrl-C stops an answer, Ctrl-D leaves. From a pipe, each line is one turn, and the first failure ends the command.
    """
    import asyncio

    from maitred.cli.client import ChatOptions, ConversationTurn, GatewayClient
    from maitred.cli.output.terminal import given_lines

    async def choose() -> str:
        async with GatewayClient(url, key) as client:
            return await client.first_model()

    name = model or asyncio.run(choose())
    conversation = [ConversationTurn("system", system)] if system else []
    options = ChatOptions(temperature, max_tokens)
    if sys.stdin.isatty():
        _converse(url, key, name, conversation, options)
        return
    for line in given_lines():
        if line.strip():
            _turn(url, key, name, conversation, line.strip(), options)


def _converse(
    url: str, key: str | None, model: str, conversation: "list[ConversationTurn]", options: "ChatOptions"
) -> None:
    """Turns until Ctrl-D; a failed one is explained and can be sent again."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives input() line editing and history
    typer.echo(f"Talking with {model}. Ctrl-C stops an answer, Ctrl-D leaves.", err=True)
    while True:
        try:
            line = input(_PROMPT).strip()
        except EOFError:
            typer.echo(err=True)
            return
        except KeyboardInterrupt:
            typer.echo("\nCtrl-D leaves.", err=True)
            continue
        if line:
            try:
                _turn(url, key, model, conversation, line, options)
            except MaitredError as error:
                typer.echo(error.message, err=True)


def _turn(
    url: str, key: str | None, model: str, conversation: "list[ConversationTurn]", line: str, options: "ChatOptions"
) -> None:
    """One question and its answer; both join the conversation, the answer as far as it came before Ctrl-C.

    Raises:
        MaitredError: There is no answer or only a part; the conversation is as it was before.
    """
    import asyncio

    from maitred.cli.client import ConversationTurn, GatewayClient
    from maitred.cli.output.terminal import write_answer

    question = ConversationTurn("user", line)
    answer: list[str] = []

    async def stream() -> None:
        async with GatewayClient(url, key) as client:
            await write_answer(client.chat(model, [*conversation, question], options), answer)

    try:
        asyncio.run(stream())
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        typer.echo("(stopped)", err=True)
    conversation += [question, ConversationTurn("assistant", "".join(answer))]
