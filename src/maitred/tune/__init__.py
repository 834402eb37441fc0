"""Tuning: finds the largest useful batch on this machine, from measurements of the real engine.

`growth` chooses the next size and the final size; `prefill` computes how many tokens a step may have; both use only
measurements. `trial` measures one size on a replica, `session` combines all of them within a time budget, and `report`
describes the result.
"""
