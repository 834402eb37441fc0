"""The dashboards that come along are what their description renders, and hang together."""

import json

import pytest

from scripts.dashboards import DASHBOARDS, FOLDER, dashboard, rendered


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_committed_file_is_what_is_rendered(name):
    written = (FOLDER / f"{name}.json").read_text()
    assert written == rendered(name), "deploy/grafana is out of date: run `make docs`."


def test_no_other_file_lies_there():
    assert {path.stem for path in FOLDER.glob("*.json")} == set(DASHBOARDS)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_do_not_lie_on_each_other_and_each_asks_something(name):
    taken = set()
    for panel in dashboard(name)["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert all(x < 24 for x, _ in cells)
        taken |= cells
        assert all(target["expr"] for target in panel["targets"])
    assert json.loads(rendered(name)) == dashboard(name)
