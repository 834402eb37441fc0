"""Cost of a grammar as far as its text tells it: what is certainly too much is refused before it is compiled.

llguidance builds the states of an expression as they are reached. It reaches all states of a text that must come at
once, and of a divisor of numbers; `a{1000}{1000}` and a `multipleOf` of a large prime take seconds for their first
token. Both follow from the text: the longest run of characters that can only come one way, and the number of states of
an automaton for divisibility (Alexeev, "Minimal DFA for testing divisibility", 2004).
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from maitred.core.grammar import Grammar
from maitred.text.grammar.bounds import is_number
from maitred.text.grammar.language import MAX_FORCED_BYTES

_MAX_DIVISOR_STATES = 50_000
_MAX_DIVISOR = 10**18
_COSTLY_DIVISOR = 999_999_999_989
"""A prime, in place of any divisor above the largest."""
_MAX_DIVISORS = 16
_MAX_READ = 1e300
_ANY_NUMBER = frozenset((Fraction(1),))
_MAX_INDEX_DIGITS = 7
_MAX_KNOWN_CHARACTERS = 64
_QUANTIFIER = re.compile(r"([?*+]|\{(\d{1,9})(?:(,)(\d{0,9}))?\})[?+]?")
_ESCAPE = re.compile(
    r"\\(?:x\{[0-9A-Fa-f]+\}|x[0-9A-Fa-f]{2}|u\{[0-9A-Fa-f]+\}|u[0-9A-Fa-f]{4}|[pP](?:\{[^}]*\}|.)|.)", re.DOTALL
)
_CLASS = re.compile(r"\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]", re.DOTALL)
_GROUP = re.compile(r"\((?:\?(?:P?<\w+>|[a-zA-Z-]*:|[a-zA-Z-]+\)))?")
_LARK_STRING = re.compile(r'"((?:\\.|[^"\\])*)"(i?)')
_LARK_REGEX = re.compile(r"/((?:\\.|[^/\\])+)/([a-z]*)")
_LARK_TERMINAL = re.compile(r"^([A-Z_][A-Z0-9_]*)(?:\.-?\d+)?\s*:(.*(?:\n\s*\|.*)*)", re.MULTILINE)
_LARK_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")


@dataclass(frozen=True, slots=True)
class _Run:
    """Characters of an expression that can only come one way, in numbers.

    Attributes:
        head: Those at its start.
        tail: Those at its end.
        longest: Longest number of them in a row.
        whole: Whether there are no others.
        text: The characters, if they are the whole expression and few.
    """

    head: int = 0
    tail: int = 0
    longest: int = 0
    whole: bool = False
    text: str | None = None


_EMPTY, _FREE = _Run(whole=True, text=""), _Run()


def _run_of_text(text: str) -> _Run:
    """Returns the run of a text; which characters it has is not known of one with escapes."""
    length = len(re.sub(r"\\(?:u\w{4}|x\w\w|.)", "?", text))
    known = length == len(text) and length <= _MAX_KNOWN_CHARACTERS
    return _Run(length, length, length, whole=True, text=text if known else None)


def _sequence(left: _Run, right: _Run) -> _Run:
    text = None
    if left.text is not None and right.text is not None and len(left.text + right.text) <= _MAX_KNOWN_CHARACTERS:
        text = left.text + right.text
    return _Run(
        left.head + right.head if left.whole else left.head,
        left.tail + right.tail if right.whole else right.tail,
        max(left.longest, right.longest, left.tail + right.head),
        whole=left.whole and right.whole,
        text=text,
    )


def _alternatives(options: list[_Run]) -> _Run:
    first = options[0]
    if len(options) == 1 or (first.text is not None and all(option.text == first.text for option in options)):
        return first
    return _Run(longest=max(option.longest for option in options))


def _repetition(run: _Run, least: int, most: int | None) -> _Run:
    if least == 0:
        return _Run(longest=run.longest)
    exact = most == least
    if not run.whole:
        longest = max(run.longest, run.tail + run.head if most != 1 else 0)
        return _Run(run.head, run.tail if exact else 0, longest)
    length = run.head * least
    text = run.text * least if exact and run.text is not None and length <= _MAX_KNOWN_CHARACTERS else None
    return _Run(length, length if exact else 0, length, whole=exact, text=text)


def longest_forced_run(pattern: str) -> int:
    """Returns the number of characters that a regular expression demands in a row, at least; 0 if that is unknown."""
    if re.search(r"\(\?[a-zA-Z]*[ix]", pattern):
        return 0
    run, end = _parse(pattern, 0, _regex_atom)
    return run.longest if end == len(pattern) else 0


def longest_forced_run_of_lark(grammar: str) -> int:
    """Returns the number of characters that the terminals of a Lark grammar demand in a row, at least."""
    bodies = {found[1]: found[2] for found in _LARK_TERMINAL.finditer(grammar)}
    runs: dict[str, _Run] = {}

    def terminal(name: str) -> _Run:
        if name not in runs:
            runs[name] = _FREE  # as long as it is being read: one that refers to itself
            body = bodies.get(name, "")
            runs[name] = _parse(body, 0, lark_atom)[0]
        return runs[name]

    def lark_atom(body: str, place: int) -> tuple[_Run, int]:
        if found := _LARK_STRING.match(body, place):
            return (_FREE if found[2] else _run_of_text(found[1])), found.end()
        if found := _LARK_REGEX.match(body, place):
            return (_FREE if found[2] else _parse(found[1], 0, _regex_atom)[0]), found.end()
        if found := _LARK_NAME.match(body, place):
            return (terminal(found[0]) if found[0] in bodies else _FREE), found.end()
        return (_EMPTY if body[place].isspace() else _FREE), place + 1

    regexes = (longest_forced_run(found[1]) for found in _LARK_REGEX.finditer(grammar) if not found[2])
    return max((*(terminal(name).longest for name in bodies), *regexes), default=0)


def _parse(text: str, place: int, atom: Callable[[str, int], tuple[_Run, int]]) -> tuple[_Run, int]:
    """Reads alternatives up to the end of the text or of their group; returns their run and where they end."""
    options, run = [], _EMPTY
    while place < len(text) and text[place] != ")":
        if text[place] == "|":
            options.append(run)
            run, place = _EMPTY, place + 1
            continue
        if group := _GROUP.match(text, place):
            inner, place = (_EMPTY, group.end()) if group[0].endswith(")") else _group(text, group.end(), atom)
        else:
            inner, place = atom(text, place)
        while quantifier := _QUANTIFIER.match(text, place):
            inner, place = _repetition(inner, *_counts(quantifier)), quantifier.end()
        run = _sequence(run, inner)
    return _alternatives([*options, run]), place


def _group(text: str, place: int, atom: Callable[[str, int], tuple[_Run, int]]) -> tuple[_Run, int]:
    run, end = _parse(text, place, atom)
    return run, end + 1


def _counts(quantifier: re.Match[str]) -> tuple[int, int | None]:
    match quantifier[1]:
        case "?":
            return 0, 1
        case "*":
            return 0, None
        case "+":
            return 1, None
        case _:
            least = int(quantifier[2])
            return least, least if quantifier[3] is None else int(quantifier[4]) if quantifier[4] else None


def _regex_atom(pattern: str, place: int) -> tuple[_Run, int]:
    if found := _ESCAPE.match(pattern, place):
        kind = found[0][1]
        if kind in "bBAzZ":
            return _EMPTY, found.end()
        fixed = kind in "xutnrfv0" or not kind.isalnum()
        return (_Run(1, 1, 1, whole=True) if fixed else _FREE), found.end()
    if found := _CLASS.match(pattern, place):
        inner = found[0][1:-1]
        return (_run_of_text(inner) if len(inner) == 1 and inner not in "^\\" else _FREE), found.end()
    character = pattern[place]
    if character in "^$":
        return _EMPTY, place + 1
    return (_FREE if character == "." else _run_of_text(character)), place + 1


def divisor_states(divisor: Fraction) -> int:
    """Returns the number of states of an automaton that reads digits and tells whether a number is divisible."""
    whole = divisor.numerator
    states: int = min(
        whole // math.gcd(whole, 10**digits) + (10**digits - 1) // 9 for digits in range(len(str(whole)) + 1)
    )
    return states


def is_costly(keyword: str, value: object) -> bool:
    """Returns whether a keyword of a schema takes too much by itself."""
    if keyword == "pattern" and isinstance(value, str):
        return longest_forced_run(value) > MAX_FORCED_BYTES
    return keyword == "multipleOf" and is_number(value) and value > 0 and is_costly_divisor([Fraction(repr(value))])


def is_costly_divisor(divisors: Iterable[Fraction]) -> bool:
    """Returns whether it takes too much to write a number that one of some divisors divides."""
    return any(divisor_states(divisor) > _MAX_DIVISOR_STATES for divisor in divisors)


class CommonDivisor:
    """Common divisor of the numbers that follow a schema of one document and all that holds beside it.

    Args:
        root: The document, whose local references are followed.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[int, frozenset[Fraction]] = {}

    def of(self, schema: object) -> frozenset[Fraction]:
        """Returns what each `multipleOf` that may hold together has as its least common multiple."""
        if not isinstance(schema, dict):
            return _ANY_NUMBER
        if (known := self._known.get(id(schema))) is not None:
            return known
        self._known[id(schema)] = _ANY_NUMBER  # as long as it is read: one that refers to itself
        value = schema.get("multipleOf")
        divisors = frozenset((Fraction(repr(value)),)) if is_number(value) and 0 < value < _MAX_READ else _ANY_NUMBER
        parts = schema.get("allOf")
        for part in [*(parts if isinstance(parts, list) else ()), self._target(schema.get("$ref"))]:
            divisors = _products(divisors, self.of(part))
        alternatives = [schema[keyword] for keyword in ("anyOf", "oneOf") if isinstance(schema.get(keyword), list)]
        alternatives += [[schema[keyword] for keyword in ("then", "else") if keyword in schema]]
        for options in alternatives:
            if options:
                divisors = _products(divisors, frozenset[Fraction]().union(*map(self.of, options)))
        self._known[id(schema)] = divisors
        return divisors

    def _target(self, reference: object) -> object:
        """Returns the schema of a local reference; None: there is none."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        target: object = self._root
        for part in unquote(reference.removeprefix("#")).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name.isdecimal() and len(name) < _MAX_INDEX_DIGITS:
                target = dict(enumerate(target)).get(int(name))
            else:
                target = target.get(name) if isinstance(target, dict) else None
        return target


def _products(left: frozenset[Fraction], right: frozenset[Fraction]) -> frozenset[Fraction]:
    """Returns the least common multiples of divisors of two sets: of many, those that cost most."""
    if right == _ANY_NUMBER:
        return left
    common = {
        Fraction(math.lcm(one.numerator, other.numerator), math.gcd(one.denominator, other.denominator))
        for one in left
        for other in right
    }
    # Beyond the limit, a divisor is only ever refused; its size is cut so that a chain of them stays cheap.
    common = {divisor if divisor.numerator < _MAX_DIVISOR else Fraction(_COSTLY_DIVISOR) for divisor in common}
    return frozenset(sorted(common, key=divisor_states)[-_MAX_DIVISORS:])


def least_states(grammar: Grammar) -> int:
    """Returns the number of states that a grammar reaches before its first token, as far as its text tells it."""
    match grammar.kind:
        case "regex":
            return longest_forced_run(grammar.text)
        case "lark":
            return longest_forced_run_of_lark(grammar.text)
        case "json_schema":
            return _states_of_schema(json.loads(grammar.text))


def _states_of_schema(schema: object) -> int:
    states, inner = 0, [schema]
    while inner:
        match inner.pop():
            case dict() as keywords:
                inner += keywords.values()
                for name, value in keywords.items():
                    if name == "pattern" and isinstance(value, str):
                        states += longest_forced_run(value)
                    elif name == "multipleOf" and is_number(value) and value > 0:
                        states += divisor_states(Fraction(repr(value)))
            case list() as several:
                inner += several
    return states
