"""Distributions: what each form draws, and the sentence for what is no form."""

import gzip
import random
import statistics
from pathlib import Path

import pytest

from maitred.core.errors import InvalidRequest
from maitred.load.workload.lengths import FORMS, LengthPairs, parse_distribution

DATA = Path(__file__).parents[3] / "data" / "traces"


def draws(text, count=20_000):
    rng = random.Random(1)
    distribution = parse_distribution(text, what="x")
    return distribution, [distribution.draw(rng) for _ in range(count)]


@pytest.mark.parametrize(
    ("text", "mean", "deviation"),
    [
        ("200", 200, 0),
        ("0", 0, 0),
        ("uniform:50..400", 225, 350 / 12**0.5),
        ("lognormal:mean=200,cv=0.5", 200, 100),
        ("lognormal:mean=200,cv=0", 200, 0),
        ("exponential:mean=200", 200, 200),
        ("histogram:100=0.5,400=1.5", 325, 300 * (0.25 * 0.75) ** 0.5),
    ],
)
def test_the_draws_have_the_mean_and_the_spread(text, mean, deviation):
    distribution, numbers = draws(text)
    assert distribution.mean == pytest.approx(mean)
    assert statistics.fmean(numbers) == pytest.approx(mean, abs=4 * deviation / len(numbers) ** 0.5 + 1e-9)
    assert statistics.pstdev(numbers) == pytest.approx(deviation, rel=0.05, abs=1e-9)
    assert min(numbers) >= 0


def test_a_histogram_draws_its_bars_and_no_others():
    _, numbers = draws("histogram:7=1,8=0,9=3")
    assert set(numbers) == {7, 9}
    assert numbers.count(9) / len(numbers) == pytest.approx(0.75, abs=0.015)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not a number"),
        ("many", "'many' is not a number"),
        ("-3", "at least 0"),
        ("nan", "finite"),
        ("inf", "finite"),
        ("normal:mean=3", "there is no kind 'normal'"),
        ("uniform:5", "`..`"),
        ("uniform:9..5", "5 is below 9"),
        ("lognormal:mean=200", "'cv' is missing"),
        ("lognormal:mean=200,cv=1,cv=2", "'cv' is given twice"),
        ("lognormal:mean=0,cv=1", "above 0"),
        ("exponential:rate=3", "'rate' is not one of mean"),
        ("exponential:", "a value is missing"),
        ("histogram:5=0", "above 0"),
        ("histogram:5", "should be `name=number`"),
    ],
)
def test_what_is_no_form_is_refused_with_the_reason_and_the_forms(text, reason):
    with pytest.raises(InvalidRequest) as raised:
        parse_distribution(text, what="shape.turns")
    assert raised.value.message.startswith("shape.turns: ")
    assert reason in raised.value.message
    assert FORMS in raised.value.message


def test_pairs_keep_prompt_and_answer_together():
    pairs = LengthPairs.load(DATA / "sharegpt_lengths.csv.gz")
    assert len(pairs.prompt_tokens) == 100
    with gzip.open(DATA / "sharegpt_lengths.csv.gz", "rt") as file:
        rows = {tuple(map(int, line.split(",")[:2])) for line in file.readlines()[1:]}
    rng = random.Random(0)
    drawn = {pairs.draw(rng) for _ in range(2000)}
    assert drawn <= rows
    assert len(drawn) > 0.95 * len(rows)


@pytest.mark.parametrize("header", ["prompt_tokens,output_tokens", "input_length,x,output_length"])
def test_pairs_are_found_by_the_usual_names(tmp_path, header):
    path = tmp_path / "pairs.csv"
    path.write_text(f"{header}\n1,2,3\n")
    first, second = LengthPairs.load(path).draw(random.Random(0))
    assert (first, second) == (1, 3 if "x" in header else 2)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a,b\n1,2\n", "`prompt_tokens`, `output_tokens`"),
        ("prompt_tokens,output_tokens\n", "no rows"),
        ("prompt_tokens,output_tokens\n1,2\n1\n", "line 3: there are fewer columns"),
        ("prompt_tokens,output_tokens\n1,x\n", "line 2: 'x' should be a number"),
        ("prompt_tokens,output_tokens\n1,2.5\n", "line 2: '2.5' should be a whole number"),
    ],
)
def test_a_bad_file_of_pairs_is_reported_by_its_line(tmp_path, text, reason):
    path = tmp_path / "pairs.csv"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=r"pairs\.csv") as raised:
        LengthPairs.load(path)
    assert reason in raised.value.message


def test_a_file_that_is_missing_or_not_what_its_name_says(tmp_path):
    with pytest.raises(InvalidRequest, match="cannot be read: No such file"):
        LengthPairs.load(tmp_path / "none.csv")
    (tmp_path / "plain.csv.gz").write_text("prompt_tokens,output_tokens\n1,2\n")
    with pytest.raises(InvalidRequest, match="not compressed as its name says"):
        LengthPairs.load(tmp_path / "plain.csv.gz")
