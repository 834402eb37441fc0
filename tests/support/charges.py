"""What a line is charged, as it would be if every stream were charged with every tick."""

from collections import defaultdict


def listen(line, heard):
    """Calls ``heard(flow, service)`` for every charge."""
    streams = defaultdict(float)
    charge, stream, tick = line.charge, line.stream, line.tick

    def on_charge(flow, service):
        heard(flow, service)
        charge(flow, service)

    def on_stream(flow, service):
        streams[flow] += service
        assert streams[flow] >= 0
        stream(flow, service)

    def on_tick():
        for flow, service in streams.items():
            if service:
                heard(flow, service)
        tick()

    line.charge, line.stream, line.tick = on_charge, on_stream, on_tick
