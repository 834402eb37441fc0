"""A scripted server of the OpenAI API whose times are exactly known: what a load tester is proven against.

It is a process of its own, without a model, fast enough for 100,000 events per second on one core, and it notes for
every event when it was due and when it was sent. In a test::

    with scripted_openai(Script(ttft=Times(mean_s=0.2, cv=0.5))) as server:
        ...  # ask server.url
        truth = server.truth()

and by hand::

    python -m maitred.testing.scripted_openai --port 8001 --script '{"itl": {"mean_s": 0.05}}' --log truth.json

The way of a request is the way through the modules: `server` reads it, `answers` makes of it and the `script` the
bytes and the gaps between them, `timetable` says when each is due, `truth` is what happened.
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
