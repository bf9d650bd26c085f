"""Sessions of an agent: a chat in which every turn shows a new screen, with questions about it or about an earlier one."""

from __future__ import annotations

from collections.abc import Sequence

from mmaccel.suite.document import Document, sample_document
from mmaccel.suite.questions import Turn
from mmaccel.suite.rng import Rng, item_seed

_STREAM = 160
_STEPS = ("zero", "one", "two", "three", "four", "five")


def _place(shown: int, newest: int) -> list[str]:
    """The ways to name an earlier screen."""
    back = newest - shown
    named = ["on the screen before this one" if back == 1 else f"on the screen {_STEPS[back]} steps before this one"]
    return named + ["on the first screen"] * (shown == 0)


def screen_questions(asked: Sequence[Sequence[Turn]], rng: Rng) -> list[Turn]:
    """Every question that the screens so far allow: ``asked`` has the short ones about each, the newest last.

    A question names the screen that it is about unless that is the newest. The ``detail`` of a turn is the age of that screen:
    "0" for the newest, "1" for the one before. No two screens give the same answer to a question.
    """
    newest, turns = len(asked) - 1, []
    for shown, pool in enumerate(asked):
        elsewhere = {(turn.question, turn.answer) for at, other in enumerate(asked) if at != shown for turn in other}
        for turn in pool:
            if (turn.question, turn.answer) in elsewhere:
                continue
            question = turn.question
            if shown < newest:
                place = rng.pick(_place(shown, newest))
                question = f"{place.capitalize()}, {question[0].lower()}{question[1:]}"
            turns.append(Turn("screens", question, turn.answer, str(newest - shown)))
    return turns


def sample_screens(rng: Rng, count: int) -> tuple[list[tuple[Document, Turn]], list[Turn]]:
    """A session of ``count`` screens with the question of each turn, and every question that its last turn could have."""
    session: list[tuple[Document, Turn]] = []
    asked: list[list[Turn]] = []
    possible: list[Turn] = []
    while len(session) < count:
        page, turns = sample_document("screen", rng)
        short = [turn for turn in turns if turn.detail == "short"]
        possible = screen_questions([*asked, short], rng)
        ages = sorted({turn.detail for turn in possible})
        if "0" not in ages:
            continue
        age = "0" if len(ages) == 1 or rng.chance(0.5) else rng.pick(ages[1:])
        asked.append(short)
        session.append((page, rng.pick([turn for turn in possible if turn.detail == age])))
    return session, possible


def make_screens(split: str, index: int) -> list[tuple[Document, Turn]]:
    """Session number ``index`` of a split: three to six turns, each a new screen and a question with its answer.

    About half of the questions after the first are about the newest screen, the others about an earlier one, which they name
    ("On the first screen, what time is it?"); ``detail`` of a turn is the age of the screen with the answer, in turns. The
    same arguments give the same session on every machine.

    Parameters
    ----------
    split : ``"train"``, ``"val"`` or ``"test"``; their seeds are disjoint.
    index : number of the session, ``0 <= index < 2**40``.
    """
    rng = Rng(item_seed(split, index, _STREAM))
    return sample_screens(rng, rng.integer(3, 6))[0]
