"""Assembly of a gateway from its configuration: stores, access, queues, services, generations."""
