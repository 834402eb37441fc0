"""Worker process that compiles grammars: `python -m maitred.admission.grammars.worker`.

Native code compiles the callers' untrusted grammars, which can take much time or memory or overflow the stack; a
separate process limits the damage to this process. The process reports that it is ready, then answers one question
after the other until its input ends, for example because the gateway has ended. A question is a length in four bytes
and a `Constraint` in JSON, whose whole numbers have no bound; an answer is a length and a `GrammarResult` in
MessagePack. An empty answer reports that the process is ready.

From then on the process has a low scheduling priority, so what it compiles delays no engine and no gateway on the same
cores. Its argument is the processor time in seconds that a question may take; then SIGPROF ends the process. Time in
which other processes use the cores does not count.
"""

import resource
import signal
import sys
import threading

import msgspec

from maitred.admission.grammars.priority import lower_priority
from maitred.core.grammar import GRAMMAR_LENGTH_BYTES, Constraint, GrammarResult
from maitred.text.grammar.language import STACK_BYTES, GrammarFault
from maitred.text.grammar.reading import parse_grammar

_MOST_MEMORY_BYTES = 1 << 30
_TOO_LARGE = "It takes too much memory to compile. Send a simpler one."


def main() -> None:
    """Answers questions until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY_BYTES, _MOST_MEMORY_BYTES))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    threading.stack_size(STACK_BYTES)
    working = threading.Thread(target=_answer_all, args=(float(sys.argv[1]),))
    working.start()
    working.join()


def _answer_all(compile_s: float) -> None:
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    answer = b""
    while True:
        answers.write(len(answer).to_bytes(GRAMMAR_LENGTH_BYTES) + answer)
        answers.flush()
        if not answer:
            lower_priority()
        length = questions.read(GRAMMAR_LENGTH_BYTES)
        if len(length) < GRAMMAR_LENGTH_BYTES:
            return
        question = questions.read(int.from_bytes(length))
        signal.setitimer(signal.ITIMER_PROF, compile_s)
        answer = msgspec.msgpack.encode(_try(question))
        signal.setitimer(signal.ITIMER_PROF, 0)


def _try(question: bytes) -> GrammarResult:
    try:
        relaxed: list[str] = []
        grammar = parse_grammar(msgspec.json.decode(question, type=Constraint), relaxed)
        return GrammarResult(grammar, relaxed=tuple(relaxed))
    except GrammarFault as fault:
        return GrammarResult(fault=str(fault))
    except MemoryError:
        return GrammarResult(fault=_TOO_LARGE)


if __name__ == "__main__":
    main()
