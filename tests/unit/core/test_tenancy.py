import pytest

from maitred.core.errors import Forbidden, Unauthenticated
from maitred.core.tenancy import ANONYMOUS, Principal, Scope, require

HOLDER = Principal(key="k", tenants=("acme",), scopes=frozenset({Scope.INFERENCE}))


def test_who_has_the_scope_passes():
    require(HOLDER, Scope.INFERENCE)
    require(ANONYMOUS, Scope.INFERENCE)
    require(ANONYMOUS, Scope.METRICS)


def test_a_scope_that_is_missing_is_named():
    with pytest.raises(Forbidden, match="`admin`"):
        require(HOLDER, Scope.ADMIN)


def test_who_sent_no_key_is_asked_for_one():
    with pytest.raises(Unauthenticated, match="scope `admin`"):
        require(ANONYMOUS, Scope.ADMIN)
