"""Layers, origins, and the listing of faults."""

from pathlib import Path

import pytest

from maitred.config.loader import LoadedConfig, load
from maitred.config.sources import Flag
from maitred.core.errors import ConfigInvalid


@pytest.fixture(autouse=True)
def empty_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def faults(text: str = "", env: dict[str, str] | None = None, overrides: dict[str, object] | None = None) -> list[str]:
    Path("maitred.yaml").write_text(text)
    with pytest.raises(ConfigInvalid) as caught:
        load(None, env or {}, overrides or {})
    count, *listed = caught.value.message.split("\n")
    assert count == f"The configuration has {'a fault' if len(listed) == 1 else f'{len(listed)} faults'}:"
    return [line.strip() for line in listed]


def loaded(text: str, env: dict[str, str] | None = None, overrides: dict[str, object] | None = None) -> LoadedConfig:
    Path("maitred.yaml").write_text(text)
    return load(None, env or {}, overrides or {})


def test_without_any_layer_everything_is_default() -> None:
    result = load()
    assert result.config.server.host == "127.0.0.1"
    assert result.config.server.port == 8000
    assert set(result.origins.values()) == {"default"}


def test_later_layer_wins_setting_by_setting() -> None:
    result = loaded(
        "server:\n  port: 1\n  max_in_flight: 10\nlog:\n  level: debug\n",
        {"MAITRED__SERVER__PORT": "2", "MAITRED__LOG__FORMAT": "json", "MAITRED_SERVER_PORT": "tcp://10.0.0.1:8000"},
        {"server.port": Flag("--port", "3")},
    )
    assert (result.config.server.port, result.config.server.max_in_flight) == (3, 10)
    assert (result.config.log.level, result.config.log.format) == ("debug", "json")
    assert result.origins["server.port"] == "--port"
    assert result.origins["server.max_in_flight"] == "maitred.yaml:3"
    assert result.origins["log.format"] == "MAITRED__LOG__FORMAT"
    assert result.origins["engine.device"] == "default"


def test_every_fault_of_every_layer_is_listed_with_its_origin() -> None:
    listed = faults(
        "server:\n  prot: 80\n  port: 70000\nengine:\n  device: gpu\nport: 3\nlog: 5\n",
        {"MAITRED__SERVER__STRICT": "maybe", "MAITRED__": "x"},
        {"engine.max_sequences": Flag("--max-sequences", "0"), "engine.thread": 2},
    )
    assert sorted(listed) == sorted(
        [
            "maitred.yaml:2: server.prot: No such setting. Did you mean server.port?",
            "maitred.yaml:3: server.port: Must be a whole number from 0 to 65535, not 70000.",
            "maitred.yaml:5: engine.device: Must be one of auto, cpu, cuda (did you mean cpu?), not 'gpu'.",
            "maitred.yaml:6: port: No such setting. Did you mean server.port?",
            "maitred.yaml:7: log: Is a section: put its settings below it, such as `level:`.",
            "MAITRED__SERVER__STRICT: server.strict: Must be true or false, not 'maybe'.",
            "MAITRED__: Not of the form MAITRED__SECTION__SETTING.",
            "--max-sequences: engine.max_sequences: Must be a whole number from 1 to 65536, not 0.",
            "override: engine.thread: No such setting. Did you mean engine.threads?",
        ]
    )


def test_a_setting_is_suggested_within_its_section_first() -> None:
    """Other sections have settings of the same name."""
    listed = faults("models:\n  x:\n    device: cpu\n    max_sequences: 4\n", {})
    assert sorted(fault for fault in listed if "Did you mean" in fault) == [
        "maitred.yaml:3: models.x.device: No such setting. Did you mean models.x.engine.device?",
        "maitred.yaml:4: models.x.max_sequences: No such setting. Did you mean models.x.engine.max_sequences?",
    ]


def test_a_setting_of_another_section_is_not_suggested() -> None:
    (fault,) = faults("store: {path: /var/lib}\n", {})
    assert fault.startswith("maitred.yaml:1: store.path: No such setting. There are: ")


def test_a_flag_mends_what_the_file_has_wrong() -> None:
    assert loaded("server:\n  port: no\n", {}, {"server.port": 9000}).config.server.port == 9000


