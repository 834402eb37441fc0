"""The engine of production around a model that computes nothing and takes its time: it sleeps as long as a step would.

Scheduler, protocol, credits, guests and reports are real, so a gateway before it does all that it does before an engine
with a model; and the processor is left to the gateway, whose cost is measured.
"""

import argparse
import socket
import time

from benchmarks.simulated_gateway import (
    BLOCK_TOKENS,
    BLOCKS,
    CARD,
    CONTEXT_TOKENS,
    GUESTS,
    PLACES,
    STEP_TOKENS,
    TIMES,
    NoModel,
)
from maitred.core.clock import SystemClock
from maitred.core.lifeline import follow_parent
from maitred.core.request import TokenLogprobs
from maitred.engine.engine import Engine
from maitred.engine.kv.blocks import BlockPool
from maitred.engine.scheduler.plan import StepPlan
from maitred.engine.scheduler.scheduler import Scheduler
from maitred.engine.server import EngineServer
from maitred.fairness.config import LineConfig


class PacedModel(NoModel):
    """Takes as long as the simulated one would."""

    def execute(self, plan: StepPlan) -> tuple[list[list[int]], list[list[TokenLogprobs] | None]]:
        """See `maitred.engine.engine.Runner`."""
        outputs = super().execute(plan)
        time.sleep(self.work.seconds(TIMES))
        return outputs


def main() -> None:
    """Serves until SIGTERM, or until the parent has gone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", required=True, help="path of the Unix socket to listen on")
    parser.add_argument("--policy", choices=["fair", "fifo"], default="fair", help="of the engine's own queue")
    arguments = parser.parse_args()
    follow_parent()
    scheduler = Scheduler(
        BlockPool(BLOCKS),
        block_tokens=BLOCK_TOKENS,
        max_sequences=PLACES,
        guests=GUESTS,
        step_tokens=STEP_TOKENS,
        context_tokens=CONTEXT_TOKENS,
        eos_token_ids=(),
        prefix_cache=False,
        line=LineConfig(policy=arguments.policy),
        itl_objective_s=None,
    )
    clock = SystemClock()
    engine = Engine(scheduler, PacedModel(), clock, vocab_size=CARD.vocab_size, max_choices=CARD.max_choices)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(arguments.socket)
    listener.listen()
    server = EngineServer(engine, CARD, listener, clock)
    server.watch_signals()
    server.run()


if __name__ == "__main__":
    main()
