"""`maitred explain scaling` and `maitred replicas scale`: how many replicas models have, why, and other numbers."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from maitred.cli.options import DEFAULT_URL, AdminKeyOption, JsonOption, UrlOption, parse_duration
from maitred.cli.output.tables import print_json, print_table
from maitred.core.errors import InvalidRequest, ResourceNotFound

if TYPE_CHECKING:
    from maitred.wire.admin.scaling import ScalingBody, ScalingDecisionBody

SCALE_EXAMPLES = """
Examples:

    maitred replicas scale chat 4 --for 1h

    maitred replicas scale chat --auto

    maitred replicas scale chat 2
"""
_DECISIONS = 20


def scale(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model whose replicas the server starts.")],
    replicas: Annotated[
        int | None, typer.Argument(metavar="COUNT", help="Replicas that should serve, whatever the demand is.")
    ] = None,
    duration: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="TIME",
            help="After this time the demand decides again. Needed where it does so (`model.autoscaling`).",
        ),
    ] = None,
    auto: Annotated[bool, typer.Option("--auto", help="The demand decides again, from now on.")] = False,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    key: AdminKeyOption = None,
) -> None:
    """Set how many replicas of a model serve: for a time, or for good where their number does not follow the demand."""
    from maitred.cli.admin_client import administer
    from maitred.wire.admin.responses import PoolBody
    from maitred.wire.admin.scaling import ScalingBody

    if auto:
        if replicas is not None or duration is not None:
            raise InvalidRequest("--auto stands alone: the demand decides on the number, and for ever.")
        body = administer(
            url, key, lambda client: client.send("DELETE", "scaling/override", ScalingBody, query={"model": model})
        )
    elif replicas is None:
        raise InvalidRequest("How many? Pass COUNT; or --auto to let the demand decide.")
    elif duration is None:
        fixed = {"model": model, "serving": replicas}
        pool = administer(url, key, lambda client: client.send("POST", "replicas/scale", PoolBody, fixed))
        if as_json:
            print_json(pool)
        else:
            typer.echo(f"{_count(replicas)} of {model} should serve.")
        return
    else:
        wish = {"model": model, "replicas": replicas, "for_s": parse_duration("--for", duration)}
        body = administer(url, key, lambda client: client.send("POST", "scaling/override", ScalingBody, wish))
    if as_json:
        print_json(body)
    elif body.override is None:
        typer.echo(f"The demand decides on the replicas of {model} again.")
    else:
        typer.echo(f"{_count(body.override.replicas)} of {model} should serve until {body.override.until}.")


def explain_scaling(model: str | None, *, as_json: bool, url: str, key: str | None) -> None:
    """Tells why models have the number of replicas that they have: all in brief, or one with its decisions."""
    from maitred.cli.admin_client import AdminClient, administer
    from maitred.wire.admin.scaling import ScalingDecisionList, ScalingList

    async def work(client: AdminClient) -> "tuple[list[ScalingBody], list[ScalingDecisionBody]]":
        models = (await client.get("scaling", ScalingList)).data
        if model is None:
            return models, []
        models = [body for body in models if body.model == model]
        if not models:
            raise ResourceNotFound(f"There is no model {model!r} whose number of replicas follows the demand.")
        query = {"model": model, "limit": str(_DECISIONS)}
        return models, (await client.get("scaling/decisions", ScalingDecisionList, query)).data

    models, decisions = administer(url, key, work)
    if as_json:
        print_json(models if model is None else {"scaling": models[0], "decisions": decisions})
    elif model is None:
        _print_all(models)
    else:
        print_table(("MODEL", model), _heading(models[0]))
        typer.echo()
        print_table(
            ("AT", "REPLICAS", "REASON", "WHY"),
            ((decision.at, decision.desired, decision.reason, decision.text) for decision in decisions),
            numbers=("REPLICAS",),
        )


def _print_all(models: "list[ScalingBody]") -> None:
    phases = ("serving", "starting", "waking", "asleep", "draining", "failed")
    print_table(
        ("MODEL", "DESIRED", *(phase.upper() for phase in phases), "WHY"),
        (
            (
                *(body.model, body.desired, *(body.actual.get(phase, 0) for phase in phases)),
                None if body.decision is None else body.decision.text,
            )
            for body in models
        ),
        numbers=("DESIRED", *(phase.upper() for phase in phases)),
    )


def _heading(body: "ScalingBody") -> Iterator[tuple[str, object]]:
    """Yields the lines about the present state, without those that there is nothing to say in."""
    objectives, decision = body.objectives, body.decision
    yield "desired", f"{body.desired} serving, {body.asleep} asleep"
    yield "actual", ", ".join(f"{count} {phase}" for phase, count in body.actual.items()) or "none"
    yield "objectives", f"first token within {objectives.ttft_s:g} s, {objectives.itl_s:g} s between tokens"
    yield "limits", f"{objectives.min_replicas} to {objectives.max_replicas} replicas"
    if body.override is not None:
        yield "override", f"{body.override.replicas} until {body.override.until}"
    if not body.deciding:
        yield "decided by", body.owner or "nobody yet"
    if decision is not None:
        forecast = decision.forecast
        yield "now", decision.text
        yield "waiting, running", f"{decision.waiting}, {decision.running}"
        yield (
            "forecast",
            f"{_short(forecast.mean)} requests/s in {_short(decision.lead_time_s)} s "
            f"({_short(forecast.low)} to {_short(forecast.high)})",
        )
        if decision.replica_requests_per_s is not None:
            yield "one replica serves", f"{_short(decision.replica_requests_per_s)} requests/s"
        if decision.predicted_ttft_s is not None:
            yield "predicted first token", f"{_short(decision.predicted_ttft_s)} s"
        if decision.hold_until is not None:
            yield "held until", decision.hold_until
    measured = [outcome for outcome in body.outcomes if outcome.measured_s is not None]
    if measured:
        last = measured[-1]
        yield (
            "last minute with requests",
            f"first token {_short(last.measured_s)} s, predicted {_short(last.predicted_s)} s",
        )
    for times in body.starts:
        yield f"start, {times.kind}", f"{_short(times.p50_s)} s, nine of ten within {_short(times.p90_s)} s"
    for replica in body.replicas:
        if replica.failure:
            yield replica.replica, replica.failure


def _count(replicas: int) -> str:
    return f"{replicas:,} {'replica' if replicas == 1 else 'replicas'}"


def _short(value: float | None) -> str:
    """Returns a number in three digits."""
    return "unknown" if value is None else f"{value:.3g}"
