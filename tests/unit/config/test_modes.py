"""Modes of models: what does not go with them is said when the configuration is read."""

import pytest

from maitred.config.loader import load
from maitred.core.errors import ConfigInvalid


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("mode: embedding, path: ./somewhere", "section `encoder`"),
        ("mode: embedding, upstreams: [{url: 'https://a.example/v1', kind: anthropic}]", "no requests of the mode"),
        (
            "mode: audio_speech, continuation: reprompt, upstreams: [{url: 'https://a.example', dialect: vllm}]",
            "Only texts",
        ),
        ("mode: pictures, upstreams: [{url: 'https://a.example'}]", "pictures"),
    ],
)
def test_what_does_not_go_with_a_mode_is_said(settings, words, tmp_path):
    file = tmp_path / "maitred.yaml"
    file.write_text(f"models: {{m: {{{settings}}}}}")
    with pytest.raises(ConfigInvalid, match=words):
        load(file, {})
