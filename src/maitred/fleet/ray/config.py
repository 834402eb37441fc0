"""Settings of `ray`: the cluster whose Ray Serve runs the engines, and what each of them gets of it."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from maitred.core.secret import Secret

SLOT_PREFIX = "engine-"
"""Name of a deployment without its number."""


class RayReplicaConfig(Struct, frozen=True, kw_only=True):
    """Settings of the replicas, which the Serve application has as its arguments."""

    model: Annotated[
        str,
        Meta(
            description="Folder of the model on the machines of the cluster; empty: the small one in maitred, or that "
            "of `model.path` where the gateway deploys the application."
        ),
    ] = ""
    max_replicas: Annotated[
        int, Meta(ge=1, le=64, description="Most replicas. Each has its own deployment.", extra={"unit": "replicas"})
    ] = 8
    first_port: Annotated[
        int,
        Meta(
            ge=1024,
            le=65000,
            description="The engine of `engine-0` listens on this port of its machine, `engine-1` on the next, and so "
            "on.",
        ),
    ] = 9200
    num_cpus: Annotated[
        float,
        Meta(gt=0, description="CPU cores that Ray reserves for a replica; an engine on a CPU computes with as many."),
    ] = 1.0
    num_gpus: Annotated[
        float, Meta(ge=0, description="GPUs that Ray reserves for a replica; the engine sees only these.")
    ] = 0.0
    resources: Annotated[
        dict[str, float], Meta(description="Further resources of Ray for a replica, such as `{zone_a: 1}`.")
    ] = {}
    accelerator_type: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="Kind of GPU as Ray names it, such as `H100`; null: any."),
    ] = None
    stop_grace_s: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="Time for the answers that an engine still gives when Ray stops it: those of all gateways. It "
            "refuses new requests, and ends with the last answer.",
            extra={"unit": "seconds"},
        ),
    ] = 600.0
    scaling: Annotated[
        Literal["external", "policy"],
        Meta(
            description="How a gateway tells Serve its targets. `external`: by the API for external scalers, at once. "
            "`policy`: as the bound of an autoscaling policy, in the configuration of the application; for a Serve "
            "without that API."
        ),
    ] = "external"


class RayConfig(Struct, frozen=True, kw_only=True):
    """Settings of the Ray cluster that runs the engines of the section `model` if `model.backend` is `ray`."""

    address: Annotated[
        str,
        Meta(
            pattern="^https?://[^/]+$",
            description="Address of the cluster's dashboard, which has the REST API of Serve.",
        ),
    ] = "http://127.0.0.1:8265"
    token: Annotated[
        Secret | None,
        Meta(description="Token of the cluster (`ray get-auth-token`), where it asks for one, as Ray 2.60 does."),
    ] = None
    application: Annotated[
        str, Meta(min_length=1, max_length=128, description="Name of the Serve application with the engines.")
    ] = "maitred"
    deploys: Annotated[
        bool,
        Meta(
            description="Whether a gateway deploys the application where the cluster does not have it. The machines of "
            "the cluster need the package `maitred[engine,ray]`."
        ),
    ] = True
    replica: RayReplicaConfig = RayReplicaConfig()
