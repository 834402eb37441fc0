"""A scheduler with the settings that a test names."""

from maitred.engine.config import EngineConfig
from maitred.engine.scheduler.scheduler import Scheduler


def make_scheduler(pool, *, context_tokens, eos_token_ids=(), block_copy_s=float("inf"), **settings):
    """The settings are those of the section `engine`; without `guests`, nothing runs beyond `max_sequences`."""
    return Scheduler(
        pool,
        EngineConfig(**{"guests": 0, **settings}),
        context_tokens=context_tokens,
        eos_token_ids=eos_token_ids,
        block_copy_s=block_copy_s,
    )
