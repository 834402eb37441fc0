"""Tokens checked with keys that a real server publishes."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from maitred.core.clock import SystemClock
from maitred.core.errors import Unauthenticated, Unavailable
from maitred.core.tenancy import ANONYMOUS, DirectoryChanges, Scope, Tenant, require
from maitred.identity.config import OidcConfig
from maitred.identity.directory import Directory
from maitred.identity.identity import Identity
from maitred.identity.providers import token_issuers
from tests.support.clock import LaterClock
from tests.support.servers.identity_provider import Provider, jwk


class Server:
    """Publishes a provider's keys; `status` is what it answers with."""

    def __init__(self):
        self.provider = Provider(now_s=SystemClock().wall_s())
        self.asked = []
        self.status = 200
        self.body = None
        self._runner = None
        self._port = 0

    async def start(self):
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self.provider.issuer = f"http://127.0.0.1:{self._port}"

    async def stop(self):
        await self._runner.cleanup()

    async def _answer(self, request):
        self.asked.append(request.path)
        if self.status in (301, 302):
            return web.Response(status=self.status, headers={"location": "/elsewhere"})
        if self.status != 200:
            return web.Response(status=self.status, body=self.provider.key_set)
        if self.body is not None:
            return web.Response(body=self.body)
        discovery = request.path.endswith("openid-configuration")
        return web.Response(body=self.provider.discovery if discovery else self.provider.key_set)


@pytest.fixture
async def server():
    server = Server()
    await server.start()
    yield server
    await server.stop()


@asynccontextmanager
async def identity(server, *, anonymous=None, clock=None, **settings):
    directory = Directory()
    directory.apply(DirectoryChanges(1, [Tenant(id="acme")]))
    config = OidcConfig(issuer=server.provider.issuer, audience="maitred", **settings)
    async with token_issuers({"idp": config}, directory, clock or SystemClock()) as issuers:
        identity = Identity(directory, SystemClock(), issuers=issuers, anonymous=anonymous)
        yield lambda token: identity.identify({b"authorization": f"Bearer {token}"}.get)


async def test_a_token_is_a_key(server):
    async with identity(server) as who:
        for signer in ("r1", "e1", "r1"):
            principal = await who(server.provider.token(signer, scope="maitred:admin maitred:inference"))
            assert principal.subjects == ("key:idp:ann", "tenant:acme", "*")
            require(principal, Scope.ADMIN)
    assert server.asked == ["/.well-known/openid-configuration", "/keys"]


async def test_forgeries_are_refused_also_where_the_anonymous_may_come(server):
    async with identity(server, anonymous=ANONYMOUS) as who:
        good = server.provider.token()
        for forged in (
            server.provider.unsigned(),
            server.provider.signed_with_the_public_key(),
            server.provider.token("r2", kid="r1"),
            server.provider.token(aud="other"),
            server.provider.token(exp=server.provider.now_s - 100),
            good[:-8],
        ):
            with pytest.raises(Unauthenticated):
                await who(forged)
        assert await who("none") is ANONYMOUS
        assert await who(Provider("https://elsewhere.example").token()) is ANONYMOUS
        assert (await who(good)).key == "idp:ann"


async def test_keys_rotate_while_requests_go_on(server):
    clock = LaterClock()
    async with identity(server, clock=clock, keys_refetch_s=60.0) as who:
        old = server.provider.token()
        await who(old)
        server.provider.published = [jwk("r2")]
        await who(old)
        clock.passed_s += 61.0
        assert (await who(server.provider.token("r2"))).key == "idp:ann"
        with pytest.raises(Unauthenticated):
            await who(old)


async def test_a_flood_of_unknown_keys_asks_the_provider_no_more_often(server):
    async with identity(server, keys_refetch_s=60.0) as who:
        tokens = [server.provider.token("r2", kid=f"k{number}") for number in range(200)]
        answers = await asyncio.gather(*map(who, tokens), return_exceptions=True)
        assert {type(answer) for answer in answers} == {Unauthenticated}
        assert server.asked.count("/keys") == 1
        await who(server.provider.token())


async def test_a_provider_that_is_away_is_missed_only_when_its_keys_are_too_old(server):
    settings = {"keys_ttl_s": 500.0, "keys_refetch_s": 200.0, "keys_max_stale_s": 5000.0}
    clock = LaterClock()
    async with identity(server, clock=clock, **settings) as who:
        token = server.provider.token()
        await who(token)
        await server.stop()
        for _ in range(3):
            clock.passed_s += 600.0
            await who(token)
        clock.passed_s += 5000.0
        with pytest.raises(Unavailable):
            await who(token)
        await server.start()
        clock.passed_s += 300.0
        await who(token)


@pytest.mark.parametrize("status", [301, 302, 404, 500, 503])
async def test_only_a_plain_answer_counts(server, status):
    server.status = status
    async with identity(server) as who:
        with pytest.raises(Unavailable):
            await who(server.provider.token())
    assert "/elsewhere" not in server.asked


async def test_an_answer_without_end_is_not_read(server):
    server.body = server.provider.key_set + b" " * (1 << 20)
    async with identity(server, jwks_url=f"{server.provider.issuer}/keys") as who:
        with pytest.raises(Unavailable):
            await who(server.provider.token())


async def test_nobody_listens(server):
    await server.stop()
    async with identity(server) as who:
        with pytest.raises(Unavailable):
            await who(server.provider.token())
    await server.start()
