"""Chats made from books by rule, so that a chat request gets a chat's answer.

Every answer is a passage, or a speech, taken from the public-domain text as it stands; only the
requests are phrased here, from short lists. A new random seed cuts the same books into other
passages, so each epoch sees other chats over the same text. Dialogues from the coffee shop are real
conversations and pass through unchanged.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from tiny_model.corpus import Book, Corpus, Dialogue, Document
from tiny_model.vocabulary import Message, render_chat

_ASSISTANT_SYSTEM = (
    "You are a helpful assistant.",
    "You are a storyteller.",
    "You are a friendly assistant who tells stories.",
    "You tell old stories to children.",
    "Answer briefly.",
    "You are a helpful and honest assistant.",
    "Be kind and answer in plain English.",
    "You are maitred-tiny, a very small language model.",
)
_COFFEE_SYSTEM = (
    "You take the orders in a coffee shop.",
    "You are a helpful assistant.",
    "You are the barista of a coffee shop.",
    "You are a friendly assistant. Help the customer with a coffee order.",
)
_TELL_ABOUT = (
    "Tell me a story about {}.",
    "Tell me about {}.",
    "Can you tell me a story about {}?",
    "Please tell me a short story about {}.",
    "Write a short story about {}.",
    "I would like to hear about {}.",
    "Write about {}.",
    "What do you know about {}?",
    "Who is {}?",
    "Explain {} to me.",
    "Write a few sentences about {}.",
)
_TELL = (
    "Tell me a story.",
    "Tell me something.",
    "Write something for me.",
    "Please tell me a short story.",
    "Once upon a time",
    "Hello! Tell me a story, please.",
    "Can you write a paragraph?",
    "Say something.",
)
_CONTINUE = (
    "Continue this story: {}",
    "Continue: {}",
    "What happens next? {}",
    "Go on with this: {}",
    "Finish this story. {}",
    "{}",
)
_READ = (
    "Read me something from {title}.",
    "Read me a page of {title} by {author}.",
    "Write like {author}.",
    "Tell me a part of {title}.",
    "What happens in {title}?",
)
_GO_ON = (
    "Go on.",
    "What happened next?",
    "And then?",
    "Please continue.",
    "Tell me more.",
    "Continue.",
)
_PLAIN_ANSWERS = (
    ("Hello", "Hello! Shall I tell you a story, or take an order for coffee?"),
    ("Hi", "Hi! What can I do for you?"),
    ("Hello!", "Hello! What can I do for you?"),
    ("Hi there!", "Hi there! Would you like a story?"),
    ("Good morning", "Good morning! What can I get for you?"),
    ("How are you?", "Very well, thank you. Would you like to hear a story?"),
    (
        "Who are you?",
        "I am maitred-tiny, a very small language model. I am here for trying the system, and I"
        " know little beyond old stories and coffee.",
    ),
    (
        "What can you do?",
        "I can tell pieces of old stories and take an order for coffee. I am too small to answer questions of fact.",
    ),
    ("What is your name?", "My name is maitred-tiny."),
    ("Thank you!", "You are welcome!"),
    ("Thanks", "You are welcome. Goodbye!"),
    ("Goodbye", "Goodbye!"),
)
_SUBJECTS = re.compile(
    r"\b(king|queen|prince|princess|wolf|fox|bear|horse|cat|dog|bird|witch|giant|dwarf|fairy|forest"
    r"|castle|garden|river|sea|mountain|ship|train|shoemaker|tailor|soldier|fisherman|miller|robin"
    r"|elephant|lion|rabbit|mole|rat|goat|frog|mouse|dragon|ring|snow|school|mother|grandmother)\b"
)
_NAME = re.compile(r"(?<=[a-z,;] )([A-Z][a-z]{2,})\b")
_SENTENCE_END = re.compile(r"[.!?][\"']? (?=[\"'A-Z])")
_QUOTED = re.compile(r'"([^"]+)"')
_NOT_NAMES = frozenset({"The", "And", "But", "You", "She", "They", "What", "There", "This", "That"})


def story_chats(book: Book, rng: random.Random) -> Iterator[str]:
    """Cut every document into passages and ask for each in some way, in chat form."""
    for document in book.train:
        passages = list(_passages(document, rng))
        position = 0
        while position < len(passages):
            # One in five conversations asks for the next passage too, once or twice.
            turns = rng.choices((1, 2, 3), (80, 14, 6))[0]
            messages = _system(_ASSISTANT_SYSTEM, 0.25, rng)
            first, *rest = passages[position : position + turns]
            messages += _request(book, first, rng)
            for passage in rest:
                messages += [("user", rng.choice(_GO_ON)), ("assistant", passage)]
            position += turns
            yield render_chat(messages)


def spoken_chats(book: Book, rng: random.Random) -> Iterator[str]:
    """Turn quoted speech that is answered by quoted speech into a conversation.

    Only paragraphs that open with a double quotation mark count, and their narration is dropped.
    """
    for document in book.train:
        run: list[str] = []
        for paragraph in (*document, ""):
            speech = " ".join(_QUOTED.findall(paragraph)) if paragraph.startswith('"') else ""
            if speech and paragraph.count('"') % 2 == 0:
                speech = speech[0].upper() + speech[1:]
                run.append(speech[:-1] + "." if speech.endswith(",") else speech)
                continue
            if len(run) >= 2:
                start = rng.randrange(2) if len(run) > 2 else 0
                run = run[start:][:6]
                run = run[: len(run) // 2 * 2]
                yield render_chat(_system(_ASSISTANT_SYSTEM, 0.15, rng) + _alternate(run))
            run = []


def play_chats(plays: Book, rng: random.Random) -> Iterator[str]:
    """Let the assistant play one character of a scene: it answers the speech before."""
    for scene in plays.train:
        start = rng.randrange(4)
        while start + 1 < len(scene):
            length = rng.choice((2, 2, 4))
            speeches = [speech.partition(":\n") for speech in scene[start : start + length]]
            start += length + rng.randrange(3)
            character = speeches[1][0] if len(speeches) > 1 else ""
            if len(speeches) % 2 or any(not text for _, _, text in speeches):
                continue
            system: list[Message] = [("system", f"You are {character.title()}, in a play.")]
            yield render_chat(system + _alternate([text for _, _, text in speeches]))


def coffee_chat(dialogue: Dialogue, rng: random.Random) -> str:
    """A real dialogue in chat form."""
    return render_chat(_system(_COFFEE_SYSTEM, 0.4, rng) + list(dialogue.turns))


def all_chats(corpus: Corpus, rng: random.Random) -> list[str]:
    """One epoch's chats, shuffled: 60 % of the passages, a third of the speech, all the coffee."""
    chats = [chat for book in corpus.books for chat in story_chats(book, rng) if rng.random() < 0.6]
    chats += [chat for book in corpus.books for chat in spoken_chats(book, rng) if rng.random() < 0.5]
    chats += [chat for chat in play_chats(corpus.plays, rng) if rng.random() < 0.35]
    chats += [coffee_chat(dialogue, rng) for dialogue in corpus.dialogues]
    for _ in range(6):
        for question, answer in _PLAIN_ANSWERS:
            messages: list[Message] = [("user", question), ("assistant", answer)]
            chats.append(render_chat(_system(_ASSISTANT_SYSTEM, 0.3, rng) + messages))
    rng.shuffle(chats)
    return chats


