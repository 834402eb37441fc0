import msgspec
import pytest

from maitred.core.errors import Forbidden, Unauthenticated
from maitred.core.tenancy import ANONYMOUS, Principal, Scope, require

CALLER = Principal(key="k", tenants=("acme",), scopes=frozenset({Scope.INFERENCE}))


def test_who_has_the_scope_passes():
    require(CALLER, Scope.INFERENCE)
    require(ANONYMOUS, Scope.INFERENCE)
    require(ANONYMOUS, Scope.METRICS)


def test_an_administrator_may_read_metrics_and_a_reader_of_metrics_may_not_administer():
    require(msgspec.structs.replace(CALLER, scopes=frozenset({Scope.ADMIN})), Scope.METRICS)
    with pytest.raises(Forbidden, match="`admin`"):
        require(msgspec.structs.replace(CALLER, scopes=frozenset({Scope.METRICS})), Scope.ADMIN)


def test_a_scope_that_is_missing_is_named():
    with pytest.raises(Forbidden, match="`admin`"):
        require(CALLER, Scope.ADMIN)


def test_who_sent_no_key_is_asked_for_one():
    with pytest.raises(Unauthenticated, match="scope `admin`"):
        require(ANONYMOUS, Scope.ADMIN)
