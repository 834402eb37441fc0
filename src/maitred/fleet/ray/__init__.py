"""Engines on a Ray cluster: Ray Serve places and keeps them, and gateways reach them without it.

::

    gateway --REST of the dashboard--> Serve controller --> replica (actor) --starts--> engine process
       |                                                                                     |
       `------------------ tokens, load, death: the engine protocol over TCP ---------------'

The Serve application (`application`) has one deployment for each replica that there may be. A gateway starts a replica
when it sets the target of its deployment to 1, and stops it when it sets 0, so the replica that Ray removes is the one
that the pool has drained. Gateways speak HTTP with Ray's dashboard (`serve_api`); only the code that Ray runs imports
ray.
"""
