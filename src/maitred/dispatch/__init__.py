"""Request queues of the gateway: requests wait in fair order until a replica has credits."""
