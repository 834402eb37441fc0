"""docs/load-format.md names every field of a result file, and its example reads one."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from maitred.load.measure import cost
from maitred.load.measure.columns import RequestColumns
from maitred.load.measure.result import LoadResult, Machine, PromptCalibration, TargetSeen
from maitred.load.measure.series import TimeSeries
from maitred.load.measure.summary import Quantiles, Summary
from tests.support.load_results import synthetic_result

PAGE = (Path(__file__).parents[2] / "docs/load-format.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "part",
    [
        LoadResult,
        Machine,
        TargetSeen,
        PromptCalibration,
        cost.TesterCost,
        Summary,
        Quantiles,
        TimeSeries,
        RequestColumns,
    ],
)
def test_every_field_is_named(part: type[msgspec.Struct]) -> None:
    assert [name for name in part.__struct_fields__ if f"`{name}`" not in PAGE] == []


def test_the_example_finds_the_figures_of_the_summary(tmp_path: Path) -> None:
    example = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert example is not None
    result = synthetic_result(3, requests=60, failures=True, warmup_s=2)
    result.save(tmp_path / "run.json")
    script = [sys.executable, "-c", example[1]]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300)
    pairs = re.findall(r"(\S+) = (\S+)", done.stdout)
    assert len(pairs) == 2
    for found, stated in pairs:
        assert float(found) == pytest.approx(float(stated), abs=2e-7)
