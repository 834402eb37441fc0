"""Reports in a real browser, on a phone and on a wide screen, with much and with little to show."""

import re
from functools import cache

import numpy as np
import pytest

from maitred.load.analysis.compare import compare
from maitred.load.measure.result import LoadResult
from maitred.load.report import canvas, comparison, html
from maitred.load.report.outline import draw, outline
from tests.support.console_server import accessibility_violations
from tests.support.load_results import synthetic_result

SIZES = [(360, "light"), (390, "dark"), (1280, "dark")]
SMALLEST_TEXT_PX = 8.0
"""Height of the font of a figure. What people call readable begins there."""


def report_of(result: LoadResult) -> str:
    return html.write(outline(result), draw(result), canvas.draw_narrow(lambda: draw(result)))


def comparison_of(before: LoadResult, after: LoadResult) -> str:
    compared = compare([before], [after])
    return html.write(
        comparison.outline(compared),
        comparison.draw(compared),
        canvas.draw_narrow(lambda: comparison.draw(compared)),
    )


LONG_NAME = "the-team-with-the-very-long-name-" * 3
REPORTS = {
    "rich": lambda: report_of(
        synthetic_result(1, requests=150, failures=True, tenants=("chat", LONG_NAME), warmup_s=5)
    ),
    "empty": lambda: report_of(synthetic_result(1, requests=0)),
    "one request": lambda: report_of(synthetic_result(1, requests=1)),
    "two requests": lambda: report_of(synthetic_result(1, requests=2)),
    "compared": lambda: comparison_of(synthetic_result(1, requests=130), synthetic_result(2, requests=130)),
}


@cache
def report(name: str) -> str:
    """A report as HTML, drawn once."""
    return REPORTS[name]()


MEASURE = """() => {
  const seen = (node) => node.getClientRects().length > 0;
  const texts = [...document.querySelectorAll("svg text")].filter(seen);
  const scale = (text) => text.getScreenCTM().a;
  const svgs = [...document.querySelectorAll("figure svg")].filter(seen);
  return {
    width: document.documentElement.scrollWidth,
    svgs: svgs.map((svg) => svg.getBoundingClientRect().width),
    fonts: texts.map((text) => parseFloat(getComputedStyle(text).fontSize) * Math.abs(scale(text)) || 0),
    beyond: texts.filter((text) => {
      const own = text.getBoundingClientRect(), frame = text.ownerSVGElement.getBoundingClientRect();
      return own.left < frame.left - 2 || own.right > frame.right + 2;
    }).map((text) => text.textContent),
    tables: [...document.querySelectorAll(".wide")].every((box) => box.getBoundingClientRect().right <= innerWidth),
    narrowest: Math.min(1000, ...[...document.querySelectorAll("td.word")].filter((cell) => cell.textContent)
      .map((cell) => cell.getBoundingClientRect().width)),
    prose: Math.min(...[...document.querySelectorAll("p, td, figcaption, dt, dd")].map(
      (node) => parseFloat(getComputedStyle(node).fontSize))),
  };
}"""


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_fits_its_screen(browser, name: str) -> None:
    text = report(name)
    for width, scheme in SIZES:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page = context.new_page()
        page.set_content(text)
        found = page.evaluate(MEASURE)
        assert found["width"] <= width, "the page scrolls sideways"
        assert found["tables"], "a table is wider than its box"
        assert found["narrowest"] >= 100, "a column of words is a column of letters"
        assert found["prose"] >= 12
        assert len(found["svgs"]) == text.count("<figure>"), "each figure is seen once"
        assert all(svg <= width for svg in found["svgs"])
        assert all(font >= SMALLEST_TEXT_PX for font in found["fonts"]), min(found["fonts"])
        assert found["beyond"] == []
        faults = accessibility_violations(page)
        assert [fault["id"] for fault in faults if fault["impact"] in ("serious", "critical")] == []
        context.close()


def test_a_printed_report_has_each_figure_once(browser) -> None:
    text = report("one request")
    page = browser.new_page(viewport={"width": 360, "height": 800})
    page.set_content(text)
    page.emulate_media(media="print")
    shown = page.evaluate(
        "[...document.querySelectorAll('figure svg')].filter((it) => it.getClientRects().length).length"
    )
    assert shown == text.count("<figure>")
    page.close()


@pytest.mark.parametrize("values", [[2.0], [np.nan, 2.0, np.nan], [1.0, np.nan, 3.0, 3.0]], ids=str)
def test_a_value_without_neighbours_is_a_dot(values: list[float]) -> None:
    with canvas.style():
        figure, (axes,) = canvas.figure()
        y = np.array(values)
        canvas.line(axes, np.arange(len(y), dtype=np.float64), y, colour=canvas.BLUE)
        written = canvas.svg(figure, "line", "values")
    dots = re.findall(rf'<use [^>]*style="fill: {canvas.BLUE}', written)
    known = ~np.isnan(y)
    alone = sum(
        known[at] and not known[max(at - 1, 0) : at].any() and not known[at + 1 : at + 2].any() for at in range(len(y))
    )
    assert len(dots) == alone
