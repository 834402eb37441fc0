"""Page for browsers that shows the API: each operation with its parameters, and each schema with its fields.

It is made from the OpenAPI document alone, needs no script, and fetches nothing.
"""

import hashlib
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
:root { color-scheme: light dark }
summary { cursor: pointer; padding: .3rem 0 } table { border-collapse: collapse; margin: .5rem 0 1rem }
td, th { text-align: left; vertical-align: top; padding: .2rem 1rem .2rem 0 } code { font-size: 14px }
.method { display: inline-block; width: 4.5rem; font-weight: 600 } .note { opacity: .75 }
"""
_DIGEST = b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
CONTENT_SECURITY_POLICY = f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; frame-ancestors 'none'"
"""Policy of the page: a browser runs nothing and fetches nothing for it."""
_REF = "#/components/schemas/"


def render(document: Mapping[str, Any]) -> bytes:
    """Returns the page in HTML.

    Args:
        document: The OpenAPI document.
    """
    title = escape(f"{document['info']['title']} {document['info']['version']}: API")
    operations = [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    schemas = document["components"]["schemas"]
    body = "".join(
        [
            f"<h1>{title}</h1><p>The same as <a href='/openapi.json'>/openapi.json</a>, for programs.</p>",
            "<h2>Operations</h2>",
            *(_operation(*operation) for operation in operations),
            "<h2>Schemas</h2>",
            *(_schema(name, schemas[name]) for name in sorted(schemas)),
        ]
    )
    head = f"<meta charset='utf-8'><meta name='viewport' content='width=device-width'><title>{title}</title>"
    return f"<!doctype html><html lang='en'>{head}<style>{_STYLE}</style><body>{body}</body></html>".encode()


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    summary = f"<span class='method'>{method}</span> <code>{escape(path)}</code> {escape(operation.get('summary', ''))}"
    parameters = _table(
        (entry["name"], f"{_type_of(entry.get('schema', {}))}, {escape(entry['in'])}", entry.get("description", ""))
        for entry in operation.get("parameters", ())
    )
    bodies = [("Request", operation.get("requestBody", {}))]
    bodies += [(f"Response {status}", response) for status, response in operation.get("responses", {}).items()]
    rows = [
        f"<p>{escape(name)}: {' or '.join(_contents(body))} {escape(body.get('description', ''))}</p>"
        for name, body in bodies
        if body
    ]
    return f"<details><summary>{summary}</summary>{parameters}{''.join(rows)}</details>"


def _contents(body: Mapping[str, Any]) -> Iterator[str]:
    for content_type, content in body.get("content", {}).items():
        yield f"{_type_of(content.get('schema', {}))} <span class='note'>({escape(content_type)})</span>"


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    fields = _table(
        (field, _type_of(about) + (", required" if field in required else ""), about.get("description", ""))
        for field, about in schema.get("properties", {}).items()
        if isinstance(about, dict)
    )
    described = escape(schema.get("description", "")) or _type_of(schema)
    heading = f"<summary><code>{escape(name)}</code></summary>"
    return f"<details id='{escape(name)}'>{heading}<p>{described}</p>{fields}</details>"


def _table(rows: Iterable[tuple[str, str, str]]) -> str:
    lines = [f"<tr><td><code>{escape(name)}</code><td>{about}<td>{escape(text)}" for name, about, text in rows]
    return f"<table>{''.join(lines)}</table>" if lines else ""


def _type_of(schema: Mapping[str, Any]) -> str:
    """Returns the type of a value in words, with links to schemas."""
    match schema:
        case {"$ref": str() as ref}:
            name = escape(ref.removeprefix(_REF))
            return f"<a href='#{name}'>{name}</a>"
        case {"anyOf": [*forms]} | {"oneOf": [*forms]}:
            return " or ".join(dict.fromkeys(map(_type_of, forms)))
        case {"enum": [*values]}:
            return " | ".join(f"<code>{escape(str(value))}</code>" for value in values)
        case {"const": value}:
            return f"<code>{escape(str(value))}</code>"
        case {"type": "array", "items": dict() as items}:
            return f"list of {_type_of(items)}"
        case {"type": str() as kind}:
            return escape(kind)
        case {"type": [*kinds]}:
            return " or ".join(escape(str(kind)) for kind in kinds)
    return "any"
