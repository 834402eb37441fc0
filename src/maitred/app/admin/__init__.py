"""Services behind the admin API: replicas, models, pins, rollouts, live state, usage."""
