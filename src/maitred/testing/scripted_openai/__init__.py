"""Scripted server of the OpenAI API with exactly known times, to verify load testers.

It is a separate process without a model, and handles 100,000 events per second on one core. For every event it records
when it was due and when it was sent. Use in a test::

    with scripted_openai(Script(ttft=Times(mean_s=0.2, cv=0.5))) as server:
        ...  # ask server.url
        truth = server.truth()

Use on the command line::

    python -m maitred.testing.scripted_openai --port 8001 --script '{"itl": {"mean_s": 0.05}}' --log truth.json

A request passes through the modules in this order: `server` reads it; `answers` uses it and the `script` to make the
bytes and the gaps between them; `timetable` holds when each is due; `truth` records what happened.
"""

from maitred.testing.scripted_openai.process import ScriptedOpenAI, scripted_openai
from maitred.testing.scripted_openai.script import (
    DelayDistribution,
    FaultKind,
    ScriptedFault,
    ScriptedPause,
    ServerScript,
)
from maitred.testing.scripted_openai.truth import RequestTruth, ServedRecord

__all__ = [
    "DelayDistribution",
    "FaultKind",
    "RequestTruth",
    "ScriptedFault",
    "ScriptedOpenAI",
    "ScriptedPause",
    "ServedRecord",
    "ServerScript",
    "scripted_openai",
]
