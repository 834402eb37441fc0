"""The names that requests use."""

import pytest
from msgspec.structs import replace

from maitred.app.models.router import Router, home_region, read_routes, untold_region
from maitred.config.tree import Config, ServedModelConfig, TextModelConfig
from maitred.core.errors import Forbidden, ModelNotFound, ReplicaUnavailable
from maitred.core.inference import InferenceRequest
from maitred.core.request import SamplingParams
from maitred.core.tenancy import ANONYMOUS, Principal
from maitred.replica.upstream.config import UpstreamConfig
from maitred.routing.catalog import Catalog, ServedModel
from maitred.routing.config import RoutingConfig
from maitred.routing.pools.config import FallbackConfig, TargetConfig
from maitred.testing.script import SCRIPTED_CARD

SAMPLING = SamplingParams(max_tokens=1, seed=0)


def router(*names, **settings):
    catalog = Catalog([ServedModel(name, [], None) for name in names])
    return Router(catalog, read_routes(Config(**settings), catalog))


def asked(model, **wants):
    return InferenceRequest(model, ["Hi"], SAMPLING, **wants)


def caller(**properties):
    return Principal(key="k", tenants=("acme",), scopes=frozenset(), **properties)


def test_the_exact_name_and_no_other():
    models = router("Qwen2.5-0.5B", "tiny")
    assert models.resolve("tiny", ANONYMOUS).name == "tiny"
    with pytest.raises(ModelNotFound) as error:
        models.resolve("tiney", ANONYMOUS)
    assert error.value.param == "model"
    assert (
        error.value.message == "The model 'tiney' is not served here. Did you mean 'tiny'? Served: Qwen2.5-0.5B, tiny."
    )


def test_a_name_that_is_like_none_gets_no_guess():
    with pytest.raises(ModelNotFound) as error:
        router("tiny").route(asked("gpt-4o" * 1000), ANONYMOUS)
    assert "Did you mean" not in error.value.message
    assert len(error.value.message) < 400


def test_what_a_caller_may_not_use_is_not_there_for_it():
    models = router("tiny", "big", routing=RoutingConfig(aliases={"default": "big"}))
    acme = caller(models=frozenset({"tiny"}))
    assert models.models_for(acme) == ["tiny"]
    assert models.models_for(ANONYMOUS) == ["tiny", "big", "default"]
    for name in ("big", "default"):
        with pytest.raises(ModelNotFound):
            models.route(asked(name), acme)
    assert models.route(asked("default"), caller(models=frozenset({"default"}))).first_target().pool == "big"


UPSTREAMS = {
    "near": {"upstreams": [UpstreamConfig(url="http://10.0.0.7:8000/v1")], "region": "eu"},
    "named": {"upstreams": [UpstreamConfig(url="http://vllm.internal:8000/v1")]},
    "mine": {"upstreams": [UpstreamConfig(url="http://vllm.internal:8000/v1")], "local": True},
    "mixed": {
        "upstreams": [UpstreamConfig(url="http://10.0.0.7:8000/v1"), UpstreamConfig(url="https://93.184.216.34/v1")]
    },
}


@pytest.mark.parametrize(("name", "stays"), [("near", True), ("named", False), ("mine", True), ("mixed", False)])
def test_what_may_not_leave_goes_only_to_what_is_surely_here(name, stays):
    models = router(*UPSTREAMS, models={key: TextModelConfig(**value) for key, value in UPSTREAMS.items()})
    for ask, principal in (
        (asked(name, local_only=True), ANONYMOUS),
        (asked(name), caller(tags=frozenset({"local-only"}))),
    ):
        plan = models.route(ask, principal)
        if stays:
            assert plan.first_target().pool == name
        else:
            with pytest.raises(Forbidden):
                plan.first_target()


def test_a_request_can_narrow_where_its_tenant_may_be_served_and_not_widen_it():
    models = router("near", models={"near": TextModelConfig(**UPSTREAMS["near"])})
    european = caller(regions=frozenset({"eu"}))
    assert models.route(asked("near"), european).first_target().pool == "near"
    assert models.route(asked("near", regions=frozenset({"eu", "us"})), european).first_target().pool == "near"
    for principal, regions in ((european, {"us"}), (ANONYMOUS, {"us"}), (caller(regions=frozenset({"us"})), {"eu"})):
        with pytest.raises(Forbidden):
            models.route(asked("near", regions=frozenset(regions)), principal).first_target()


def test_tools_go_where_there_are_tools():
    models = router("tiny", "big", routing=RoutingConfig(fallbacks={"tiny": FallbackConfig(general=["big"])}))
    assert models.route(asked("tiny", needs=("tools",)), ANONYMOUS).first_target().pool == "tiny", (
        "nobody has reported that it has none"
    )


def test_a_name_of_the_configuration_replaces_the_models_own():
    models = router("tiny", "big", routing=RoutingConfig(names={"tiny": [TargetConfig(pool="big")]}))
    assert models.resolve("tiny", ANONYMOUS).name == "big"


class PaperReplica:
    """A replica with a card, or none."""

    def __init__(self, region=None, *, up=True):
        self.region, self.up = region, up

    def card(self):
        if not self.up:
            raise ReplicaUnavailable
        return replace(SCRIPTED_CARD, region=self.region)


@pytest.mark.parametrize(
    ("replicas", "settings", "allowed"),
    [
        ([PaperReplica()], {"region": "eu"}, {"eu"}),
        ([PaperReplica()], {"model": ServedModelConfig(region="eu")}, {"eu"}),
        ([PaperReplica()], {"model": ServedModelConfig(region="us"), "region": "eu"}, {"us"}),
        ([PaperReplica(), PaperReplica("us")], {"region": "eu"}, {"eu", "us"}),
        ([PaperReplica("us")], {"region": "eu"}, {"us"}),
        ([PaperReplica("us", up=False)], {"region": "eu"}, {"eu"}),
        ([], {"region": "eu"}, {"eu"}),
        ([PaperReplica()], {}, set()),
    ],
)
def test_a_model_is_where_any_of_its_replicas_is(replicas, settings, allowed):
    catalog = Catalog([ServedModel("m", replicas, None)])
    models = Router(catalog, read_routes(Config(**settings), catalog))
    for region in ("eu", "us"):
        request = asked("m", regions=frozenset({region}))
        if region in allowed:
            assert models.route(request, ANONYMOUS).first_target().pool == "m"
        else:
            with pytest.raises(Forbidden, match="in"):
                models.route(request, ANONYMOUS).first_target()
    assert models.route(asked("m"), ANONYMOUS).first_target().pool == "m"


def test_engines_that_tell_no_region_are_where_their_section_or_their_gateway_says():
    config = Config(
        region="eu",
        models={
            "here": TextModelConfig(path="/models/here"),
            "there": TextModelConfig(upstreams=[UpstreamConfig(url="http://127.0.0.1:9/v1")], region="us"),
            "anywhere": TextModelConfig(upstreams=[UpstreamConfig(url="http://127.0.0.1:9/v1")]),
        },
    )
    assert [untold_region(name, config) for name in ("m", "here", "there", "anywhere")] == ["eu", "eu", "us", None]
    assert [home_region(name, config) for name in ("m", "here", "there", "anywhere")] == ["eu", "eu", "us", None]
    moved = Config(region="eu", model=ServedModelConfig(region="us"))
    assert (home_region("m", moved), untold_region("m", moved)) == ("eu", "us")