def test_unknown_setting_without_a_near_name_lists_what_there_is() -> None:
    assert faults("log:\n  zzz: 1\n") == ["maitred.yaml:2: log.zzz: No such setting. There are: level, format, burst."]


@pytest.mark.parametrize("word", ["true", "True", "yes", "on", "1"])
def test_true_has_several_spellings(word: str) -> None:
    assert loaded(f"server:\n  strict: {word}\n").config.server.strict is True
    assert load(None, {"MAITRED__SERVER__STRICT": word}).config.server.strict is True


def test_the_setting_decides_the_type_of_plain_text() -> None:
    result = loaded("model:\n  served_name: 0777\n  path: no\nserver:\n  drain_grace_s: 1e1\n  port: 08_000\n")
    assert (result.config.model.served_name, result.config.model.path) == ("0777", "no")
    assert (result.config.server.drain_grace_s, result.config.server.port) == (10.0, 8000)


def test_quoted_number_is_called_what_it_is() -> None:
    (fault,) = faults('server:\n  port: "8000"\n')
    assert fault.endswith("not the quoted text '8000'.")


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("10MiB", 10 << 20), ("2GB", 2 * 10**9), ("1048576", 1 << 20), ("'1.5 GiB'", 3 << 29)]
)
def test_sizes_take_units(text: str, size_bytes: int) -> None:
    assert loaded(f"engine:\n  kv_memory_bytes: {text}\n").config.engine.kv_memory_bytes == size_bytes


@pytest.mark.parametrize("text", ["12M", "-1MiB", "1KiB", "much", "[1]", "true"])
def test_what_is_no_size_says_what_one_is(text: str) -> None:
    (fault,) = faults(f"engine:\n  kv_memory_bytes: {text}\n")
    assert "Must be a size such as 64MiB, at least 1MiB, not" in fault


def test_null_is_for_settings_that_take_it() -> None:
    assert loaded("engine:\n  kv_memory_bytes: null\n").config.engine.kv_memory_bytes is None
    assert load(None, {"MAITRED__ENGINE__KV_MEMORY_BYTES": ""}).config.engine.kv_memory_bytes is None
    assert faults("server:\n  port:\n") == [
        "maitred.yaml:2: server.port: Must be a whole number from 0 to 65535, not empty."
    ]


def test_empty_file_and_empty_sections_are_sound() -> None:
    assert loaded("").config == loaded("# nothing\n").config == loaded("server:\nlog: {}\n").config == load().config


@pytest.mark.parametrize("text", [".nan", "inf", "1e999", "-1", "3601", "soon"])
def test_numbers_are_finite_and_in_range(text: str) -> None:
    (fault,) = faults(f"server:\n  drain_grace_s: {text}\n")
    assert "Must be a duration such as 500ms or 2m, from 0 to 3600, not" in fault


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_other_machines_are_served_without_a_key_only_on_purpose(host: str) -> None:
    assert not loaded(f"server:\n  host: '{host}'\n").config.server.serves_anyone
    assert loaded(f"server:\n  host: '{host}'\n  allow_unauthenticated: true\n").config.server.serves_anyone


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_machine_needs_no_key_unless_configured(host: str) -> None:
    assert loaded(f"server:\n  host: '{host}'\n").config.server.serves_anyone
    assert not loaded(f"server:\n  host: '{host}'\n  allow_unauthenticated: false\n").config.server.serves_anyone


def test_a_step_has_a_token_for_every_sequence() -> None:
    (fault,) = faults("engine:\n  max_sequences: 600\n")
    assert fault.startswith("maitred.yaml:2: engine.step_tokens: 384 is less than engine.max_sequences, 600.")


def test_a_wrong_setting_is_not_held_against_another() -> None:
    assert len(faults("engine:\n  max_sequences: 600\n  step_tokens: many\n")) == 1


def test_named_file_must_exist() -> None:
    with pytest.raises(ConfigInvalid, match=r"nowhere\.yaml: No such file"):
        load(Path("nowhere.yaml"))


