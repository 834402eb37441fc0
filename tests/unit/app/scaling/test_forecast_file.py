"""The forecast outlives the gateway."""

import msgspec
import pytest

from maitred.app.scaling.forecast_file import ForecastFile, KeptForecast
from maitred.scaling.demand import ArrivalWindow
from tests.support.clock import FakeClock

DAY_S = 86_400.0


def observe(forecast, clock, seconds, requests_per_s):
    for _ in range(int(seconds / 5)):
        now_s = clock.monotonic_s()
        forecast.observe(ArrivalWindow(start_s=now_s, length_s=5.0, requests=5.0 * requests_per_s, output_tokens=500.0))
        clock.now_s += 5.0


def learnt(folder, clock):
    file = ForecastFile(folder, "chat@here", clock)
    forecast = file.read()
    observe(forecast, clock, 600, 20.0)
    file.write(forecast.snapshot())
    return forecast


def test_it_goes_on_where_the_run_before_ended(tmp_path):
    clock = FakeClock()
    before = learnt(tmp_path / "new", clock)
    clock.now_s += 1_800.0
    after = ForecastFile(tmp_path / "new", "chat@here", clock).read()
    for in_s in (2.0, 30.0, 600.0):
        assert after.range(in_s) == before.range(in_s)
    assert (after.mix, after.silent_s) == (before.mix, before.silent_s)
    # The half hour in between is no half hour without demand.
    observe(after, clock, 60, 20.0)
    assert after.at(30.0) == pytest.approx(20.0, rel=0.05)


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"pool": "chat@here", "at_s": 1.0})])
def test_what_cannot_be_read_is_forgotten(tmp_path, caplog, content):
    clock = FakeClock()
    learnt(tmp_path, clock)
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    assert ForecastFile(tmp_path, "chat@here", clock).read().level == 0.0
    assert "learnt anew" in caplog.text


@pytest.mark.parametrize(
    "changes", [{"version": 0}, {"levels": [1.0]}, {"totals": []}], ids=["version", "parts", "totals"]
)
def test_a_snapshot_of_another_version_is_forgotten(tmp_path, caplog, changes):
    clock = FakeClock()
    snapshot = msgspec.structs.replace(learnt(tmp_path, clock).snapshot(), **changes)
    ForecastFile(tmp_path, "chat@here", clock).write(snapshot)
    assert ForecastFile(tmp_path, "chat@here", clock).read().level == 0.0
    assert "learnt anew" in caplog.text


def test_an_old_one_is_forgotten(tmp_path, caplog):
    clock = FakeClock()
    learnt(tmp_path, clock)
    clock.now_s += 15 * DAY_S
    assert ForecastFile(tmp_path, "chat@here", clock).read().level == 0.0
    assert "learnt anew" in caplog.text


def test_another_pool_has_its_own(tmp_path, caplog):
    clock = FakeClock()
    learnt(tmp_path, clock)
    assert ForecastFile(tmp_path, "code@here", clock).read().level == 0.0
    (file,) = tmp_path.iterdir()
    kept = msgspec.msgpack.decode(file.read_bytes(), type=KeptForecast)
    file.write_bytes(msgspec.msgpack.encode(msgspec.structs.replace(kept, pool="code@here")))
    assert ForecastFile(tmp_path, "chat@here", clock).read().level == 0.0
    assert "learnt anew" in caplog.text


def test_a_folder_that_cannot_be_written_costs_only_the_memory(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    clock = FakeClock()
    forecast = learnt(tmp_path / "file", clock)
    assert forecast.level == pytest.approx(20.0)
    assert "could not be written" in caplog.text
