"""What the administration's commands print."""

import json

import pytest

from maitred.cli.output.tables import amount, print_json, print_table


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1_234_567, "1,234,567"),
        (0.0, "0"),
        (50.0, "50"),
        (1234.5, "1,234.5"),
        (1e-9, "0.000000001"),
        (100.0, "100"),
        (-2.5, "-2.5"),
    ],
)
def test_amounts(value: float, text: str) -> None:
    assert amount(value) == text


def test_cells(capsys: pytest.CaptureFixture[str]) -> None:
    cells = [None, "", True, False, ["a", "b"], [], 1500, "[red]x[/]", "\x1b[2Jcleared\n"]
    print_table([str(number) for number in range(len(cells))], [cells])
    line = capsys.readouterr().out.splitlines()[1]
    assert line.split() == ["-", "-", "yes", "no", "a,", "b", "-", "1,500", "[red]x[/]", "[2Jcleared"]
    assert "\x1b" not in line


def test_no_cell_is_broken_however_narrow_the_terminal_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    print_table(["ID", "NAME"], [["lim-5b1f0c9e7d2a4c6f", "a name of several words"]])
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "ID                    NAME",
        "lim-5b1f0c9e7d2a4c6f  a name of several words",
    ]


def test_json_is_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    print_json([{"a": 1, "b": None}])
    out = capsys.readouterr().out
    assert json.loads(out) == [{"a": 1, "b": None}]
    assert out.count("\n") > 3
