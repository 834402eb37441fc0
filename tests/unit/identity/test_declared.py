import hashlib

import pytest
from msgspec import Struct

from maitred.config.sources import parse_yaml
from maitred.config.walker import StructBuilder
from maitred.core.errors import ConfigInvalid
from maitred.core.limits import LimitKind
from maitred.core.tenancy import CacheDirective, Scope, Tenant
from maitred.identity.config import IdentityConfig, OidcConfig
from maitred.identity.declared import make_declared_directory as declared_with
from maitred.identity.declared_config import OrganisationConfig
from maitred.identity.faults import declaration_faults
from maitred.identity.keys import make_key, matches, parse

FIRST, SECOND = make_key(), make_key()
ENV = {"FIRST": FIRST.plaintext, "SECOND": SECOND.plaintext, "BAD": "sk-mtd-hunter2"}

FULL = """
identity:
  refresh_s: 200ms
  limits: {concurrent_requests: 1000}
  limits_per_key: {requests_per_minute: 60}
  oidc:
    corporate:
      issuer: https://idp.example/
      audience: maitred
      algorithms: [ES256]
      tenants: {engineering: acme}
      default_scopes: []
tenants:
  acme:
    name: Acme Ltd
    weight: 2
    models: [small, large]
    priority_ceiling: 5
    regions: [eu]
    tags: [local-only]
    limits:
      requests_per_minute: 600
      tokens_per_minute: 100000
      usd_per_month: 50.5
      burst: {requests_per_minute: 20}
      soft: {usd_per_month: 40, usd_total: 1000}
      models:
        large: {output_tokens: 256, usd_per_day: 1}
    keys:
      ci:
        secret: {env: FIRST}
        scopes: [inference, metrics]
        cache_controls: [ttl, no-cache, ttl]
        limits: {concurrent_requests: 4}
    teams:
      lab:
        disabled: yes
        keys:
          ann: {secret: {env: SECOND}}
  other:
"""


class Sections(Struct, frozen=True, kw_only=True):
    identity: IdentityConfig = IdentityConfig()
    tenants: dict[str, OrganisationConfig] = {}


def read(text, env=ENV):
    root, faults = parse_yaml(text, "f")
    walker = StructBuilder(env)
    sections = walker.build(Sections, root)
    return sections, [str(fault) for fault in [*faults, *walker.faults]]


def make_declared_directory(tenants):
    return declared_with(tenants, IdentityConfig())


def sound(text):
    sections, faults = read(text)
    assert faults == []
    return sections


def test_a_file_declares_tenants_with_their_attributes():
    sections = sound(FULL)
    found = make_declared_directory(sections.tenants)
    assert found.tenants == (
        Tenant(
            id="acme",
            name="Acme Ltd",
            weight=2.0,
            models=("small", "large"),
            priority_ceiling=5,
            regions=("eu",),
            tags=("local-only",),
        ),
        Tenant(id="lab", parent="acme", name="lab", disabled=True),
        Tenant(id="other", name="other"),
    )
    assert sections.identity.refresh_s == 0.2
    assert sections.identity.oidc == {
        "corporate": OidcConfig(
            issuer="https://idp.example/",
            audience="maitred",
            algorithms=("ES256",),
            tenants={"engineering": "acme"},
            default_scopes=(),
        )
    }


def test_keys_are_kept_as_hashes_under_their_public_ids():
    found = make_declared_directory(sound(FULL).tenants)
    assert [(key.id, key.tenant, key.name, key.scopes) for key in found.keys] == [
        (FIRST.public_id, "acme", "ci", (Scope.INFERENCE, Scope.METRICS)),
        (SECOND.public_id, "lab", "ann", (Scope.INFERENCE,)),
    ]
    assert [key.cache_controls for key in found.keys] == [(CacheDirective.TTL, CacheDirective.NO_CACHE), None]
    assert matches(parse(FIRST.plaintext)[1], found.keys[0].secrets, now_s=0.0)


def test_limits_get_subjects_kinds_and_units():
    sections = sound(FULL)
    found = declared_with(sections.tenants, sections.identity).limits
    K = LimitKind  # noqa: N806
    acme, key = "tenant:acme", f"key:{FIRST.public_id}"
    assert {(limit.subject, limit.kind, limit.value, limit.model, limit.burst, limit.hard) for limit in found} == {
        ("*", K.CONCURRENT_REQUESTS, 1000, None, None, True),
        ("key:*", K.REQUESTS_PER_MINUTE, 60, None, None, True),
        (acme, K.REQUESTS_PER_MINUTE, 600, None, 20, True),
        (acme, K.TOKENS_PER_MINUTE, 100_000, None, None, True),
        (acme, K.USD_PER_MONTH, 50_500_000_000, None, None, True),
        (acme, K.USD_PER_MONTH, 40_000_000_000, None, None, False),
        (acme, K.USD_TOTAL, 1_000_000_000_000, None, None, False),
        (acme, K.OUTPUT_TOKENS, 256, "large", None, True),
        (acme, K.USD_PER_DAY, 1_000_000_000, "large", None, True),
        (key, K.CONCURRENT_REQUESTS, 4, None, None, True),
    }


def test_every_kind_of_limit_can_be_declared():
    text = "tenants:\n  a:\n    limits: {" + ", ".join(f"{kind}: 3" for kind in LimitKind) + "}"
    assert [limit.kind for limit in make_declared_directory(sound(text).tenants).limits] == list(LimitKind)


