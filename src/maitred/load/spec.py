"""Spec of a load run: plain data from flags or a YAML file, stored with every result.

Distributions and profiles are short texts (``lognormal:mean=200,cv=1.2``), so that a flag and a file use the same form;
`lengths` and `arrivals` parse them.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from maitred.core.secret import Secret

_SECONDS = {"unit": "seconds"}  # read with or without a unit: 500ms, 30s, 2m
Seconds = Annotated[float, Meta(ge=0, extra=_SECONDS)]
PositiveSeconds = Annotated[float, Meta(gt=0, extra=_SECONDS)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1)]

Endpoint = Literal["chat", "completions"]
ExactOutput = Literal["auto", "always", "never"]
ArrivalProcess = Literal["constant", "poisson", "gamma"]


class LoadTarget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Target of a load: the server under test."""

    url: Annotated[str, Meta(description="Address of the server, with or without `/v1`.")] = "http://127.0.0.1:8000"
    unix_socket: Annotated[
        str | None, Meta(description="Connect to this Unix socket instead of the URL's host and port.")
    ] = None
    model: Annotated[str | None, Meta(description="Which model answers. Default: the first that it lists.")] = None
    endpoint: Annotated[Endpoint, Meta(description="Which API is called: `chat` or `completions`.")] = "chat"
    api_key: Annotated[Secret | None, Meta(description="Sent as a bearer token.")] = None
    stream: Annotated[
        bool, Meta(description="Whether answers are streamed; without, there is one time per answer.")
    ] = True
    exact_output: Annotated[
        ExactOutput,
        Meta(
            description="Whether answers are kept from ending early, by `ignore_eos`: `always`, `never`, or `auto`: "
            "where the server takes it."
        ),
    ] = "auto"
    tokenizer: Annotated[
        str | None,
        Meta(
            description="Folder or file of the model's `tokenizer.json`. Default: two "
            "probes measure how many tokens a word has."
        ),
    ] = None
    body: Annotated[
        str, Meta(description='JSON object of more fields for every request, such as `{"temperature": 0}`.')
    ] = "{}"


class ArrivalsSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arrivals of sessions: `users` (closed loop), `rate_per_s` (open loop), or a trace with times."""

    users: Annotated[Count | None, Meta(description="Closed loop: so many users, each with one request at a time.")] = (
        None
    )
    rate_per_s: Annotated[
        Positive | None, Meta(description="Open loop: sessions per second, whatever the server does.")
    ] = None
    process: Annotated[ArrivalProcess, Meta(description="`constant`, `poisson` or `gamma` (with `cv`).")] = "poisson"
    cv: Annotated[
        Positive, Meta(description="Coefficient of variation of `gamma`'s gaps; above 1 comes in bursts.")
    ] = 1.0
    profile: Annotated[
        str,
        Meta(
            description="How the rate (or the number of users) changes: `steady`, `ramp:from=0,to=2,over=60`, "
            "`spike:at=60,for=10,factor=5`, `bursts:every=30,for=5,factor=8`, or `points:0=1,60=3,90=1`."
        ),
    ] = "steady"
    spread_s: Annotated[Seconds, Meta(description="Closed loop: the users arrive over so many seconds.")] = 1.0


class ShapeSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shape of the requests: lengths, turns and prefixes; or a trace that defines all of these."""

    prompt_tokens: Annotated[
        str,
        Meta(
            description="Length of a message: `200`, `uniform:50..400`, `lognormal:mean=200,cv=1`, "
            "`exponential:mean=200`, `histogram:100=0.5,400=0.5`."
        ),
    ] = "200"
    output_tokens: Annotated[str, Meta(description="Length of an answer, in the same words.")] = "100"
    lengths: Annotated[
        str | None, Meta(description="CSV file with a pair of lengths in each row, in place of the two above.")
    ] = None
    turns: Annotated[str, Meta(description="Turns of a session, in the same words.")] = "1"
    think_s: Annotated[
        str, Meta(description="Pause before each turn but a session's first, and between two sessions of a user.")
    ] = "0"
    prefixes: Annotated[int, Meta(ge=0, description="So many different shared prefixes (system prompts).")] = 0
    prefix_tokens: Annotated[int, Meta(ge=0, description="Length of each of them.")] = 0
    prefix_skew: Annotated[float, Meta(ge=0, description="Zipf exponent of their popularity; 0: all alike.")] = 1.0
    text_seed: Annotated[
        int | None,
        Meta(
            description="Seed of the words alone. Default: another for every run, so that no prefix cache of the "
            "server knows the questions from a run before."
        ),
    ] = None
    trace: Annotated[
        str | None,
        Meta(description="`FORMAT:PATH`; formats: `mooncake`, `azure`, `servegen`, `burstgpt`, `agentic`, `recorded`."),
    ] = None
    speed: Annotated[Positive, Meta(description="The trace's clock runs so many times as fast.")] = 1.0
    scale: Annotated[Positive, Meta(description="Factor on all lengths, blocks included.")] = 1.0
    max_prompt_tokens: Annotated[Count | None, Meta(description="Longer prompts are shortened to this.")] = None
    max_output_tokens: Annotated[Count | None, Meta(description="Longer answers are shortened to this.")] = None


