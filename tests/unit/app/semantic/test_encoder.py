"""Where a question may be read: by the encoder of its gateway, and where its request may run."""

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from maitred.app.semantic.encoder import QuestionEncoder
from maitred.core.request import LabelledPair, SimilarSearch
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.request import Endpoint
from tests.support.clock import FakeClock
from tests.support.dispatchers import CARD, ScriptedReplica, make_dispatch_request

US = frozenset({"us"})


class Reached(Exception):
    """A search has reached a replica."""


class Encoder(ScriptedReplica):
    def generate(self, request):
        raise Reached(self.card().region)


def encoder(*regions, home):
    endpoints = [Endpoint(f"at-{region}", Encoder(replace(CARD, region=region))) for region in regions]
    dispatcher = Dispatcher("e", endpoints, DispatchConfig(), FakeClock(), region=home)
    dispatcher.core.refresh(0.0)
    return QuestionEncoder(SimpleNamespace(dispatcher=dispatcher), FakeClock())


@pytest.mark.parametrize(
    ("home", "regions", "at"), [("eu", None, True), ("eu", ["eu", "us"], True), ("eu", ["us"], False)]
)
def test_an_encoder_learns_from_labels_whose_questions_may_be_read_where_it_is(home, regions, at):
    assert encoder("eu", home=home).may_learn_from(LabelledPair("a", "b", True, (0.0, 0.0, 0.0), regions)) is at


def test_a_label_may_be_read_where_its_requests_may_run_and_at_its_gateway():
    assert encoder("eu", home="eu").regions_of_label(US) == ["eu", "us"]
    assert encoder(None, home=None).regions_of_label(US) == ["", "us"]
    assert encoder("eu", home="eu").regions_of_label(None) is None
    label = LabelledPair("a", "b", True, (0.0, 0.0, 0.0), ["", "us"])
    assert encoder(None, home=None).may_learn_from(label)
    assert not encoder("eu", home="eu").may_learn_from(label)


async def test_a_search_goes_where_its_question_may_be_read():
    search = SimilarSearch("a", b"", "s", count=1, least_cosine=0.0)
    flow = make_dispatch_request().flow
    with pytest.raises(Reached, match="us"):
        await encoder("ap", "us", home="eu").search(search, [1], flow, "acme", regions=US)
    with pytest.raises(Reached, match="eu"):
        await encoder("ap", "eu", home="eu").search(search, [1], flow, "acme", regions=US)
