"""An identity provider for tests: makes keys, signs tokens, and publishes what its tokens are checked with."""

import base64
import hashlib
import hmac
import json

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

_RSA = {name: rsa.generate_private_key(public_exponent=65537, key_size=2048) for name in ("r1", "r2")}
KEYS = {
    **_RSA,
    "e1": ec.generate_private_key(ec.SECP256R1()),
    "e2": ec.generate_private_key(ec.SECP384R1()),
    "d1": ed25519.Ed25519PrivateKey.generate(),
    "weak": rsa.generate_private_key(public_exponent=65537, key_size=1024),
}
_ALGORITHMS = {"r": "RS256", "e1": "ES256", "e2": "ES384", "d": "EdDSA"}


def jwk(key, /, **fields):
    """The public half of a key, as it is published."""
    public = KEYS[key].public_key()
    kinds = {"r": jwt.algorithms.RSAAlgorithm, "w": jwt.algorithms.RSAAlgorithm, "e": jwt.algorithms.ECAlgorithm}
    kind = kinds.get(key[0], jwt.algorithms.OKPAlgorithm)
    return {**kind.to_jwk(public, as_dict=True), "kid": key, **fields}


class Provider:
    """Signs tokens; `published` is what it shows of its keys.

    Args:
        issuer: What it calls itself.
        now_s: When it signs; its tokens hold for a minute.
    """

    def __init__(self, issuer="https://idp.example", now_s=1_000_000.0):
        self.issuer = issuer
        self.now_s = now_s
        self.published = [jwk("r1"), jwk("e1")]

    @property
    def key_set(self):
        return json.dumps({"keys": self.published}).encode()

    @property
    def discovery(self):
        return json.dumps({"issuer": self.issuer, "jwks_uri": f"{self.issuer}/keys", "other": [1]}).encode()

    def claims(self, **changes):
        base = {"iss": self.issuer, "aud": "maitred", "sub": "ann", "exp": self.now_s + 60, "tenant": "acme"}
        return {name: value for name, value in {**base, **changes}.items() if value is not None}

    def token(self, signer="r1", *, kid="", algorithm=None, headers=None, **changes):
        """A token; `kid` is what it says of its key (None: nothing), by default the truth."""
        algorithm = algorithm or next(name for start, name in _ALGORITHMS.items() if signer.startswith(start))
        kid = signer if kid == "" else kid
        extra = {**({} if kid is None else {"kid": kid}), **(headers or {})}
        return jwt.encode(self.claims(**changes), KEYS[signer], algorithm=algorithm, headers=extra)

    def unsigned(self, **changes):
        return _joined({"alg": "none", "kid": "r1"}, self.claims(**changes), b"")

    def signed_with_the_public_key(self, **changes):
        """The classic forgery: the key that everybody may read, used as an HMAC's secret."""
        pem = KEYS["r1"].public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        return _joined({"alg": "HS256", "kid": "r1"}, self.claims(**changes), pem)


def _joined(header, claims, secret):
    body = ".".join(_encoded(json.dumps(part).encode()) for part in (header, claims))
    return f"{body}.{_encoded(hmac.new(secret, body.encode(), hashlib.sha256).digest()) if secret else ''}"


def _encoded(raw):
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
