import pytest

from maitred.core.flow import FlowLevel
from maitred.core.limits import Limit, LimitKind
from maitred.core.tenancy import ApiKey, CacheDirective, DirectoryChanges, Scope, Tenant
from maitred.identity.directory import Directory


def directory_of(*things, version=1):
    directory = Directory()
    directory.apply(changes_of(*things, version=version))
    return directory


def changes_of(*things, version=2, **deleted):
    return DirectoryChanges(
        version,
        [thing for thing in things if isinstance(thing, Tenant)],
        [thing for thing in things if isinstance(thing, ApiKey)],
        [thing for thing in things if isinstance(thing, Limit)],
        **deleted,
    )


def limit(number, subject, value=1):
    return Limit(id=f"l{number}", subject=subject, kind=LimitKind.REQUESTS_PER_MINUTE, value=value)


ORGANISATION = Tenant(
    id="acme", weight=3.0, models=("a", "b"), regions=("eu", "us"), tags=("audited",), priority_ceiling=7
)
TEAM = Tenant(
    id="lab", parent="acme", weight=2.0, models=("b", "c"), regions=("us",), tags=("local-only",), priority_ceiling=9
)
KEY = ApiKey(id="k1", tenant="lab", scopes=(Scope.INFERENCE, Scope.METRICS), cache_controls=(CacheDirective.TTL,))


def principal(directory, public_id="k1"):
    return directory.principal_for(directory.key(public_id))


def test_settings_of_a_tenant_and_its_parents_are_combined():
    found = principal(directory_of(ORGANISATION, TEAM, KEY))
    assert found.key == "k1"
    assert found.tenants == ("lab", "acme")
    assert found.subjects == ("key:k1", "tenant:lab", "tenant:acme", "*")
    assert found.scopes == {Scope.INFERENCE, Scope.METRICS}
    assert found.models == {"b"}
    assert found.regions == {"us"}
    assert found.cache_controls == ("ttl",)
    assert found.tags == {"audited", "local-only"}
    assert found.priority_ceiling == 7
    assert found.shares == (FlowLevel("acme", 3.0), FlowLevel("lab", 2.0), FlowLevel("k1"))


def test_tenants_that_say_nothing_allow_everything():
    found = principal(directory_of(Tenant(id="acme"), Tenant(id="lab", parent="acme"), KEY))
    assert found.models is None
    assert found.regions is None
    assert found.tags == frozenset()
    assert found.priority_ceiling == 10


def test_with_nothing_in_common_nothing_is_allowed():
    apart = Tenant(id="lab", parent="acme", models=("z",), regions=("cn",))
    found = principal(directory_of(ORGANISATION, apart, KEY))
    assert found.models == frozenset()
    assert found.regions == frozenset()
    assert not found.may_use("a")
    assert principal(directory_of(Tenant(id="lab", models=()), KEY)).models == frozenset()


@pytest.mark.parametrize(
    "things",
    [
        (Tenant(id="acme", disabled=True), TEAM, KEY),
        (ORGANISATION, Tenant(id="lab", parent="acme", disabled=True), KEY),
        (TEAM, KEY),
        (ORGANISATION, KEY),
        (ORGANISATION, TEAM, ApiKey(id="k1", tenant="lab", revoked=True)),
        (Tenant(id="acme", parent="lab"), TEAM, KEY),
    ],
    ids=["organisation disabled", "team disabled", "no organisation", "no team", "revoked", "circle"],
)
def test_nobody_is_behind_a_key_whose_path_is_broken(things):
    assert principal(directory_of(*things)) is None


def test_principals_are_kept_until_what_they_rest_on_changes():
    other = ApiKey(id="k2", tenant="other")
    directory = directory_of(ORGANISATION, TEAM, KEY, Tenant(id="other"), other)
    first, unconcerned = principal(directory), principal(directory, "k2")
    assert principal(directory) is first
    directory.apply(changes_of(Tenant(id="acme", models=("b", "c"), disabled=False)))
    assert principal(directory).models == {"b", "c"}
    assert principal(directory, "k2") is unconcerned
    directory.apply(changes_of(Tenant(id="acme", disabled=True), version=3))
    assert principal(directory) is None
    directory.apply(changes_of(ORGANISATION, version=4))
    assert principal(directory) == first
    directory.apply(changes_of(Tenant(id="lab", parent="other"), version=5))
    assert principal(directory).tenants == ("lab", "other")
    directory.apply(changes_of(Tenant(id="acme", disabled=True), version=6))
    assert principal(directory).tenants == ("lab", "other")
    directory.apply(changes_of(version=7, deleted_tenants=["other"]))
    assert principal(directory) is None
    assert principal(directory, "k2") is None
    directory.apply(changes_of(Tenant(id="other"), version=8))
    assert principal(directory).tenants == ("lab", "other")
    assert directory.version == 8


