"""Grammars as an attacker writes them: each is refused or compiled within the limits of one process."""

from contextlib import suppress

from maitred.admission.grammars.config import GrammarsConfig
from maitred.admission.grammars.validator import GrammarValidator
from maitred.admission.grammars.workers import GrammarWorkers
from maitred.core.errors import InvalidRequest
from maitred.core.grammar import Constraint
from maitred.core.tenancy import ANONYMOUS

PATTERNS = [
    "[ab]*a[ab]{20}&[ab]*b[ab]{19}",
    "~(.*a.{18})&~(.*b.{17})",
    "(.{0,300}a){0,300}b",
    "(?i:" + "a" * 20000 + ")",
    "\\p{L}{0,9999}\\d",
    "(a|b|ab)*c{9}",
    "((((a{9}){9}){9}){9}){9}",
    "(x{0,9}y{0,9}){999}",
    "|".join(f"a{{{n}}}" for n in range(1, 900)),
    "(?:.*1)(?:.*2)(?:.*3).{999}",
]
GRAMMARS = [
    'start: a\na: a a a | "x" |',
    'start: ("a"?)~3000',
    'start: x\nx: "(" x ")" | x x | ""',
    "start: " + "(" * 900 + '"a"' + ")" * 900,
    "start: A{9}\nA: B{99}\nB: /c{99}/",
]
SCHEMAS = [
    {"multipleOf": 49999},
    {"multipleOf": 1e-300},
    {"multipleOf": 49999, "minimum": -(10**15), "maximum": 10**15},
    {"enum": ["x" * 9] * 5000},
    {"type": "array", "minItems": 10**9},
    {"type": "string", "minLength": 10**6},
    {"type": "string", "maxLength": 10**9},
    {"$ref": "#"},
    {"allOf": [{"$ref": "#"}] * 9},
    {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 9}}, "$ref": "#/$defs/a"},
    {"required": [f"k{n}" for n in range(3000)]},
    {"not": {"enum": [f"a{n}" for n in range(2000)]}},
    {"oneOf": [{"properties": {f"a{n}": {"pattern": f"x{{{n}}}"}}} for n in range(40)]},
    {"contains": {"pattern": "a{99}"}, "minContains": 60, "maxContains": 64},
    {"anyOf": [{"pattern": f"^(a|b)*a(a|b){{{n}}}$"} for n in range(60)]},
]


async def test_hostile_grammars_neither_use_up_nor_break_the_process():
    workers = GrammarWorkers(1, GrammarsConfig().compile_s)
    forms = {"regex": PATTERNS, "grammar": GRAMMARS, "json_schema": SCHEMAS}
    async with GrammarValidator(GrammarsConfig(workers=1), workers) as validator:
        await validator.validate(ANONYMOUS, Constraint("regex", "a", "p"))
        (process,) = workers._processes
        for form, contents in forms.items():
            for content in contents:
                with suppress(InvalidRequest):
                    await validator.validate(ANONYMOUS, Constraint(form, content, "p"))
        assert workers._processes == {process}
        assert process.returncode is None
