"""The table of conformance in docs/upstreams.md, from what was measured."""

from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[3] / "docs" / "upstreams.md"
BEGIN, END = "<!-- externals: begin -->", "<!-- externals: end -->"


def write(found: dict[str, Any]) -> None:
    """Puts the table into its page."""
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}\n{render(found)}{END}{tail}")


def render(found: dict[str, Any]) -> str:
    """The table: a row for each promise, a column for each server."""
    names = list(found)
    checks = dict.fromkeys(check for entry in found.values() for check in entry["checks"])
    heads = [f"`{name}`<br>({entry['version']})" for name, entry in found.items()]
    lines = [
        f"| promise | {' | '.join(heads)} |",
        "|---|" + "---|" * len(names),
    ]
    for check in checks:
        result = [_mark(found[name]["checks"].get(check, "")) for name in names]
        lines.append(f"| {check.replace('_', ' ')} | {' | '.join(result)} |")
    return "\n".join(lines) + "\n"


def _mark(result: str) -> str:
    return {"kept": "yes", "cannot": "–"}.get(result, f"**no**: {result}")
