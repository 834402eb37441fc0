"""docs/admin.md names every route and every field of the administration, and its commands exist."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer.main

from maitred.api.admin.directory_admin import DirectoryAdmin
from maitred.api.admin.routes import admin_routes
from maitred.cli.app import app
from maitred.core.clock import SystemClock
from maitred.core.limits import LimitKind
from maitred.wire.admin import cache, requests, scaling, semantic

PAGE = (Path(__file__).parents[2] / "docs" / "admin.md").read_text(encoding="utf-8")


def test_every_route_is_named_and_no_other() -> None:
    replicas = SimpleNamespace(scaling=None)
    routes = admin_routes(DirectoryAdmin(None, None, SystemClock(), None), None, None, replicas, *[None] * 8)  # type: ignore[arg-type]
    real = {f"{route.method} {route.path}" for route in routes}
    assert real == set(re.findall(r"`((?:GET|POST|PUT|PATCH|DELETE) /admin/v1[^`? ]*)`", PAGE))


@pytest.mark.parametrize(
    "struct",
    [
        requests.CreateTenant,
        requests.CreateKey,
        requests.RotateKey,
        requests.CreateLimit,
        requests.UsageQuery,
        requests.NameReplica,
        requests.StartRollout,
        requests.WeighRollout,
        requests.UnloadModel,
        requests.PinPrefix,
        cache.SelectAnswers,
        semantic.SemanticScopesQuery,
        semantic.LabelledPairsQuery,
        semantic.ResetSemanticScopes,
        scaling.ScalingHistoryQuery,
        scaling.SetScalingOverride,
        scaling.EndScalingOverride,
    ],
)
def test_every_field_is_explained(struct: type) -> None:
    assert [name for name in struct.__struct_fields__ if f"`{name}`" not in PAGE] == []  # type: ignore[attr-defined]


def test_every_kind_of_limit_is_explained() -> None:
    assert [kind for kind in LimitKind if f"`{kind}`" not in PAGE] == []


def test_commands_parse() -> None:
    examples = re.findall(r"^\$ (maitred [^#\n]*)", PAGE, re.M)
    assert len(examples) > 5
    for example in examples:
        words = shlex.split(example)[1:]
        command = typer.main.get_command(app)
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        command.make_context("maitred", words)
