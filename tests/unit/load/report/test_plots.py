"""Every figure is drawn for every kind of run, and sits well in a page. Warnings are errors here as everywhere."""

import re
import sys
from xml.etree import ElementTree

import numpy as np
import pytest

from maitred.core.errors import Unavailable
from maitred.load.measure.record import RequestRecord, RunData, UserOutcome
from maitred.load.measure.result import LoadResult
from maitred.load.report import canvas
from maitred.load.report.canvas import MOST_DOTS
from maitred.load.report.outline import PLOTS, draw
from maitred.load.spec import LoadSpec, ObjectivesSpec
from tests.support.load_results import synthetic_result

ALWAYS = {"ttft-over-time", "itl-over-time", "distributions", "ttft-by-prompt", "throughput", "arrivals", "tester"}


def all_failed() -> LoadResult:
    records = [
        RequestRecord(
            session=n, turn=0, tenant="a", intended_s=n / 5, asked_tokens=9, ended_s=n / 5, outcome=UserOutcome.FAILED
        )
        for n in range(20)
    ]
    return LoadResult.of(LoadSpec(), RunData(records, [], 4.0, 0.0), command="", workload="")


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    return draw(synthetic_result(1, requests=300, failures=True, tenants=("chat", "<b> & $x$"), warmup_s=5))


def one(result: LoadResult, name: str) -> str:
    with canvas.style():
        return PLOTS[name](result, name)


def test_a_rich_run_has_every_figure(drawn: dict[str, str]) -> None:
    assert drawn.keys() == PLOTS.keys()
    for name, svg in drawn.items():
        assert len(svg) < 150_000, name
        ElementTree.fromstring(svg)


@pytest.mark.parametrize(
    ("result", "names"),
    [
        (synthetic_result(1, requests=0), set()),
        (synthetic_result(1, requests=1), ALWAYS | {"goodput"}),
        (synthetic_result(1, requests=30, objectives=ObjectivesSpec()), ALWAYS),
        (
            synthetic_result(1, requests=30, stream=False),
            {"distributions", "throughput", "arrivals", "goodput", "tester"},
        ),
        (all_failed(), {"arrivals", "outcomes"}),
    ],
    ids=["empty", "one request", "no objectives", "not streamed", "all failed"],
)
def test_a_run_has_the_figures_that_it_has_data_for(result: LoadResult, names: set[str]) -> None:
    assert draw(result).keys() == names


def test_no_figure_refers_to_another(drawn: dict[str, str]) -> None:
    seen: set[str] = set()
    for name, svg in drawn.items():
        ids = re.findall(r'\bid="([^"]+)"', svg)
        assert len(ids) == len(set(ids))
        assert set(re.findall(r'(?:url\(#|href="#)([^")]+)', svg)) == set(ids), name
        assert not seen & set(ids)
        seen |= set(ids)


def test_figures_take_the_colour_of_their_page(drawn: dict[str, str]) -> None:
    for name, svg in drawn.items():
        assert "currentColor" in svg, name
        assert not re.search(f"{canvas.INK}|#000000|fill: #ffffff", svg), name


def test_the_same_run_is_drawn_the_same() -> None:
    result = synthetic_result(4, requests=50)
    assert one(result, "ttft-over-time") == one(result, "ttft-over-time")


def test_a_large_run_stays_small() -> None:
    result = synthetic_result(5, requests=6000, rate_per_s=100, output_tokens=3)
    svg = one(result, "ttft-over-time")
    assert svg.count("h0") == pytest.approx(MOST_DOTS, abs=2)
    assert len(svg) < 150_000


def test_dots_are_where_the_values_are() -> None:
    with canvas.style():
        figure, (axes,) = canvas.figure()
        canvas.dots(axes, np.array([1.0, 3.0]), np.array([5.0, 7.0]), canvas.BLUE, "two")
        low, high = axes.get_xlim()
        assert low < 1 < 3 < high
        assert canvas.svg(figure, "dots", "").count("h0") == 2


def test_without_matplotlib_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Unavailable, match=r"pip install 'maitred\[load\]'"):
        draw(synthetic_result(1, requests=1))
