import pytest

from maitred.config.checks import find_conflicts
from maitred.config.tree import Config
from maitred.core.errors import ConfigInvalid
from maitred.core.secret import Secret
from maitred.wire.address import parse_address
from maitred.wire.link.config import LinkConfig
from maitred.wire.link.credentials import dialer_credentials, listener_credentials
from tests.support.certificates import Authority

SECRET = Secret("sixteen letters.", "{env: A}")
EVERYWHERE = ["tcp:0.0.0.0:9100", "tcp:10.0.0.1:9100", "tcp:[::]:9100", "tcp:engine-1:9100"]
HERE = ["tcp:127.0.0.1:9100", "tcp:[::1]:9100", "tcp:localhost:9100", "unix:/run/engine.sock"]


@pytest.mark.parametrize("address", EVERYWHERE)
@pytest.mark.parametrize("of_end", [listener_credentials, dialer_credentials])
def test_a_network_needs_a_secret_and_tls(address, of_end, tmp_path):
    parsed = parse_address(address)
    with pytest.raises(ConfigInvalid, match=r"Set engine_link.secret to \{env: NAME\}"):
        of_end(parsed, LinkConfig(allow_plaintext=True))
    with pytest.raises(ConfigInvalid, match="prompts and answers are encrypted"):
        of_end(parsed, LinkConfig(secret=SECRET))
    assert of_end(parsed, LinkConfig(secret=SECRET, allow_plaintext=True)).tls is None
    authority = Authority(tmp_path)
    issued = authority.issue("end")
    config = LinkConfig(secret=SECRET, ca_file=authority.file, certificate_file=issued.certificate, key_file=issued.key)
    assert of_end(parsed, config).tls is not None


@pytest.mark.parametrize("address", HERE)
def test_this_machine_needs_nothing(address):
    for of_end in (listener_credentials, dialer_credentials):
        credentials = of_end(parse_address(address), LinkConfig())
        assert (credentials.secret, credentials.tls) == (None, None)


def test_files_that_cannot_be_used_are_named(tmp_path):
    address = parse_address(HERE[0])
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    for config, says in [
        (LinkConfig(ca_file="/nowhere.pem"), r"engine_link.ca_file, /nowhere.pem"),
        (LinkConfig(ca_file=str(empty)), "engine_link.ca_file"),
    ]:
        with pytest.raises(ConfigInvalid, match=says):
            dialer_credentials(address, config)
    for config in (
        LinkConfig(certificate_file="/nowhere.pem"),
        LinkConfig(certificate_file=str(empty)),
        LinkConfig(certificate_file=Authority(tmp_path).issue("no-key").certificate),
    ):
        with pytest.raises(ConfigInvalid, match=r"engine_link.certificate_file"):
            listener_credentials(address, config)


def test_a_secret_that_can_be_guessed_and_a_key_without_a_certificate_are_conflicts():
    link = LinkConfig(secret=Secret("short", "{env: A}"), key_file="engine.key")
    found = {conflict.keys[0]: conflict.message for conflict in find_conflicts(Config(engine_link=link))}
    assert "guessed" in found["engine_link.secret"]
    assert "short" not in found["engine_link.secret"].replace("shorter", "")
    assert "engine_link.certificate_file" in found["engine_link.key_file"]
