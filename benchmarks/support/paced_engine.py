"""The engine of production around a model that computes nothing and takes its time: it sleeps as long as a step would.

Scheduler, protocol, credits, overcommit and reports are real, so a gateway before it does all that it does before an
engine with a model; and the processor is left to the gateway, whose cost is measured.
"""

import argparse
import socket
import time

from benchmarks.support.simulated_gateway import CARD, TIMES, NoModel, make_engine
from maitred.core.clock import SystemClock
from maitred.core.parent_watch import follow_parent
from maitred.core.request import TokenLogprobs
from maitred.engine.config import BatchLineConfig
from maitred.engine.scheduler.plan import StepPlan
from maitred.engine.server import EngineServer


class PacedModel(NoModel):
    """Takes as long as the simulated one would."""

    def execute(self, plan: StepPlan) -> tuple[list[list[int]], list[list[TokenLogprobs] | None]]:
        """See `maitred.engine.engine.PlanRunner`."""
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
    clock = SystemClock()
    engine = make_engine(PacedModel(), BatchLineConfig(policy=arguments.policy), clock)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(arguments.socket)
    listener.listen()
    server = EngineServer(engine, CARD, listener, clock)
    server.watch_signals()
    server.run()


if __name__ == "__main__":
    main()
