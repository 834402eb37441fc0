"""Who is known by the same headers as before is whoever would be found by looking at the credential again."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.errors import Unauthenticated
from maitred.core.tenancy import ANONYMOUS, ApiKey, DirectoryChanges, KeySecret, Scope, Tenant
from maitred.identity.directory import Directory
from maitred.identity.identity import Identity
from maitred.identity.keys import make_key
from tests.support.clock import FakeClock

KEYS = [make_key(), make_key()]
OTHER = KeySecret(b"\0" * 32)

ends_s = st.sampled_from([None, None, None, 2.0, 5.0])


@st.composite
def changes(draw):
    """A key or a tenant as it is from now on, one that is gone, or time that passes."""
    made = draw(st.sampled_from(KEYS))
    match draw(st.sampled_from(["key", "key", "tenant", "gone", "time", "nothing"])):
        case "key":
            own = KeySecret(made.secret.sha256, draw(ends_s))
            secrets = draw(st.sampled_from([(own,), (own,), (own, OTHER), (OTHER,)]))
            scopes = draw(st.sampled_from([(Scope.INFERENCE,), (Scope.INFERENCE, Scope.METRICS)]))
            revoked, tenant = draw(st.booleans()), draw(st.sampled_from(["acme", "lab"]))
            key = ApiKey(
                id=made.public_id,
                tenant=tenant,
                secrets=secrets,
                scopes=scopes,
                expires_s=draw(ends_s),
                revoked=revoked,
            )
            return {"keys": [key]}
        case "tenant":
            name = draw(st.sampled_from(["acme", "lab"]))
            parent = "acme" if name == "lab" else None
            return {"tenants": [Tenant(id=name, parent=parent, disabled=draw(st.booleans()))]}
        case "gone":
            return draw(st.sampled_from([{"deleted_keys": [made.public_id]}, {"deleted_tenants": ["lab"]}]))
        case "time":
            return 1.5
        case _:
            return {}


@given(st.lists(changes(), max_size=20))
@settings(max_examples=100, deadline=None)
def test_who_stands_would_be_found_again(history):
    clock, directory = FakeClock(now_s=0.0), Directory()
    identity = Identity(directory, clock, anonymous=ANONYMOUS)
    directory.apply(DirectoryChanges(1, [Tenant(id="acme"), Tenant(id="lab", parent="acme")], []))
    headers = [{b"authorization": f"Bearer {made.plaintext}"}.get for made in KEYS]
    known = {}
    for version, change in enumerate(history, 2):
        if isinstance(change, float):
            clock.now_s += change
        else:
            directory.apply(DirectoryChanges(version, **{"tenants": [], "keys": [], **change}))
        for place, header in enumerate(headers):
            before = known.get(place)
            stands = before is not None and identity.is_still_valid(before, header)
            try:
                known[place] = asyncio.run(identity.identify(header))
            except Unauthenticated:
                known[place] = None
            assert not stands or known[place] is before
