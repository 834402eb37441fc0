"""`maitred cache semantic`: how scopes of similar questions stand, what they have compared, and new beginnings."""

from typing import TYPE_CHECKING, Annotated

import typer

from maitred.cli.options import DEFAULT_URL, AdminKeyOption, JsonOption, UrlOption
from maitred.cli.output.tables import print_json, print_table
from maitred.core.errors import InvalidRequest

if TYPE_CHECKING:
    from maitred.wire.admin.semantic import SemanticScopeBody

LIST_EXAMPLES = """
Examples:

    maitred cache semantic list

    maitred cache semantic list --model chat --json
"""
LABELS_EXAMPLES = """
Examples:

    maitred cache semantic labels --model chat --tenant acme

    maitred cache semantic labels --model chat --different --limit 100
"""
RESET_EXAMPLES = """
Examples:

    maitred cache semantic reset --model chat --tenant acme

    maitred cache semantic reset --model chat --keep-labels
"""
REMOVE_EXAMPLES = """
Examples:

    maitred cache semantic remove --tenant acme

    maitred cache semantic remove --encoder 3f6c1d0e9b7a42d8

    maitred cache semantic remove --all
"""

ModelOption = Annotated[str | None, typer.Option("--model", metavar="NAME", help="Those of this model.")]
TenantOption = Annotated[
    str | None,
    typer.Option("--tenant", metavar="TENANT", help="Those of this tenant, of its keys, and of its teams."),
]
ScopeOption = Annotated[
    str | None,
    typer.Option("--scope", metavar="NAME", help="Those of this name, as `list --json` writes it."),
]
EncoderOption = Annotated[
    str | None, typer.Option("--encoder", metavar="DIGEST", help="Those of this encoder, such as one of the past.")
]
AllOption = Annotated[bool, typer.Option("--all", help="All scopes.")]
_NUMBERS = ("LOOKUPS", "SERVED", "SAVED TOKENS")
_UNITS = {"learning": "labels", "training": "labels", "scoring": "scores", "certifying": "audits"}


def list_scopes(
    model: ModelOption = None,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """List the scopes of similar questions: whether each serves, how rarely it errs, and what it has saved."""
    from maitred.cli.admin_client import AdminClient, administer
    from maitred.wire.admin.semantic import SemanticScopeBody, SemanticScopeList

    async def work(client: AdminClient) -> list[SemanticScopeBody]:
        query = {"model": model, "tenant": tenant}
        return [scope async for scope in client.every("cache/semantic", SemanticScopeList, query)]

    scopes = administer(url, key, work)
    if as_json:
        print_json(scopes)
        return
    print_table(
        ("MODEL", "WHO", "ENCODER", "STATE", "PROGRESS", "BOUND", *_NUMBERS),
        (
            (
                *(scope.model, _who(scope), scope.encoder, scope.state, _progress(scope), _bound(scope)),
                *(scope.lookups, scope.served, scope.saved_tokens),
            )
            for scope in scopes
        ),
        numbers=_NUMBERS,
    )


def labels(
    model: ModelOption = None,
    tenant: TenantOption = None,
    scope: ScopeOption = None,
    different: Annotated[bool, typer.Option("--different", help="Only pairs whose answers were not the same.")] = False,
    limit: Annotated[int, typer.Option("--limit", metavar="COUNT", min=1, max=500, help="How many, at most.")] = 20,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """List the last pairs of questions whose answers were compared."""
    from maitred.cli.admin_client import AdminClient, administer
    from maitred.wire.admin.semantic import LabelledPairBody, LabelledPairList

    query = {"model": model, "tenant": tenant, "scope": scope, "limit": str(limit)}
    query |= {"same": "false" if different else None}

    async def work(client: AdminClient) -> list[LabelledPairBody]:
        return (await client.get("cache/semantic/labels", LabelledPairList, query)).data

    found = administer(url, key, work)
    if as_json:
        print_json(found)
        return
    print_table(
        ("COMPARED", "SAME", "ASKED", "CACHED"),
        ((label.created_at, label.same, label.asked, label.cached) for label in found),
    )


def reset(
    model: ModelOption = None,
    tenant: TenantOption = None,
    scope: ScopeOption = None,
    encoder: EncoderOption = None,
    everything: AllOption = False,
    keep_labels: Annotated[
        bool, typer.Option("--keep-labels", help="Train the next verifier from the labels that are there.")
    ] = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """Let scopes begin anew, those that have all of what is given: they serve nothing until they are certified."""
    from maitred.cli.admin_client import administer
    from maitred.wire.admin.semantic import SemanticScopeChange

    _check_selection(model, tenant, scope, encoder, everything=everything)
    body = {"model": model, "tenant": tenant, "scope": scope, "encoder": encoder, "all": everything}
    body |= {"keep_labels": keep_labels}
    done = administer(url, key, lambda client: client.send("POST", "cache/semantic/reset", SemanticScopeChange, body))
    typer.echo(f"Reset {_scopes(done.changed)}.")


def remove(
    model: ModelOption = None,
    tenant: TenantOption = None,
    scope: ScopeOption = None,
    encoder: EncoderOption = None,
    everything: AllOption = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """Remove scopes with their labels and verifiers, those that have all of what is given."""
    from maitred.cli.admin_client import administer
    from maitred.wire.admin.semantic import SemanticScopeChange

    _check_selection(model, tenant, scope, encoder, everything=everything)
    query = {"model": model, "tenant": tenant, "scope": scope, "encoder": encoder}
    query |= {"all": "true" if everything else None}
    done = administer(
        url, key, lambda client: client.send("DELETE", "cache/semantic", SemanticScopeChange, query=query)
    )
    typer.echo(f"Removed {_scopes(done.changed)}.")


def _check_selection(*names: str | None, everything: bool) -> None:
    if not any(names) and not everything:
        raise InvalidRequest("Which scopes? Pass --model, --tenant, --scope or --encoder; or --all for all of them.")


def _who(scope: "SemanticScopeBody") -> str:
    """Returns who shares the answers of a scope."""
    match scope.shared_by:
        case "key":
            return f"key {scope.key} of {scope.tenant}"
        case "tenant":
            return f"tenant {scope.tenant}"
        case "organisation":
            return f"organisation {scope.organisation}"
        case "public":
            return "everybody"


def _progress(scope: "SemanticScopeBody") -> str:
    """Returns the phase, with how far it is if it ends by itself."""
    unit = _UNITS.get(scope.phase)
    if unit is None:
        return scope.phase
    if scope.progress_needed is None:
        return f"{scope.phase}: cannot pass any more"
    return f"{scope.phase}: {scope.progress:,} of {scope.progress_needed:,} {unit}"


def _bound(scope: "SemanticScopeBody") -> str | None:
    if scope.false_hit_bound is None:
        return None
    return f"{100 * scope.false_hit_bound:.3f} % of {100 * scope.budget:g} %"


def _scopes(number: int) -> str:
    return f"{number:,} {'scope' if number == 1 else 'scopes'}"
