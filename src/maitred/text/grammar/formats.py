"""Formats of strings in JSON schemas, as regular expressions that match only strings of the format.

The format expressions of llguidance accept slightly too much: February has 29 days in every year, any minute can have a
leap second, and any label of a host name can begin with ``xn--``. If an answer is guaranteed to be valid, the narrower
expressions in this module replace them. The narrower expressions exclude a few valid strings: the encoded names of
internationalised hosts, and leap seconds at times other than those of UTC. Formats that llguidance does not know are
narrowed, too: an internationalised identifier is written as a URI without queries.
"""

from collections.abc import Mapping

import msgspec

_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY_OF_EVERY_YEAR = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = rf"(?:{_YEAR}-{_DAY_OF_EVERY_YEAR}|{_LEAP_YEAR}-02-29)"
_OFFSET = r"(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = (
    rf"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?{_OFFSET}"
    r"|23:59:60(?:\.[0-9]+)?(?:[Zz]|[+-]00:00))"
)
_LETTER = "[A-Za-z0-9]"
_WITHIN = "[A-Za-z0-9-]"
_LABEL = (
    rf"{_LETTER}(?:{_WITHIN}{{0,2}}{_LETTER}|{_WITHIN}(?:{_LETTER}{_WITHIN}|-{_LETTER}){_WITHIN}{{0,58}}{_LETTER})?"
)


class NarrowedFormat(msgspec.Struct, frozen=True):
    """Format of a string as a regular expression.

    Attributes:
        pattern: Expression that the whole string matches.
        most_characters: Maximum length of the string in characters, or None if it is unlimited.
    """

    pattern: str
    most_characters: int | None = None


_URI = r"[A-Za-z][A-Za-z0-9+.-]*://[A-Za-z0-9.-]+(?::[0-9]{1,5})?(?:/[A-Za-z0-9._~!$&()*+,;=:@-]*)*"
_TEMPLATE_LITERAL = "[A-Za-z0-9:/?#@!$&()*+,;=._~-]"
_TEMPLATE_EXPRESSION = r"\{[+#./;?&]?[A-Za-z0-9_]+(?:,[A-Za-z0-9_]+)*\}"

_PATH = r"(?:/[A-Za-z0-9._~!$&()*+,;=@-]*)*"
_REFERENCE = rf"(?:{_URI}|/?[A-Za-z0-9._~-]+{_PATH}(?:\?[A-Za-z0-9._~&=/-]*)?(?:#[A-Za-z0-9._~/-]*)?)"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"
_MAILBOX = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,16}(?:\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,15}){0,3}"

NARROWED: Mapping[str, NarrowedFormat] = {
    "iri": NarrowedFormat(f"^{_URI}$"),
    "uri-template": NarrowedFormat(f"^(?:{_TEMPLATE_LITERAL}|{_TEMPLATE_EXPRESSION})*$"),
    "date": NarrowedFormat(f"^{_DATE}$"),
    "time": NarrowedFormat(f"^{_TIME}$"),
    "date-time": NarrowedFormat(f"^{_DATE}[Tt]{_TIME}$"),
    "hostname": NarrowedFormat(f"^{_HOSTNAME}$", 253),
    "idn-hostname": NarrowedFormat(f"^{_HOSTNAME}$", 253),
    "idn-email": NarrowedFormat(f"^{_MAILBOX}@{_HOSTNAME}$", 254),
    "uri-reference": NarrowedFormat(f"^{_REFERENCE}$"),
    "iri-reference": NarrowedFormat(f"^{_REFERENCE}$"),
    "json-pointer": NarrowedFormat(f"^{_POINTER}$"),
    "relative-json-pointer": NarrowedFormat(f"^(?:0|[1-9][0-9]{{0,8}})(?:#|{_POINTER})$"),
}
DEFINED = frozenset(
    {
        *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
        *("uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer"),
        *("relative-json-pointer", "regex"),
    }
)
"""Formats that JSON Schema defines.

Any other format is an annotation without effect (2020-12, Validation, 7.2.3).
"""
