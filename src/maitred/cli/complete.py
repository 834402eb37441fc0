"""`maitred complete`: how a text goes on."""

from typing import Annotated

import typer

from maitred.cli.options import DEFAULT_URL, KeyOption, ModelOption, TemperatureOption, UrlOption

EXAMPLES = """
Examples:

    maitred complete "Once upon a time"

    cat draft.txt | maitred complete - --max-tokens 200
"""


def complete(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to go on from; - reads standard input.")],
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="COUNT", min=1, help="Most tokens to write.")
    ] = 128,
    temperature: TemperatureOption = None,
    model: ModelOption = None,
    url: UrlOption = DEFAULT_URL,
    key: KeyOption = None,
) -> None:
    """Continue a text and stream it to standard output.

    Exits with 1 if the answer was cut, so a script never takes half for the whole.
    """
    import asyncio

    from maitred.cli.client import ChatOptions, GatewayClient
    from maitred.cli.output.terminal import given_lines, write_answer

    text = "".join(given_lines()) if prompt == "-" else prompt

    async def stream() -> None:
        async with GatewayClient(url, key) as client:
            name = model or await client.first_model()
            await write_answer(client.complete(name, text, ChatOptions(temperature, max_tokens)), [])

    asyncio.run(stream())
