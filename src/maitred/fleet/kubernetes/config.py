"""Settings of `kubernetes`: the Deployment whose pods run the engines."""

from typing import Annotated

from msgspec import Meta, Struct

_Name = Annotated[str, Meta(pattern="^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]


class KubernetesConfig(Struct, frozen=True, kw_only=True):
    """Settings of the Deployment that runs the engines of the section `model` if `model.backend` is `kubernetes`."""

    deployment: Annotated[
        _Name,
        Meta(description="Name of the Deployment. Each of its pods runs one `maitred engine`; the gateway scales it."),
    ] = "maitred-engine"
    namespace: Annotated[
        _Name | None,
        Meta(description="Its namespace; null: that of the gateway's own pod, or of the context in the kubeconfig."),
    ] = None
    lease: Annotated[
        _Name,
        Meta(description="Name of the Lease in that namespace by which gateways agree on who scales the Deployment."),
    ] = "maitred-scaler"
    kubeconfig: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="File that says where the API server is and who the gateway is there; null: the service "
            "account of the gateway's own pod, or else `KUBECONFIG` or `~/.kube/config`."
        ),
    ] = None
    context: Annotated[
        Annotated[str, Meta(min_length=1)] | None, Meta(description="Context in that file; null: the current one.")
    ] = None
    port: Annotated[
        int, Meta(ge=1, le=65535, description="Port of the engine in each pod (`maitred engine --listen`).")
    ] = 9100
    max_replicas: Annotated[
        int,
        Meta(ge=1, le=1000, description="Most replicas that a gateway sets.", extra={"unit": "replicas"}),
    ] = 8
    gpus_per_replica: Annotated[
        float, Meta(ge=0, description="GPUs of one pod, for `model.autoscaling.max_gpus`; 0: it is not said.")
    ] = 0.0
    usd_per_hour: Annotated[
        float, Meta(ge=0, description="Price of one pod, for [scaling](scaling.md).", extra={"unit": "dollars an hour"})
    ] = 0.0
