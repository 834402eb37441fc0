"""Address of an engine as one string: ``unix:/run/engine.sock`` or ``tcp:127.0.0.1:9000``.

Both ends of the engine protocol read the same string, from the command line or from the configuration. An IPv6 host is
written in brackets: ``tcp:[::1]:9000``. Port 0 is valid only for the listening end: the system chooses a free port. The
URL forms ``unix:///run/engine.sock`` and ``tcp://127.0.0.1:9000`` are the same addresses.
"""

import msgspec

from maitred.core.errors import ConfigInvalid

MAX_UNIX_PATH_BYTES = 107
"""Longest path in `sockaddr_un` on Linux, without the closing zero byte."""


class UnixAddress(msgspec.Struct, frozen=True):
    """Address of a socket in the file system."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


class TcpAddress(msgspec.Struct, frozen=True):
    """Address of a host, by name or number, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"


Address = UnixAddress | TcpAddress


def parse_address(text: str) -> Address:
    """Parses an address; `str()` of the result gives its shorter form.

    Raises:
        ConfigInvalid: The text is neither ``unix:/path`` nor ``tcp:host:port``, or the system would not accept it.
    """
    scheme, _, rest = text.partition(":")
    if rest.startswith("///" if scheme == "unix" else "//"):
        rest = rest[2:]
    if scheme == "unix":
        return _parse_unix(text, rest)
    if scheme == "tcp":
        return _parse_tcp(text, rest)
    raise ConfigInvalid(f"{text!r} is not an engine address. Write unix:/path/to/socket or tcp:host:port.")


def parse_tcp(text: str) -> TcpAddress:
    """Parses ``host:port``, or the same with ``tcp:`` before it.

    Raises:
        ConfigInvalid: The text is neither.
    """
    address = parse_address(text if text.startswith("tcp:") else f"tcp:{text}")
    assert isinstance(address, TcpAddress)
    return address


def _parse_unix(text: str, path: str) -> UnixAddress:
    if not path.startswith("/") or "\0" in path:
        raise ConfigInvalid(f"The address {text!r} needs an absolute path, such as unix:/run/maitred/engine.sock.")
    length_bytes = len(path.encode())
    if length_bytes > MAX_UNIX_PATH_BYTES:
        raise ConfigInvalid(
            f"The socket path in {text!r} has {length_bytes} bytes and the system takes {MAX_UNIX_PATH_BYTES}. "
            "Choose a shorter folder."
        )
    return UnixAddress(path)


def _parse_tcp(text: str, rest: str) -> TcpAddress:
    host, _, port = rest.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigInvalid(f"The address {text!r} has a host with colons. Put it in brackets, as in tcp:[::1]:9000.")
    if not host:
        raise ConfigInvalid(f"The address {text!r} needs a host and a port, such as tcp:127.0.0.1:9000.")
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise ConfigInvalid(f"{host!r} in {text!r} cannot be the name of a host: {error}.") from None
    if not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise ConfigInvalid(f"The port in {text!r} must be a number from 0 to 65535.")
    return TcpAddress(host, int(port))
