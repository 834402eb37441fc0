"""Way of one request through the gateway: plan, admission, dispatch, response."""
