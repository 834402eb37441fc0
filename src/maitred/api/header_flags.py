"""Headers that say yes or no."""

from maitred.api.headers import Headers
from maitred.core.errors import InvalidRequest
from maitred.wire.openai.faults import shown

_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def wish_in(header: Headers, name: str) -> bool | None:
    """What the header says; None where it is not there.

    Raises:
        InvalidRequest: It says neither yes nor no.
    """
    return None if header(name.encode()) is None else flag_in(header, name)


def flag_in(header: Headers, name: str) -> bool:
    """Whether the header says yes; one that is not there says no.

    Raises:
        InvalidRequest: It says neither.
    """
    value = header(name.encode())
    if value is None:
        return False
    flag = _FLAGS.get(value.strip().lower())
    if flag is None:
        raise InvalidRequest(f"{name} must be true or false; got {shown(value)}.", param=name)
    return flag
