"""Some rows of the fault table; `python -m benchmarks faults` plays all of them."""

import json

from benchmarks.chaos import faults
from benchmarks.support.chaos import fault_table
from benchmarks.support.chaos.fault_cases import CASES, Time
from benchmarks.support.report import RESULTS

CHOSEN = (
    "no-tls",
    "gone",
    "reset",
    "redirect",
    "status-429-with-time",
    "stall-head",
    "cut-last",
    "twice",
    "no-terminator",
)


async def test_callers_see_what_the_table_promises():
    cases = [case for case in CASES if case.name in CHOSEN]
    assert len(cases) == len(CHOSEN)
    for cell in await faults.measure(cases, patience=8.0):  # on a crowded machine a sound server takes seconds
        assert cell.faults == [], f"{cell.fault}, stream {cell.stream}, second {cell.second}"


def test_the_table_has_every_kind_of_fault_by_its_own_name():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 30
    assert {case.time for case in CASES} == set(Time)


def test_the_page_has_the_cells_that_were_measured():
    cells = json.loads((RESULTS / "faults.json").read_text())["figures"]["cells"]
    written = fault_table.PAGE.read_text().partition(fault_table.BEGIN)[2].partition(fault_table.END)[0]
    assert written.strip() == fault_table.render(cells).strip(), "run: python -m benchmarks faults"
