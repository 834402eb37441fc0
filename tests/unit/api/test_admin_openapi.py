"""The description of the administration."""

import json
from pathlib import Path

from jsonschema import Draft202012Validator

from maitred.api.admin.directory_admin import DirectoryAdmin
from maitred.api.admin.routes import admin_routes
from maitred.api.openapi import describe
from maitred.core.clock import SystemClock
from maitred.core.tenancy import Scope

ROUTES = admin_routes(DirectoryAdmin(None, None, SystemClock(), None), *[None] * 11)
API = json.loads(describe(ROUTES))
OPERATIONS = {
    f"{method.upper()} {path}": operation
    for path, methods in API["paths"].items()
    for method, operation in methods.items()
}


def schema_of(operation, place):
    """The schema of a request's or an answer's body, with what it refers to."""
    content = operation["requestBody"] if place == "request" else operation["responses"]["200"]
    return {**content["content"]["application/json"]["schema"], "components": API["components"]}


def test_every_operation_is_described_once():
    assert len(OPERATIONS) == len(ROUTES) == 62
    assert len({operation["operationId"] for operation in OPERATIONS.values()}) == 62
    assert {route.path: route.needs for route in ROUTES if route.needs is not Scope.ADMIN} == {
        "/admin/v1/live": Scope.METRICS
    }


def test_schemas_keep_the_names_that_generated_clients_know():
    """Structs may be renamed; `maitred.api.openapi` maps them to the names that were published."""
    published = (Path(__file__).parents[2] / "data" / "openapi_schemas.txt").read_text(encoding="utf-8").split()
    assert sorted(API["components"]["schemas"].keys() - set(published)) == []


def test_all_schemas_are_schemas():
    for schema in API["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    for operation in OPERATIONS.values():
        Draft202012Validator(schema_of(operation, "answer")).is_valid({})
        for parameter in operation.get("parameters", ()):
            Draft202012Validator.check_schema(parameter["schema"])


def test_paths_and_their_parameters_agree():
    for name, operation in OPERATIONS.items():
        in_path = [parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "path"]
        assert in_path == (["id"] if "{id}" in name else [])


def test_query_parameters_are_described_one_by_one():
    parameters = {parameter["name"]: parameter for parameter in OPERATIONS["GET /admin/v1/usage"]["parameters"]}
    assert set(parameters) == {
        *(
            "group_by",
            "start",
            "end",
            "organisation",
            "tenant",
            "key",
            "model",
            "rollout",
            "outcome",
            "cache",
            "format",
            "after",
            "limit",
        )
    }
    assert parameters["limit"]["schema"] == {"type": "integer", "default": 100, "minimum": 1, "maximum": 500}
    assert "commas" in parameters["group_by"]["description"]
    assert not any(parameter["required"] for parameter in parameters.values())
    assert not any("Query" in name for name in API["components"]["schemas"])


def test_who_makes_something_can_send_an_idempotency_key():
    taking = {
        name
        for name, operation in OPERATIONS.items()
        if any(parameter["name"] == "Idempotency-Key" for parameter in operation.get("parameters", ()))
    }
    assert taking == {
        "POST /admin/v1/tenants",
        "POST /admin/v1/keys",
        "POST /admin/v1/keys/{id}/rotate",
        "POST /admin/v1/limits",
    }


def test_a_body_is_required_where_a_field_is():
    assert OPERATIONS["POST /admin/v1/tenants"]["requestBody"]["required"]
    assert not OPERATIONS["POST /admin/v1/keys/{id}/rotate"]["requestBody"]["required"]
    assert "requestBody" not in OPERATIONS["POST /admin/v1/keys/{id}/revoke"]


def test_what_is_unknown_is_not_accepted():
    validator = Draft202012Validator(schema_of(OPERATIONS["POST /admin/v1/limits"], "request"))
    limit = {"subject": "*", "kind": "usd_per_day", "value": 1.5}
    validator.validate(limit)
    assert not validator.is_valid({**limit, "values": 2})
    assert not validator.is_valid({**limit, "kind": "usd_per_year"})


def test_usage_can_be_had_as_csv():
    assert set(OPERATIONS["GET /admin/v1/usage"]["responses"]["200"]["content"]) == {"application/json", "text/csv"}
