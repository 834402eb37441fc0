"""HTML report in one file: no script, nothing to fetch, light or dark, and printable."""

from collections.abc import Mapping
from html import escape
from types import MappingProxyType

from maitred.load.measure.result import LoadResult
from maitred.load.report.document import Block, Callout, CodeBlock, Document, KeyFigures, Paragraph, Plot, Table
from maitred.load.report.outline import outline

STYLE = """
:root { color-scheme: light dark; --ink: #1c2026; --soft: #5b6470; --line: #d9dee4; --paper: #fff; --card: #f5f7f9;
  --good: #007a59; --care: #9a6700; --bad: #b8430a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --soft: #9aa4b0; --line: #343b44; --paper: #14171b;
  --card: #1d2127; --good: #3fc79a; --care: #e3b341; --bad: #ff8c57; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.2rem 1.5rem 4rem; max-width: 62rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { margin: 0; font-size: 1.75rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 2.6rem 0 .8rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line); font-size: 1.2rem; }
p { margin: .7rem 0; max-width: 48rem; }
.subtitle, figcaption { color: var(--soft); }
.subtitle { margin: .4rem 0 1.2rem; max-width: none; overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: 1.2rem 0 0; font-size: .9rem; }
nav a { color: var(--soft); text-decoration: none; }
nav a:hover, nav a:focus { color: var(--ink); text-decoration: underline; }
.note { margin: .5rem 0; padding: .55rem .9rem; border-left: 4px solid var(--tone); background: var(--card);
  border-radius: 0 6px 6px 0; max-width: none; overflow-wrap: anywhere; }
.verdict { font-size: 1.08rem; font-weight: 600; padding: .8rem 1rem; }
.good { --tone: var(--good); } .care { --tone: var(--care); } .bad { --tone: var(--bad); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.2rem, 1fr)); gap: .7rem; margin: 1rem 0; }
.figures div { padding: .75rem .9rem; background: var(--card); border-radius: 8px; }
.figures dt, .figures .aside { color: var(--soft); font-size: .82rem; }
.figures dd { margin: 0; }
.figures .value { font-size: 1.45rem; font-weight: 650; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .36rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap;
  vertical-align: top; }
th { color: var(--soft); font-weight: 600; border-bottom-width: 2px; }
td:first-child, th:first-child { padding-left: 0; } td:last-child, th:last-child { padding-right: 0; }
.word { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 7.5rem; }
tr:last-child td { border-bottom: 0; }
pre { padding: .8rem 1rem; background: var(--card); border-radius: 8px; white-space: pre-wrap; overflow-wrap: anywhere;
  font: .88rem/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
figure { margin: 1.6rem 0 2rem; }
figure svg { display: block; width: 100%; height: auto; color: var(--ink) !important; }
.narrow { display: none; }
@media screen and (max-width: 40rem) { body { padding: 1.4rem 1rem 3rem; } .narrow { display: block; }
  .narrow ~ .full { display: none; } }
figcaption { margin-top: .3rem; font-size: .88rem; max-width: 48rem; }
@media print { :root { color-scheme: light; --ink: #000; --soft: #444; --line: #bbb; --paper: #fff; --card: #f4f4f4; }
  body { max-width: none; padding: 0; font-size: 11px; } nav { display: none; }
  figure, tr, .note, .figures { break-inside: avoid; } h2 { break-after: avoid; } }
"""


def render(result: LoadResult, svgs: Mapping[str, str]) -> str:
    """Renders the report of a run with the figures that `outline.draw` drew."""
    return write(outline(result), svgs)


def write(document: Document, svgs: Mapping[str, str], narrow_svgs: Mapping[str, str] = MappingProxyType({})) -> str:
    """Renders any report as HTML.

    Args:
        document: The report.
        svgs: Its figures.
        narrow_svgs: The same, drawn within `canvas.narrow()`: a phone shows them instead.
    """
    sections = [(f"section-{number}", section) for number, section in enumerate(document.sections, 1)]
    links = "\n".join(f'<a href="#{anchor}">{escape(section.title)}</a>' for anchor, section in sections)
    body = [
        f"<header>\n<h1>{escape(document.title)}</h1>",
        f'<p class="subtitle">{escape(document.subtitle)}</p>',
        _note(document.verdict, "note verdict"),
        *(_note(note) for note in document.notes),
        f"<nav>\n{links}\n</nav>\n</header>",
    ]
    for anchor, section in sections:
        blocks = [text for block in section.blocks if (text := _block(block, svgs, narrow_svgs))]
        body += [f'<section id="{anchor}">\n<h2>{escape(section.title)}</h2>', *blocks, "</section>"]
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(document.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
    )
    return head + "\n".join(body) + "\n</body>\n</html>\n"


def _block(block: Block, svgs: Mapping[str, str], narrow_svgs: Mapping[str, str]) -> str:
    match block:
        case Callout():
            return _note(block)
        case Paragraph(text):
            return f"<p>{escape(text)}</p>"
        case CodeBlock(text):
            return f"<pre>{escape(text)}</pre>"
        case KeyFigures(figures):
            cells = "\n".join(
                f'<div><dt>{escape(it.name)}</dt><dd class="value">{escape(it.value)}</dd>'
                f'<dd class="aside">{escape(it.aside)}</dd></div>'
                for it in figures
            )
            return f'<dl class="figures">\n{cells}\n</dl>'
        case Table():
            return _table(block)
        case Plot(name, caption):
            if name not in svgs:
                return ""
            drawn = f'<div class="full">\n{svgs[name]}</div>\n'
            if name in narrow_svgs:
                drawn = f'<div class="narrow">\n{narrow_svgs[name]}</div>\n{drawn}'
            return f"<figure>\n{drawn}<figcaption>{escape(caption)}</figcaption>\n</figure>"


def _table(table: Table) -> str:
    def row(cells: list[str], tag: str) -> str:
        kinds = [' class="word"' if column < table.words else "" for column in range(len(cells))]
        written = (f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(written)}</tr>"

    head = f"<thead>{row(table.head, 'th')}</thead>\n" if any(table.head) else ""
    rows = "\n".join(row(cells, "td") for cells in table.rows)
    # Where it is wider than the screen, the keyboard scrolls it, too.
    name = escape(", ".join(filter(None, table.head)) or "Values")
    box = f'<div class="wide" tabindex="0" role="group" aria-label="{name}">'
    return f"{box}<table>\n{head}<tbody>\n{rows}\n</tbody></table></div>"


def _note(note: Callout, kind: str = "note") -> str:
    return f'<p class="{kind} {note.tone}">{escape(note.text)}</p>'