def test_ids_of_limits_differ_and_stay_when_their_values_change():
    before = make_declared_directory(sound(FULL).tenants).limits
    after = make_declared_directory(sound(FULL.replace("600", "700").replace("50.5", "51")).tenants).limits
    assert [limit.id for limit in before] == [limit.id for limit in after]
    assert before != after
    assert len({limit.id for limit in before}) == len(before)


def test_secrets_are_never_shown():
    shown = repr(sound(FULL))
    assert FIRST.plaintext not in shown
    assert "{env: FIRST}" in shown


def test_what_does_not_fit_is_listed_with_its_place():
    tenants = sound(
        "tenants:\n"
        "  Acme: {}\n"
        "  one:\n    keys:\n      a: {secret: {env: FIRST}}\n      b: {secret: {env: BAD}}\n"
        "    teams:\n      two: {}\n      lab: {}\n"
        "  two:\n    teams:\n      lab:\n        keys:\n          c: {secret: {env: FIRST}}\n"
    ).tenants
    assert [key for key, _ in declaration_faults(tenants, IdentityConfig())] == [
        "tenants.Acme",
        "tenants.one.keys.b.secret",
        "tenants.two",
        "tenants.two.teams.lab",
        "tenants.two.teams.lab.keys.c.secret",
    ]
    with pytest.raises(ConfigInvalid) as caught:
        make_declared_directory(tenants)
    assert "{env: BAD} does not hold a whole key" in caught.value.message
    assert "taken by tenants.one.teams.lab" in caught.value.message
    assert "hunter2" not in caught.value.message
    assert FIRST.plaintext not in caught.value.message


def test_wrong_settings_are_found_where_they_stand():
    _, faults = read(
        "identity:\n  oidc:\n    idp:\n      issuer: https://a\n      algorithms: [HS256, none, RS256]\n"
        "tenants:\n  acme:\n    weight: 0\n    limits: {requests_per_minut: 5, usd_per_day: -1}\n"
        "    keys:\n      ci: {secret: sk-mtd-plain, scopes: [inference, root]}\n"
    )
    assert sorted(tuple(fault.split(": ")[:2]) for fault in faults) == [
        ("f:11", "tenants.acme.keys.ci.scopes[1]"),
        ("f:11", "tenants.acme.keys.ci.secret"),
        ("f:4", "identity.oidc.idp.audience"),
        ("f:5", "identity.oidc.idp.algorithms[0]"),
        ("f:5", "identity.oidc.idp.algorithms[1]"),
        ("f:8", "tenants.acme.weight"),
        ("f:9", "tenants.acme.limits.requests_per_minut"),
        ("f:9", "tenants.acme.limits.usd_per_day"),
    ]
    assert not any("plain" in fault for fault in faults)


def test_settings_without_effect_are_faults():
    sections = sound(
        "identity:\n  limits_per_key: {burst: {tokens_per_minute: 5}}\n"
        "tenants:\n  acme:\n    name: \"a\\tb\"\n    models: [small, '']\n    tags: [x, x]\n"
        "    limits: {models: {m: {burst: {requests_per_minute: 5}, tokens_per_minute: 9}}}\n"
        "    keys:\n      ci: {secret: {env: FIRST}, scopes: []}\n      '': {secret: {env: SECOND}}\n"
    )
    assert [key for key, _ in declaration_faults(sections.tenants, sections.identity)] == [
        "identity.limits_per_key.burst.tokens_per_minute",
        "tenants.acme.name",
        "tenants.acme.models",
        "tenants.acme.keys.",
        "tenants.acme.limits.models.m.burst.requests_per_minute",
        "tenants.acme.keys.ci.scopes",
    ]
    with pytest.raises(ConfigInvalid):
        declared_with({}, sections.identity)


def test_words_that_are_repeated_count_once():
    text = "tenants:\n  a:\n    tags: [x, y, x]\n    keys:\n      ci:\n        secret: {env: FIRST}\n"
    found = make_declared_directory(sound(text + "        scopes: [admin, admin]\n").tenants)
    assert found.tenants[0].tags == ("x", "y")
    assert found.keys[0].scopes == (Scope.ADMIN,)


def test_keys_of_another_gateway_are_given_whole_or_by_their_digest():
    digest = hashlib.sha256(b"sk-old").hexdigest()
    sections, faults = read(
        "tenants: {acme: {keys: {master: {secret: {env: OLD}, foreign: true}, "
        f"a: {{sha256: {'ab' * 32}, expires_at: '2027-01-01T00:00:00Z'}}}}}}}}",
        {"OLD": "sk-old"},
    )
    assert faults == []
    found = make_declared_directory(sections.tenants).keys
    assert [(key.id, key.secrets[0].sha256.hex(), key.expires_s) for key in found] == [
        (digest[:16], digest, None),
        ("ab" * 8, "ab" * 32, 1798761600.0),
    ]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("{}", "Give one of the two"),
        (f"{{secret: {{env: OLD}}, sha256: {'ab' * 32}}}", "Give one of the two"),
        ("{secret: {env: OLD}}", "set `foreign`"),
        ("{secret: {env: FIRST}, foreign: true}", "Leave out `foreign`"),
        (f"{{sha256: {'ab' * 32}, expires_at: 2027-01-01}}", "no time with its zone"),
    ],
)
def test_a_key_has_one_form(key, words):
    sections, faults = read(f"tenants: {{acme: {{keys: {{k: {key}}}}}}}", {**ENV, "OLD": "sk-old"})
    assert faults == []
    assert words in "\n".join(message for _, message in declaration_faults(sections.tenants, sections.identity))
