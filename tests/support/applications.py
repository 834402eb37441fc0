"""The application of the HTTP API in front of a service, with what a test cares for."""

from maitred.api.application import api_routes, build_app
from maitred.api.health import ServiceRoutes


def make_app(config, answering, identity, in_flight, clock, *, observers=(), render_metrics=bytes, further=(), **more):
    """All routes of inference, and those that a test adds."""
    service = ServiceRoutes(answering, in_flight, render_metrics)
    return build_app(
        config,
        api_routes(config, answering, service, further=further),
        identity,
        in_flight,
        observers,
        answering.rate_limit_status,
        clock,
        check_limits=getattr(answering, "check_limits", None),
        **more,
    )
