"""How large batches can be on this machine: measured on the real engine, decided by pure code.

`growth` says which size to try next and which to take, `prefill` how many tokens a step may have; both know only what
was measured. `trial` measures one size on a replica, `session` puts the two together within a budget of time, and
`report` tells of it.
"""
