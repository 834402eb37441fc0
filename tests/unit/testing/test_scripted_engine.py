"""What the scripted engine answers, and what it counts."""

from maitred.core.request import EngineRequest, SamplingParams
from maitred.replica.engine.client import EngineClient
from maitred.testing.script import AnswerFault, EngineScript, ScriptedAnswer
from maitred.testing.scripted_engine import ScriptedEngine

ONE, TWO = ScriptedAnswer(tokens=[7]), ScriptedAnswer(tokens=[7, 8])


def test_the_last_answer_serves_all_that_follow():
    script = EngineScript(answers=[ONE, TWO])
    assert [script.answer(number) for number in range(4)] == [ONE, TWO, TWO, TWO]


def test_answers_come_again_if_they_shall():
    script = EngineScript(answers=[ONE, TWO], again=True)
    assert [script.answer(number) for number in range(4)] == [ONE, TWO, ONE, TWO]


async def test_it_counts_what_it_took_on_and_what_it_sent():
    cut = ScriptedAnswer(tokens=[7, 8, 9], fault=AnswerFault.STALL, fault_after=2)
    async with ScriptedEngine([ScriptedAnswer(tokens=[7, 8, 9]), cut]) as engine:
        link = EngineClient(engine.address)
        await link.connect(5)
        for prompt, tokens in (([1, 2], 3), ([1, 2, 3], 2)):
            request = EngineRequest(id="r", prompt=prompt, sampling=SamplingParams(max_tokens=9, seed=0))
            async with link.generate(request) as stream:
                seen = 0
                async for deltas in stream:
                    seen += sum(len(delta.tokens) for delta in deltas)
                    if seen == tokens:
                        break
        await engine.wait_until(lambda: engine.load().cancelled == 1)
        link.close()
        load = engine.load()
    assert (load.prompt_tokens, load.output_tokens, load.finished) == (5, 5, 1)
