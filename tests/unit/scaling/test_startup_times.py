from maitred.scaling.startup_times import StartKind, StartupTimes, remaining_s


def test_quantiles_are_those_of_the_measured_starts():
    times = StartupTimes({})
    for seconds in range(1, 20):
        times.observe(StartKind.COLD, float(seconds))
    assert [times.quantile(StartKind.COLD, q) for q in (0.05, 0.5, 0.9, 1.0)] == [1.0, 10.0, 18.0, 19.0]
    assert times.count(StartKind.COLD) == 19


def test_with_few_measurements_the_longest_counts():
    times = StartupTimes({StartKind.COLD: 1.0})
    times.observe(StartKind.COLD, 7.0)
    times.observe(StartKind.COLD, 9.0)
    assert times.quantile(StartKind.COLD, 0.9) == 9.0


def test_a_kind_without_measurements_takes_as_long_as_the_next_slower_one():
    times = StartupTimes({StartKind.COLD: 300.0, StartKind.ASLEEP: 2.0})
    assert times.quantile(StartKind.WEIGHTS_CACHED, 0.9) == 300.0
    times.observe(StartKind.IMAGE_PRESENT, 40.0)
    assert times.quantile(StartKind.WARM_PROCESS, 0.9) == 40.0
    assert times.quantile(StartKind.ASLEEP, 0.9) == 2.0
    assert times.quantile(StartKind.COLD, 0.9) == 300.0


def test_old_measurements_are_forgotten():
    times = StartupTimes({})
    for seconds in [500.0] * 10 + [5.0] * 40:
        times.observe(StartKind.COLD, seconds)
    assert times.quantile(StartKind.COLD, 1.0) == 5.0
    assert times.count(StartKind.COLD) == 32


def test_nothing_known_is_a_long_time():
    assert StartupTimes({}).quantile(StartKind.ASLEEP, 0.5) == 120.0


def test_what_is_left_of_a_start_is_never_nothing_and_grows_with_its_delay():
    assert remaining_s(30.0, 10.0) == 20.0
    assert remaining_s(30.0, 30.0) == 3.0
    assert remaining_s(30.0, 50.0) == 13.0