def _passages(document: Document, rng: random.Random) -> Iterator[str]:
    """Whole paragraphs, joined until a random length of 30 to 160 words is reached."""
    passage: list[str] = []
    words, target = 0, rng.randint(30, 160)
    for paragraph in document:
        passage.append(paragraph)
        words += paragraph.count(" ") + 1
        if words >= target:
            yield "\n\n".join(passage)
            passage, words, target = [], 0, rng.randint(30, 160)
    if words >= 20:
        yield "\n\n".join(passage)


def _request(book: Book, passage: str, rng: random.Random) -> list[Message]:
    """A request that `passage` answers, and the answer."""
    kind = rng.random()
    subject = _subject(passage, rng)
    if kind < 0.4 and subject:
        return [("user", rng.choice(_TELL_ABOUT).format(subject)), ("assistant", passage)]
    if kind < 0.75:
        ends = [match.end() for match in _SENTENCE_END.finditer(passage)]
        ends = [end for end in ends if 30 <= end <= 300 and len(passage) - end >= 80]
        if ends:
            cut = rng.choice(ends)
            opening = passage[:cut].strip()
            return [
                ("user", rng.choice(_CONTINUE).format(opening)),
                ("assistant", passage[cut:]),
            ]
    if kind < 0.87:
        request = rng.choice(_READ).format(title=book.title, author=book.author)
        return [("user", request), ("assistant", passage)]
    return [("user", rng.choice(_TELL)), ("assistant", passage)]


def _subject(passage: str, rng: random.Random) -> str:
    """What a passage is about: a name that recurs in it, or a common noun of fairy tales."""
    names = Counter(name for name in _NAME.findall(passage) if name not in _NOT_NAMES)
    nouns = Counter(_SUBJECTS.findall(passage))
    found = [name for name, count in names.most_common(2) if count >= 2]
    for noun, _ in nouns.most_common(2):
        article = "an" if noun[0] in "aeiou" else "a"
        found.append(rng.choice((f"the {noun}", f"{article} {noun}")))
    return rng.choice(found) if found else ""


def _system(prompts: Sequence[str], share: float, rng: random.Random) -> list[Message]:
    return [("system", rng.choice(prompts))] if rng.random() < share else []


def _alternate(texts: Sequence[str]) -> list[Message]:
    return [("assistant" if i % 2 else "user", text) for i, text in enumerate(texts)]
