"""A bill that is divided: the shares and the rest are the whole, to the token."""

from hypothesis import given
from hypothesis import strategies as st

from maitred.admission.bill_book import BillBook
from maitred.core.request import Usage
from maitred.core.usage import Price

COUNTS = st.integers(0, 1 << 40)
FIELDS = ("prompt_tokens", "completion_tokens", "cached_tokens", "cache_write_tokens", "cache_write_1h_tokens")


class Sharer:
    def __init__(self):
        self.shares = []

    def take_share(self, share, whole):
        self.shares.append(share)


def usages():
    def make(fresh, completion, cached, written, written_1h):
        return Usage(
            fresh + cached + written + written_1h,
            completion,
            cached,
            cache_write_tokens=written + written_1h,
            cache_write_1h_tokens=written_1h,
        )

    return st.builds(make, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS)


@given(usages(), st.integers(1, 200))
def test_no_token_is_lost_and_each_share_is_a_usage(usage, parts):
    share, rest = usage.split(parts)
    for field in FIELDS:
        assert getattr(share, field) * (parts - 1) + getattr(rest, field) == getattr(usage, field)
    for part in (share, rest):
        assert 0 <= part.cached_tokens + part.cache_write_tokens <= part.prompt_tokens
        assert 0 <= part.cache_write_1h_tokens <= part.cache_write_tokens
    assert share.completion_tokens <= rest.completion_tokens < share.completion_tokens + parts
    price = Price.per_million_usd(1.0, 0.1, 2.0, 1.25, 2.0)
    cost_nusd = price.cost_nusd(usage)
    assert cost_nusd <= price.cost_nusd(share) * (parts - 1) + price.cost_nusd(rest) <= cost_nusd + parts


@given(st.builds(Usage, COUNTS, COUNTS, COUNTS, cache_write_tokens=COUNTS), st.integers(1, 200))
def test_what_a_server_has_counted_twice_is_not_made_less_than_nothing(usage, parts):
    share, rest = usage.split(parts)
    assert share.prompt_tokens * (parts - 1) + rest.prompt_tokens == usage.prompt_tokens
    assert min(share.prompt_tokens - share.cached_tokens, *(getattr(share, field) for field in FIELDS)) >= 0
    assert min(getattr(rest, field) for field in FIELDS) >= 0


@given(st.lists(st.tuples(st.sampled_from(["join", "leave", "divide"]), st.integers(0, 5)), max_size=40))
def test_each_has_one_share_at_most_and_all_of_them_are_the_whole(steps):
    bills, usage = BillBook(), Usage(1000, 101, 10)
    sharers, joined = [Sharer() for _ in range(6)], set()
    for what, number in steps:
        sharer = sharers[number]
        if what == "join" and not sharer.shares:
            bills.add(b"answer", sharer.take_share)
            joined.add(number)
        elif what == "leave":
            bills.remove(b"answer", sharer.take_share)
            joined.discard(number)
        elif what == "divide":
            before = sum(len(other.shares) for other in sharers)
            rest = bills.rest_of(b"answer", usage)
            bills.divide(b"answer", usage)
            shares = [sharers[other].shares[0] for other in joined]
            assert sum(len(other.shares) for other in sharers) - before == len(joined)
            assert sum(share.total_tokens for share in shares) + rest.total_tokens == usage.total_tokens
            joined.clear()
    for sharer in sharers:
        assert len(sharer.shares) <= 1
        bills.remove(b"answer", sharer.take_share)
    assert len(bills) == 0
