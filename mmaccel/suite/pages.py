"""Pages of text with questions whose answers stand on them: for models that read pages (:mod:`mmaccel.families.pages`).

A page is lines of made-up news from a small town. Some lines hold the facts that are asked for, at random places; the others
are filler. Every kind of question tests another thing that a smaller cache may lose.

>>> from mmaccel.suite import make_page
>>> page = make_page("number", "test", 0, lambda text: len(text.split()) <= 60)
>>> print(page.questions, page.answers)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from mmaccel.suite.rng import Rng, item_seed

PAGE_KINDS = (
    "number",
    "name",
    "two-facts",
    "second-of-three",
    "yes-no",
    "copy-line",
    "long",
    "question-first",
    "later",
)
"""Kinds of questions about pages:

- ``number``, ``name`` : one fact.
- ``two-facts`` : a number and a name, asked for at once.
- ``second-of-three`` : the second of three facts: a number between two names, or a name between two numbers.
- ``yes-no`` : whether something is so.
- ``copy-line`` : a line, word by word.
- ``long`` : a code of ten numbers, with its sentence about 64 tokens.
- ``question-first`` : as ``number``, with the question before the page.
- ``later`` : two questions in two turns, of which the second is judged: what was evicted for the first one is missed.
"""

#: streams of seeds that the tasks about pictures and clips do not use
_FIRST_STREAM = 128

_COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "grey", "orange", "purple")
_THINGS = ("tower", "gate", "bridge", "house", "boat", "tent", "barn", "well", "door", "cabin", "chapel", "wagon")
_NAMES = (
    *(
        "Anna",
        "Peter",
        "Maria",
        "Thomas",
        "Laura",
        "Martin",
        "Susan",
        "David",
        "Helen",
        "Robert",
        "Emma",
        "Daniel",
        "Alice",
    ),
    *("George", "Julia", "Henry", "Clara", "Simon", "Nora", "Oscar"),
)
_ROLES = (
    "baker",
    "doctor",
    "teacher",
    "gardener",
    "painter",
    "driver",
    "singer",
    "farmer",
    "sailor",
    "tailor",
    "lawyer",
)
_PLACES = (
    "market",
    "river",
    "station",
    "library",
    "school",
    "harbour",
    "park",
    "church",
    "museum",
    "theatre",
    "mill",
    "square",
)
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_WEATHER = ("rain", "snow", "wind", "fog", "sun", "frost", "heat")
_GOODS = (
    "apples",
    "bread",
    "cheese",
    "books",
    "lamps",
    "chairs",
    "flowers",
    "carpets",
    "shoes",
    "clocks",
    "ropes",
    "candles",
)
_VERBS = ("touch", "open", "clean", "hide", "forget", "carry", "lend", "drop", "wake", "feed", "shake", "count")
_TOOLS = (
    *(
        "window",
        "kettle",
        "piano",
        "ladder",
        "mirror",
        "basket",
        "hammer",
        "blanket",
        "violin",
        "camera",
        "pillow",
        "bottle",
    ),
    *("umbrella", "compass", "trumpet"),
)
_TIMES = ("breakfast", "sunset", "midnight", "dinner", "lunch", "dawn")
_DOING = ("repaired", "painted", "sold", "cleaned", "bought", "moved", "measured", "opened", "closed", "photographed")


@dataclass(frozen=True)
class Page:
    """A page and its questions: two turns for ``later``, else one. The answer to the last one is judged."""

    name: str
    kind: str
    text: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]

    @property
    def question_first(self) -> bool:
        """Whether the question comes before the page."""
        return self.kind == "question-first"

    def is_right(self, answer: str) -> bool:
        """Whether an answer to the last question is right.

        The numbers and names in it must be those that are expected, and no others; for ``two-facts`` they come first, in
        either order, since the model repeats itself. Of a line every word counts, of ``yes-no`` whichever of both words comes
        first.
        """
        wanted = self.answers[-1]
        if self.kind in ("copy-line", "long"):
            return _words(wanted) == _words(answer)[: len(_words(wanted))]
        told = _FACTS[self.kind == "yes-no"]
        said, facts = ([word.lower() for word in told.findall(text)] for text in (answer, wanted))
        if self.kind == "two-facts":
            return sorted(said[:2]) == sorted(facts)
        return said[:1] == facts if self.kind == "yes-no" else said == facts


#: what counts in an answer: numbers and names, or yes and no
_FACTS = tuple(re.compile(one, re.IGNORECASE) for one in (r"\d\d+|" + "|".join(_NAMES), r"\b(?:yes|no)\b"))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _filler(rng: Rng) -> str:
    """A line without numbers and secrets."""
    place, other = rng.some(_PLACES, 2)
    role, second = rng.some(_ROLES, 2)
    return rng.pick(
        (
            f"On {rng.pick(_DAYS)} the {role} walked from the {place} to the {other} in the {rng.pick(_WEATHER)}.",
            f"The {role} {rng.pick(_DOING)} the old {rng.pick(_GOODS)} near the {place}.",
            f"Many people came to the {place} to buy {rng.pick(_GOODS)} and {rng.pick(_GOODS)}.",
            f"There was {rng.pick(_WEATHER)} over the {place}, so the {role} and the {second} stayed inside.",
            f"The {place} is closed on {rng.pick(_DAYS)}, but the {other} is open.",
            f"A {role} from the next village {rng.pick(_DOING)} {rng.pick(_GOODS)} behind the {place}.",
            f"After the {rng.pick(_WEATHER)} the {role} helped the {second} to carry {rng.pick(_GOODS)}.",
        )
    )


def _number(rng: Rng) -> str:
    return str(rng.integer(1000, 9999))


def _secrets(rng: Rng, count: int) -> list[tuple[str, str]]:
    """Things and their numbers."""
    things = rng.some(_THINGS, count)
    colours = rng.some(_COLOURS, count)
    return [(f"{colour} {thing}", _number(rng)) for colour, thing in zip(colours, things, strict=True)]


def _secret(thing: str, number: str) -> str:
    return f"The secret number of the {thing} is {number}."


_Fact = tuple[str, str, str]


def _number_of(thing: str, number: str, name: str) -> _Fact:
    """Line, question and answer."""
    return _secret(thing, number), f"What is the secret number of the {thing}?", number


def _name_of(thing: str, number: str, name: str) -> _Fact:
    """Line, question and answer."""
    return f"The name of the owner of the {thing} is {name}.", f"What is the name of the owner of the {thing}?", name


_Made = tuple[list[str], tuple[str, ...], tuple[str, ...]]


def _one_number(rng: Rng) -> _Made:
    ((thing, number),) = _secrets(rng, 1)
    return [_secret(thing, number)], (f"What is the secret number of the {thing}?",), (number,)


def _thing(rng: Rng) -> str:
    return f"{rng.pick(_COLOURS)} {rng.pick(_THINGS)}"


def _one_name(rng: Rng) -> _Made:
    thing, name = _thing(rng), rng.pick(_NAMES)
    question = f"What is the name of the owner of the {thing}?"
    return [f"The name of the owner of the {thing} is {name}."], (question,), (name,)


def _two_facts(rng: Rng) -> _Made:
    (numbered, owned), name, number = rng.some(_THINGS, 2), rng.pick(_NAMES), _number(rng)
    numbered, owned = f"{rng.pick(_COLOURS)} {numbered}", f"{rng.pick(_COLOURS)} {owned}"
    lines = [_secret(numbered, number), f"The name of the owner of the {owned} is {name}."]
    asked = f"1. What is the secret number of the {numbered}? 2. What is the name of the owner of the {owned}?"
    return rng.shuffled(lines), (f"Answer two questions. {asked}",), (f"{number} {name}",)


def _second_of_three(rng: Rng) -> _Made:
    """Not three numbers: of 44 such questions about pages of the split ``val`` the full model answers 27."""
    pairs, names, between = _secrets(rng, 3), rng.some(_NAMES, 3), rng.pick((_number_of, _name_of))
    around = _name_of if between is _number_of else _number_of
    facts = [
        made(thing, number, name)
        for made, (thing, number), name in zip((around, between, around), pairs, names, strict=True)
    ]
    return [line for line, _, _ in facts], (facts[1][1],), (facts[1][2],)


def _yes_no(rng: Rng) -> _Made:
    thing, answer = _thing(rng), rng.pick(("yes", "no"))
    question = f"Is the {thing} for sale?"
    return [f'{question} The answer is "{answer.capitalize()}".'], (question,), (answer,)


def _copy_line(rng: Rng) -> _Made:
    """A rule of words that the filler does not have."""
    thing, rule = _thing(rng), f"{rng.pick(('never', 'always'))} {rng.pick(_VERBS)} the {rng.pick(_TOOLS)}"
    line = f"The rule of the {thing} is: {rule} {rng.pick(('before', 'after'))} {rng.pick(_TIMES)}."
    return [line], (f"What is the rule of the {thing}?",), (line,)


def _long(rng: Rng) -> _Made:
    """Every number ends in another digit, so that its last digit says which number comes next."""
    thing = _thing(rng)
    numbers = [f"{rng.integer(100, 999)}{last}" for last in rng.shuffled(range(10))]
    line = f"The code of the {thing} is {' '.join(numbers)}."
    return [line], (f"What is the code of the {thing}?",), (line,)


def _later(rng: Rng) -> _Made:
    pairs = _secrets(rng, 2)
    asked = rng.shuffled(pairs)
    questions = tuple(f"What is the secret number of the {thing}?" for thing, _ in asked)
    return [_secret(*pair) for pair in pairs], questions, tuple(number for _, number in asked)


_MAKERS: dict[str, Callable[[Rng], _Made]] = {
    "number": _one_number,
    "name": _one_name,
    "two-facts": _two_facts,
    "second-of-three": _second_of_three,
    "yes-no": _yes_no,
    "copy-line": _copy_line,
    "long": _long,
    "question-first": _one_number,
    "later": _later,
}


def make_page(kind: str, split: str, index: int, fits: Callable[[str], bool]) -> Page:
    """Page number ``index`` of a kind in a split; the same arguments give the same page on every machine.

    Parameters
    ----------
    kind : one of :data:`PAGE_KINDS`.
    split : ``"train"``, ``"val"`` or ``"test"``; their seeds are disjoint.
    index : number of the page, ``0 <= index < 2**40``.
    fits : whether a text fits the page; lines of filler are added while they do.

    Raises
    ------
    ValueError
        If there is no such kind, or the lines that are asked for do not fit.
    """
    if kind not in _MAKERS:
        raise ValueError(f"unknown kind {kind!r}; choose from {', '.join(PAGE_KINDS)}")
    rng = Rng(item_seed(split, index, _FIRST_STREAM + PAGE_KINDS.index(kind)))
    facts, questions, answers = _MAKERS[kind](rng)
    lines = list(facts)
    if not fits("\n".join(lines)):
        raise ValueError(f"the lines that {kind!r} asks for do not fit the page")
    while fits("\n".join([*lines, more := _filler(rng)])):
        lines.append(more)
    filler = lines[len(facts) :]
    for place, fact in zip(sorted(rng.some(range(len(lines)), len(facts))), facts, strict=True):
        filler.insert(place, fact)
    return Page(f"{split}-{kind}-{index:06d}", kind, "\n".join(filler), questions, answers)