def test_unreadable_files_are_one_fault_beside_the_others() -> None:
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigInvalid, match=r"(?s)2 faults.*UTF-8.*server\.port"):
        load(Path("binary.yaml"), {"MAITRED__SERVER__PORT": "x"})
    Path("folder.yaml").mkdir()
    with pytest.raises(ConfigInvalid, match=r"folder\.yaml: Cannot be read"):
        load(Path("folder.yaml"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("server: [1\n", "maitred.yaml:2: Not valid YAML: "),
        ("- a\n", "maitred.yaml:1: Must hold sections"),
        ("server:\n  port: 1\n  port: 2\n", "maitred.yaml:3: server.port: Set twice; first at maitred.yaml:2."),
        ("server: !!python/name:os.system\n", "Remove the YAML tag"),
        ("? [a]\n: 1\n", "maitred.yaml:1: A key must be a plain name."),
        ("a: 1\n---\nb: 2\n", "Not valid YAML: "),
        ("server: " + "[" * 5000, "maitred.yaml: Nested too deeply"),
    ],
)
def test_faults_of_form_name_the_line(text: str, expected: str) -> None:
    assert any(expected in fault for fault in faults(text))


def test_aliases_repeat_a_value_but_not_themselves() -> None:
    assert loaded("server:\n  port: &p 81\nengine:\n  threads: *p\n").config.engine.threads == 81
    assert any("alias" in fault for fault in faults("server: &s\n  port: *s\n"))


