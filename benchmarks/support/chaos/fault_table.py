"""The fault table in Markdown, from the cells that were measured."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.chaos.fault_cases import CASES, Time

PAGE = Path(__file__).parents[3] / "docs" / "upstream-faults.md"
BEGIN, END = "<!-- cells: begin -->", "<!-- cells: end -->"


def write(cells: Sequence[dict[str, Any]]) -> None:
    """Puts the table into its page."""
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}\n{render(cells)}{END}{tail}")


def render(cells: Sequence[dict[str, Any]]) -> str:
    """The table."""
    found = {(cell["fault"], cell["second"], cell["stream"]): cell for cell in cells}
    lines: list[str] = []
    for time in Time:
        lines += [
            f"**{time.value.capitalize()}**",
            "",
            "| fault | one upstream: whole | streamed | calls | two upstreams: whole | streamed | calls |",
            "|---|---|---|--:|---|---|--:|",
        ]
        for case in (case for case in CASES if case.time is time):
            row = [case.what]
            for second in (False, True):
                pair = [found[case.name, second, stream] for stream in (False, True)]
                row += [*map(_seen, pair), _calls(pair, second=second)]
            lines.append(f"| {' | '.join(row)} |")
        lines.append("")
    return "\n".join(lines)


def _seen(cell: dict[str, Any]) -> str:
    if cell["seen"] == "the whole answer":
        return f"whole, {cell['billed_tokens']} billed"
    return f"{cell['seen']} `{cell['code']}`"


def _calls(pair: Sequence[dict[str, Any]], *, second: bool) -> str:
    """Of both ways of asking; once, where they are the same."""
    shown = [f"{cell['calls'][0]} + {cell['calls'][1]}" if second else str(cell["calls"][0]) for cell in pair]
    return shown[0] if shown[0] == shown[1] else " / ".join(shown)
