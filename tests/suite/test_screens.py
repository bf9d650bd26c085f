"""Sessions of screens: every question has one answer, on the screen that it names."""

from __future__ import annotations

from mmaccel.suite import SPLITS, Rng, make_screens
from mmaccel.suite.document import sample_document
from mmaccel.suite.questions import Turn
from mmaccel.suite.screens import sample_screens, screen_questions

STEPS = {"before this one": 1, "two steps": 2, "three steps": 3, "four steps": 4, "five steps": 5}


def named(question: str, newest: int) -> tuple[int, str]:
    """The number of the screen that a question is about, and what it asks."""
    where, comma, asked = question.partition(", ")
    if not comma or not where.startswith("On the"):
        return newest, question
    if where == "On the first screen":
        return 0, asked
    back = (
        1
        if where == "On the screen before this one"
        else STEPS[where.removeprefix("On the screen ")[: -len(" before this one")]]
    )
    return newest - back, asked


def test_answers_stand_on_the_screen_that_a_question_names_and_on_no_other():
    for number in range(150):
        session = make_screens("val", number)
        for newest, (_, turn) in enumerate(session):
            shown, asked = named(turn.question, newest)
            assert turn.detail == str(newest - shown) and turn.task == "screens"
            texts = [" ".join(page.text.split()) for page, _ in session[: newest + 1]]
            assert turn.answer in texts[shown] or turn.answer in texts[shown].replace(":", "")
            if asked.lower() == "what time is it?":
                assert [text.split()[0] for text in texts].count(turn.answer) == 1
            if asked.lower() == "how full is the battery?":
                assert [text.split()[1] for text in texts].count(turn.answer) == 1


def test_sessions_have_three_to_six_screens_and_ask_about_old_ones():
    sessions = [make_screens("test", number) for number in range(300)]
    assert {len(session) for session in sessions} == {3, 4, 5, 6}
    assert all(session[0][1].detail == "0" for session in sessions)
    later = [turn.detail for session in sessions for _, turn in session[1:]]
    assert 0.45 < later.count("0") / len(later) < 0.55
    assert set(later) == {"0", "1", "2", "3", "4", "5"}
    asked = {turn.question.partition(",")[0] for session in sessions for _, turn in session if turn.detail != "0"}
    assert asked == {
        "On the first screen",
        "On the screen before this one",
        *(f"On the screen {count} steps before this one" for count in ("two", "three", "four", "five")),
    }


def test_what_two_screens_answer_alike_is_not_asked():
    clock, other = Turn("screen", "What time is it?", "4:00"), Turn("screen", "Who wrote hello?", "Anna")
    turns = screen_questions([[clock, other], [clock]], Rng(0))
    assert [(turn.question[-16:], turn.answer, turn.detail) for turn in turns] == [("who wrote hello?", "Anna", "1")]
    later = Turn("screen", "What time is it?", "4:15")
    turns = screen_questions([[clock], [later]], Rng(0))
    assert [(turn.answer, turn.detail) for turn in turns] == [("4:00", "1"), ("4:15", "0")]
    assert turns[0].question.endswith(", what time is it?") and turns[1].question == "What time is it?"


def test_every_question_of_the_last_turn_is_offered():
    session, possible = sample_screens(Rng(3), 3)
    assert session[-1][1] in possible and {turn.detail for turn in possible} == {"0", "1", "2"}
    assert len({turn.question for turn in possible}) == len(possible)


def test_splits_have_sessions_of_their_own_and_the_same_ones_again():
    texts = {make_screens(split, number)[0][0].text for split in SPLITS for number in range(5)}
    assert len(texts) == 15
    assert make_screens("val", 3) == make_screens("val", 3)
    assert {page.kind for page, _ in make_screens("test", 0)} == {sample_document("screen", Rng(0))[0].kind}