class LoadTenant(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tenant that a part of the traffic belongs to; its name is sent as `user`."""

    share: Annotated[Positive, Meta(description="Of the sessions, relative to the other tenants.")] = 1.0
    api_key: Annotated[Secret | None, Meta(description="In place of the target's.")] = None


class ClientsSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Behaviour of the users' client software."""

    retries: Annotated[
        int,
        Meta(ge=0, le=20, description="After a failure, as the official SDKs do: 0.5 s doubling to 8 s, or as told."),
    ] = 2
    timeout_s: Annotated[PositiveSeconds, Meta(description="For one attempt, from sending to the last byte.")] = 600.0
    connect_timeout_s: Annotated[PositiveSeconds, Meta(description="For a connection.")] = 10.0
    cancel_share: Annotated[Share, Meta(description="So many of the users hang up before the end.")] = 0.0
    cancel_after_s: Annotated[
        str, Meta(description="When they do, after sending: a distribution as for lengths, in seconds.")
    ] = "uniform:0..5"
    stall_share: Annotated[Share, Meta(description="So many stop reading in the middle of the answer.")] = 0.0
    stall_s: Annotated[Seconds, Meta(description="For so long.")] = 5.0
    max_open: Annotated[
        Count | None, Meta(description="Most requests open at once; others wait, and their wait counts.")
    ] = None


class StopCondition(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Stop condition of a run: the first of `duration_s` and `requests`, or the end of its trace."""

    duration_s: Annotated[
        PositiveSeconds | None,
        Meta(description="No request is due after this; default 60 when `requests` is not given either."),
    ] = None
    requests: Annotated[Count | None, Meta(description="So many requests in all.")] = None
    warmup_s: Annotated[Seconds, Meta(description="Requests due before this are sent, but not counted.")] = 0.0
    drain_s: Annotated[
        Seconds, Meta(description="At the end, open requests may take so long; then they count as unfinished.")
    ] = 120.0


class ObjectivesSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Objectives of a good answer; goodput counts complete answers that meet all given objectives."""

    ttft_s: Annotated[PositiveSeconds | None, Meta(description="Time to the first token.")] = None
    tpot_s: Annotated[PositiveSeconds | None, Meta(description="Time per output token after the first.")] = None
    e2e_s: Annotated[PositiveSeconds | None, Meta(description="Time to the last token.")] = None
    attainment: Annotated[
        float, Meta(gt=0, le=1, description="So many of the requests must meet them; the sweep looks for this.")
    ] = 0.95


class LoadSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Spec of a whole run."""

    target: LoadTarget = LoadTarget()
    arrivals: ArrivalsSpec = ArrivalsSpec()
    shape: ShapeSpec = ShapeSpec()
    tenants: Annotated[dict[str, LoadTenant], Meta(description="Name -> share and key. Default: one tenant.")] = {}
    clients: ClientsSpec = ClientsSpec()
    bounds: StopCondition = StopCondition()
    objectives: ObjectivesSpec = ObjectivesSpec()
    seed: Annotated[int, Meta(ge=0, description="Of everything that is drawn.")] = 0
