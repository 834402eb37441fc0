"""A real gateway, with workers, before a scripted server that is a process: the official client and large forms."""

import subprocess
import sys

import openai
import pytest
import yaml

from maitred.testing.scripted_media import SPEECH, TRANSCRIPT
from maitred.testing.server_process import serving

KINDS = {"vectors": "embedding", "pictures": "image_generation", "voice": "audio_speech", "ears": "audio_transcription"}


@pytest.mark.parametrize("workers", [1, 2])
def test_the_official_client_gets_everything_from_a_gateway(tmp_path, workers):
    command = [sys.executable, "-m", "maitred.testing.scripted_media"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as provider:
        try:
            url = provider.stdout.readline().strip()
            upstreams = [{"url": url, "probe_timeout_s": 300.0, "connect_timeout_s": 300.0}]
            config = {
                "models": {name: {"mode": mode, "upstreams": upstreams} for name, mode in KINDS.items()},
                "admission": {"prices": {"pictures": {"images": {"*": 0.04}}}},
                "server": {"workers": workers, "max_upload_bytes": 30_000_000},
                "store": {"folder": str(tmp_path / "data")},
            }
            file = tmp_path / "maitred.yaml"
            file.write_text(yaml.safe_dump(config))
            with serving("--config", str(file)) as server:
                client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=5, timeout=300)
                with client:
                    answer = client.embeddings.create(model="vectors", input=["a", "b"])
                    assert (len(answer.data), answer.model) == (2, "vectors")
                    assert client.images.generate(model="pictures", prompt="a door").data[0].b64_json
                    assert client.audio.speech.create(model="voice", voice="a", input="Hi").content == SPEECH
                    sound = ("long.mp3", bytes(15_000_000))  # more than max_body_bytes
                    assert client.audio.transcriptions.create(model="ears", file=sound).text == TRANSCRIPT
                    with pytest.raises(openai.APIStatusError, match="max_upload_bytes"):
                        client.audio.transcriptions.create(model="ears", file=("x.mp3", bytes(31_000_000)))
        finally:
            provider.terminate()