def test_keys_change_move_and_go():
    directory = directory_of(ORGANISATION, TEAM, KEY)
    before = directory.key("k1")
    assert principal(directory) is not None
    directory.apply(changes_of(ApiKey(id="k1", tenant="acme")))
    assert principal(directory).tenants == ("acme",)
    # An old record does not spoil what is kept of the new one.
    assert directory.principal_for(before).tenants == ("lab", "acme")
    assert principal(directory).tenants == ("acme",)
    directory.apply(changes_of(version=3, deleted_tenants=["lab"]))
    assert principal(directory).tenants == ("acme",)
    directory.apply(changes_of(ApiKey(id="k1", tenant="acme", revoked=True), version=4))
    assert principal(directory) is None
    directory.apply(changes_of(version=5, deleted_keys=["k1", "never"]))
    assert directory.key("k1") is None


def test_tenants_made_up_by_tokens_are_not_kept():
    directory = directory_of(ORGANISATION)
    scopes = frozenset({Scope.INFERENCE})
    for number in range(100):
        assert directory.principal_in(f"t{number}", key="idp:ann", scopes=scopes) is None
    directory.apply(changes_of(Tenant(id="t5", parent="acme")))
    assert directory.principal_in("t5", key="idp:ann", scopes=scopes).tenants == ("t5", "acme")


def test_limits_keep_the_order_in_which_they_were_made():
    directory = directory_of(limit(1, "tenant:acme"), limit(2, "*"), limit(3, "tenant:acme"))
    assert [limit.id for limit in directory.limits_of("tenant:acme")] == ["l1", "l3"]
    assert list(directory.limits_of("tenant:nobody")) == []
    directory.apply(changes_of(limit(1, "tenant:acme", value=5), limit(4, "tenant:acme")))
    assert [(limit.id, limit.value) for limit in directory.limits_of("tenant:acme")] == [
        ("l1", 5),
        ("l3", 1),
        ("l4", 1),
    ]
    directory.apply(changes_of(limit(1, "*"), version=3, deleted_limits=["l3", "l4", "never"]))
    assert list(directory.limits_of("tenant:acme")) == []
    assert [limit.id for limit in directory.limits_of("*")] == ["l2", "l1"]


def test_limits_have_another_edition_after_every_change_of_them_and_only_then():
    directory = directory_of(limit(1, "tenant:acme"), version=9)
    editions = [directory.edition]
    for changes in (changes_of(limit(1, "tenant:acme", value=5)), changes_of(deleted_limits=["l1"], version=11)):
        directory.apply(changes)
        editions.append(directory.edition)
    directory.replace(changes_of(limit(2, "*"), version=4))  # a source that has gone back in time
    directory.apply(changes_of(limit(2, "*", value=7), version=5))
    editions.append(directory.edition)
    assert len(set(editions)) == len(editions)
    directory.apply(changes_of(ORGANISATION, TEAM, KEY, version=6))
    assert directory.edition == editions[-1]


def test_a_replacement_forgets_what_is_not_in_it():
    directory = directory_of(ORGANISATION, TEAM, KEY, limit(1, "*"), limit(2, "key:k1"), version=9)
    assert principal(directory) is not None
    directory.replace(changes_of(TEAM, KEY, limit(2, "key:k1"), version=4))
    assert directory.version == 4
    assert directory.tenant("acme") is None
    assert directory.tenant("lab") == TEAM
    assert principal(directory) is None
    assert list(directory.limits_of("*")) == []
    assert [limit.id for limit in directory.limits_of("key:k1")] == ["l2"]


def test_a_key_that_is_revoked_gives_its_scope_to_nobody():
    directory = directory_of(ORGANISATION, ApiKey(id="k", tenant="acme", scopes=(Scope.ADMIN,)))
    assert directory.anyone_with(Scope.ADMIN)
    assert not directory.anyone_with(Scope.METRICS)
    directory.apply(changes_of(ApiKey(id="k", tenant="acme", scopes=(Scope.ADMIN,), revoked=True)))
    assert not directory.anyone_with(Scope.ADMIN)