def test_aliases_of_aliases_stay_small() -> None:
    lines = ["a0: &a0 [x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 40))]
    assert len(faults("\n".join(lines))) == 40


def test_two_variables_for_one_setting_collide() -> None:
    listed = faults("", {"MAITRED__SERVER": "1", "MAITRED__SERVER__PORT": "2"})
    assert any("Cannot be set beside MAITRED__SERVER" in fault for fault in listed)
    assert any(
        "Already set by" in fault
        for fault in faults("", {"MAITRED__LOG__LEVEL": "info", "MAITRED__log__level": "info"})
    )


def test_a_process_reads_only_its_sections() -> None:
    Path("maitred.yaml").write_text("server:\n  host: 0.0.0.0\n  prot: 1\nengine:\n  threads: 3\n")
    result = load(None, {"MAITRED__LOG__LEVEL": "loud"}, {"model.path": "m"}, sections=("model", "engine"))
    assert (result.config.engine.threads, result.config.model.path) == (3, "m")
    assert result.config.server == load(Path("/dev/null")).config.server
    with pytest.raises(ConfigInvalid, match=r"engine\.thread: No such setting"):
        load(None, {}, {"engine.thread": 1}, sections=("model", "engine"))


def test_durations_take_units() -> None:
    assert loaded("server:\n  drain_grace_s: 500ms\n").config.server.drain_grace_s == 0.5
    assert faults("server:\n  drain_grace_s: 2h\n") == [
        "maitred.yaml:2: server.drain_grace_s: Must be a duration such as 500ms or 2m, from 0 to 3600, not 2h."
    ]


def test_tenants_and_providers_are_checked_where_they_are_written() -> None:
    text = (
        "tenants:\n  Acme: {weight: 2}\n  one:\n    keys:\n      ci: {secret: {env: KEY}}\n"
        "identity:\n  oidc:\n    idp:\n      issuer: http://idp.example\n      audience: a\n"
    )
    listed = faults(text, {"KEY": "sk-mtd-hunter2"})
    assert [": ".join(fault.split(": ")[:2]) for fault in listed] == [
        "maitred.yaml:2: tenants.Acme",
        "maitred.yaml:5: tenants.one.keys.ci.secret",
        "maitred.yaml:9: identity.oidc.idp.issuer",
    ]
    assert not any("hunter2" in fault for fault in listed)


def test_engines_are_attached_or_started_and_each_once() -> None:
    config = loaded("", overrides={"model.engines": Flag("--engine", "[unix:/a, tcp:[::1]:9]")}).config
    assert config.model.attached == ["unix:/a", "tcp:[::1]:9"]
    assert loaded("model:\n  engine_address: unix:/a\n").config.model.attached == ["unix:/a"]
    assert loaded("model:\n  replicas: 3\n").config.model.attached == []
    (both,) = faults("model:\n  replicas: 2\n  engines: [unix:/a]\n")
    assert "Replicas are started here only" in both
    (named,) = faults("model:\n  engine_address: unix:/a\n  engines: [unix:/b]\n")
    assert "Move this address there" in named
    (twice,) = faults("model:\n  engines: [unix:/a, unix:/a]\n")
    assert "named twice" in twice


def test_engines_on_ray_have_a_secret_no_addresses_and_enough_deployments() -> None:
    sound = "model: {backend: ray, replicas: 3}\nengine_link: {secret: {env: LINK}, ca_file: ca.pem}\n"
    environment = {"LINK": "correct horse battery staple"}
    assert loaded(sound, environment).config.model.backend == "ray"
    (secret,) = faults("model: {backend: ray}\n")
    assert "where a secret keeps others out" in secret
    (plain,) = faults(sound.replace(", ca_file: ca.pem", ""), environment)
    assert "allow_plaintext if something else encrypts" in plain
    assert loaded(sound.replace("ca_file: ca.pem", "allow_plaintext: true"), environment)
    (addresses,) = faults(sound.replace("replicas: 3", "engines: [unix:/a]"), environment)
    assert "Leave out their addresses" in addresses
    (many,) = faults(sound + "ray: {replica: {max_replicas: 2}}\n", environment)
    assert "Raise max_replicas" in many
    scaled = sound + "ray: {replica: {max_replicas: 3}}\n"
    autoscaling = scaled.replace("replicas: 3}", "replicas: 3, autoscaling: {enabled: true, max_replicas: 4}}", 1)
    (more,) = faults(autoscaling, environment)
    assert "raise ray.replica.max_replicas" in more
    sleeping = autoscaling.replace("max_replicas: 4", "max_replicas: 3, sleeping_replicas: 1")
    (asleep,) = faults(sleeping, environment)
    assert "Engines on Ray cannot sleep" in asleep


def test_engines_of_agents_have_no_addresses_and_agents_come_through_a_guarded_door() -> None:
    environment = {"LINK": "correct horse battery staple"}
    assert loaded("model: {backend: agents}\n").config.agents.listen == "tcp:127.0.0.1:9300"
    (secret,) = faults("model: {backend: agents}\nagents: {listen: 'tcp:0.0.0.0:9300'}\n")
    assert "Set engine_link.secret" in secret
    guarded = "model: {backend: agents}\nagents: {listen: 'tcp:0.0.0.0:9300'}\nengine_link: {secret: {env: LINK}}\n"
    (plain,) = faults(guarded, environment)
    assert "Set engine_link.certificate_file" in plain
    (blind,) = faults(guarded.replace("}}", "}, certificate_file: gateway.pem}"), environment)
    assert "Set ca_file" in blind
    assert loaded(guarded.replace("}}", "}, certificate_file: gateway.pem, ca_file: ca.pem}"), environment)
    assert loaded(guarded.replace("}}", "}, allow_plaintext: true}"), environment)
    (addresses,) = faults("model: {backend: agents, engines: [unix:/a]}\n")
    assert "Leave out their addresses" in addresses
    assert loaded("model: {backend: agents, autoscaling: {enabled: true, sleeping_replicas: 1}}\n")
    (elsewhere,) = faults("region: eu\nmodel: {backend: agents, region: us}\n")
    assert "Leave out model.region" in elsewhere
    assert loaded("region: eu\nmodel: {backend: agents, region: eu}\n")
    (port,) = faults("model: {backend: agents}\nagents: {listen: 'tcp:gateway'}\n")
    assert "needs a host and a port" in port


@pytest.mark.parametrize(
    "setting",
    [
        "model: {replicas: N}",
        "model: {autoscaling: {max_replicas: N}}",
        "ray: {replica: {max_replicas: N}}",
    ],
)
def test_a_model_has_at_most_64_replicas_wherever_they_run(setting) -> None:
    loaded(setting.replace("N", "64"))
    (many,) = faults(setting.replace("N", "65"))
    assert "64" in many


def test_a_text_has_the_form_that_its_setting_names() -> None:
    (origin,) = faults("server:\n  cors_origins: ['*', app.example]\n")
    assert "server.cors_origins[1]: Must be text that matches" in origin
    (endpoint,) = faults("traces:\n  endpoint: ftp://collector\n")
    assert endpoint.endswith("traces.endpoint: Must be text that matches ^https?://, not 'ftp://collector'.")
    (namespace,) = faults("counters:\n  namespace: two words\n")
    assert "namespace: Must be text that matches" in namespace
    assert loaded("server:\n  cors_origins: ['*', https://app.example]\n").config.server.cors_origins == (
        *("*", "https://app.example"),
    )
