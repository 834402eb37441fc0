"""What our own engine cannot do with a request."""

import pytest

from maitred.app.request.validation import check_supported
from maitred.core.errors import InvalidRequest
from maitred.core.inference import InferenceRequest
from maitred.core.request import SamplingParams


def ask(*needs):
    return InferenceRequest(model="m", prompts=["a"], sampling=SamplingParams(max_tokens=1, seed=0), needs=needs)


def test_more_than_text_is_refused_by_its_name():
    with pytest.raises(InvalidRequest) as caught:
        check_supported(ask("tools", "tool_choice").needs)
    assert (caught.value.message, caught.value.param) == (
        "tools is not supported by this server yet. Use /v1/chat/completions and a model that knows tools. "
        "Otherwise remove it.",
        "tools",
    )


def test_text_is_not():
    check_supported(ask().needs)
    assert ask().needs == ()
