"""What a report says, and that its readers can read it."""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from maitred.load.measure.record import UserOutcome
from maitred.load.measure.result import LoadResult
from maitred.load.report import html, markdown
from maitred.load.report.document import CalloutLevel, Table
from maitred.load.report.outline import draw, outline
from maitred.load.spec import ObjectivesSpec
from tests.support.load_results import synthetic_result

VOID = {"meta", "br", "hr", "img", "link"}


class Nesting(HTMLParser):
    """Fails where an element is closed that is not open; keeps what a browser would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.suspect: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name == "href":
                self.links.append(value or "")
            if name in ("src", "xlink:href", "href", "data") and not (value or "").startswith("#"):
                self.suspect.append(f"{tag} {name}={value}")
        if tag in ("script", "link", "iframe", "img", "b", "upstream"):
            self.suspect.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parse(text: str) -> Nesting:
    parser = Nesting()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


@pytest.fixture(scope="module")
def rich() -> LoadResult:
    result = synthetic_result(1, requests=400, failures=True, tenants=("chat", "<b>batch</b> & | *co*"), warmup_s=4.5)
    result.command = "maitred load run --name '</pre><script>alert(1)</script>'"
    return result


def test_the_html_is_whole_and_fetches_nothing(rich: LoadResult) -> None:
    text = html.render(rich, draw(rich))
    page = parse(text)
    assert page.suspect == []
    assert len(page.ids) == len(set(page.ids))
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert "@import" not in text
    assert "url(http" not in text
    assert len(text) < 1_500_000


def test_texts_of_others_are_escaped(rich: LoadResult) -> None:
    text = html.render(rich, {})
    assert "<script" not in text
    assert "<b>" not in text
    assert "HTTP 502: &lt;upstream&gt; &amp; gone" in text
    written = markdown.render(rich)
    assert r"\<b\>batch\</b\> &amp; \| \*co\*" in written
    assert "<upstream>" not in written.replace(r"\<upstream\>", "")


def test_a_fence_is_longer_than_what_it_holds(rich: LoadResult) -> None:
    result = msgspec.structs.replace(rich, command="echo ```` ")
    assert "`````sh\necho ```` \n`````" in markdown.render(result)


def test_every_row_has_its_columns(rich: LoadResult) -> None:
    for section in outline(rich).sections:
        for block in section.blocks:
            if isinstance(block, Table):
                assert {len(row) for row in block.rows} == {len(block.head)}, section.title
    rows = [line for line in markdown.render(rich).splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) >= 3 for row in rows)


def test_plots_are_shown_where_they_lie(rich: LoadResult) -> None:
    text = markdown.render(rich, {"outcomes": Path("run files/outcomes.svg")})
    assert "](<run files/outcomes.svg>)" in text
    assert text.count("![") == 1
    assert "![" not in markdown.render(rich)


def test_markdown_needs_no_matplotlib(rich: LoadResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "## Latency" in markdown.render(rich)


@pytest.mark.parametrize(
    "result",
    [
        synthetic_result(1, requests=0),
        synthetic_result(1, requests=1),
        synthetic_result(1, requests=5, stream=False),
        synthetic_result(1, requests=5, warmup_s=1000),
    ],
    ids=["empty", "one request", "not streamed", "all warm-up"],
)
def test_every_kind_of_run_has_its_report(result: LoadResult) -> None:
    parse(html.render(result, draw(result)))
    text = markdown.render(result)
    assert "nan" not in re.sub(r"[a-z]nan|nan[a-z]", "", text)
    assert "None" not in text.replace("None of", "")


def test_times_that_do_not_exist_are_not_shown() -> None:
    text = markdown.render(synthetic_result(1, requests=50, stream=False))
    assert "End to end p50" in text
    assert "| Time to first token (TTFT)" not in text
    assert "ITL p50" not in text


def test_the_verdict_of_a_clean_run() -> None:
    result = synthetic_result(1, requests=200, objectives=ObjectivesSpec(ttft_s=60))
    document = outline(result)
    assert document.verdict.tone is CalloutLevel.GOOD
    assert "All requests were answered, and 100 % met the objectives (95 % should)." in document.verdict.text
    assert document.notes == []


def test_missed_objectives_come_first() -> None:
    document = outline(synthetic_result(1, requests=200, objectives=ObjectivesSpec(ttft_s=0.001)))
    assert document.verdict.tone is CalloutLevel.CARE
    assert "but 0 % met the objectives" in document.verdict.text


def test_a_tester_at_its_limit_comes_first() -> None:
    result = synthetic_result(1, requests=200, failures=True)
    result.tester = msgspec.structs.replace(result.tester, limit="tester", verdict="The tester was the limit.")
    document = outline(result)
    assert document.verdict.tone is CalloutLevel.BAD
    assert document.verdict.text == "The tester was the limit."


def test_losses_come_first(rich: LoadResult) -> None:
    document = outline(rich)
    assert document.verdict.tone is CalloutLevel.CARE
    lost = rich.summary.outcomes[UserOutcome.CUT]
    assert f"{lost} cut off" in document.verdict.text
    assert any("had not ended when the run did" in note.text for note in document.notes)
    assert any("had to be sent more than once" in note.text for note in document.notes)


@pytest.mark.parametrize(
    ("requests", "outcome", "phrase"),
    [(0, UserOutcome.COMPLETE, "Nothing was measured"), (5, UserOutcome.REFUSED, "None of 5 requests")],
)
def test_nothing_answered(requests: int, outcome: UserOutcome, phrase: str) -> None:
    result = synthetic_result(1, requests=requests)
    result.summary = msgspec.structs.replace(result.summary, outcomes={outcome.value: requests})
    document = outline(result)
    assert document.verdict.tone is CalloutLevel.BAD
    assert phrase in document.verdict.text


def test_a_short_run_says_so() -> None:
    texts = " ".join(note.text for note in outline(synthetic_result(1, requests=20)).notes)
    assert "With 20 requests, p99 is hardly more than the slowest of them." in texts
    assert "Rates are from a window of" in texts


def test_answers_without_usage_or_shorter_than_asked_are_reported() -> None:
    result = synthetic_result(1, requests=200)
    result.requests = msgspec.structs.replace(result.requests, output_tokens=[0] * 200)
    silent = msgspec.convert(msgspec.to_builtins(result), LoadResult)
    assert "did not say how many tokens" in outline(silent).notes[0].text
    result.requests = msgspec.structs.replace(result.requests, output_tokens=[2] * 200, asked_tokens=[4] * 200)
    short = msgspec.convert(msgspec.to_builtins(result), LoadResult)
    assert "100 % of the complete answers are shorter" in outline(short).notes[0].text
    assert "(in all 50.0 % of the tokens)" in outline(short).notes[0].text


def test_bundled_tokens_are_noticed() -> None:
    result = synthetic_result(1, requests=200)
    pieces = result.requests.pieces
    many = [4 * number for number in pieces]
    result.requests = msgspec.structs.replace(result.requests, output_tokens=many, asked_tokens=many)
    assert "4.0 tokens in one piece" in outline(result).notes[0].text


def test_settings_show_what_was_changed(rich: LoadResult) -> None:
    settings = next(section for section in outline(rich).sections if section.title == "Settings")
    rows = {row[0]: row[1] for block in settings.blocks if isinstance(block, Table) for row in block.rows}
    assert rows["arrivals.rate_per_s"] == "8.0"
    assert rows["bounds.warmup_s"] == "4.5"
    assert "clients.retries" not in rows
