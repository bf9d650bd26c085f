"""Questions about pictures, with short answers from a closed vocabulary.

One function per task makes all questions that a scene allows; the suite picks from them, the training packs many behind
one picture. Every question has exactly one right answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mmaccel.suite.rng import Rng
from mmaccel.suite.scene import CHARACTERS, COLOURS, PLURALS, SHAPES, Box, Scene, Thing, snap

SIDES = ("left", "right", "above", "below")
_PHRASES = {"left": "left of", "right": "right of", "above": "above", "below": "below"}
DESCRIBE = "describe the picture ."


@dataclass(frozen=True)
class Turn:
    """One question and its answer; ``detail`` names what makes it easy or hard (for reading, the characters' size)."""

    task: str
    question: str
    answer: str
    detail: str = ""


def write_box(box: Box) -> str:
    """A box as four coordinates with two decimals, in twentieths: ``"0.25 0.40 0.55 0.70"``."""
    return " ".join(f"{snap(value) / 20:.2f}" for value in box)


def read_box(text: str) -> Box | None:
    """The box in an answer, or None."""
    try:
        left, top, right, bottom = (float(word) for word in text.split())
    except ValueError:
        return None
    return left, top, right, bottom


def _named(things: tuple[Thing, ...], attribute: str) -> list[Thing]:
    values = [getattr(thing, attribute) for thing in things]
    return [thing for thing in things if values.count(getattr(thing, attribute)) == 1]


def colour(scene: Scene, rng: Rng) -> list[Turn]:
    """Ask for the colour of the only thing of its shape."""
    return [
        Turn("colour", f"what colour is the {thing.shape} ?", thing.colour) for thing in _named(scene.things, "shape")
    ]


def shape(scene: Scene, rng: Rng) -> list[Turn]:
    """Ask for the shape of the only thing of its colour."""
    return [
        Turn("shape", f"what shape is the {thing.colour} object ?", thing.shape)
        for thing in _named(scene.things, "colour")
    ]


def count(scene: Scene, rng: Rng) -> list[Turn]:
    """Ask how many things there are: in all, of a shape, of a colour."""
    turns = [Turn("count", "how many objects are there ?", str(len(scene.things)), "all")]
    shapes, colours = [thing.shape for thing in scene.things], [thing.colour for thing in scene.things]
    for name in {**dict.fromkeys(shapes), rng.pick(SHAPES): None}:
        turns.append(Turn("count", f"how many {PLURALS[name]} are there ?", str(shapes.count(name)), "shape"))
    for name in {**dict.fromkeys(colours), rng.pick(COLOURS): None}:
        turns.append(Turn("count", f"how many {name} objects are there ?", str(colours.count(name)), "colour"))
    return turns


def existence(scene: Scene, rng: Rng) -> list[Turn]:
    """Ask whether a thing is there; absent ones share their colour or shape with a present one."""
    present = {thing.name for thing in scene.things}
    turns = []
    for thing in scene.things:
        turns.append(Turn("existence", f"is there a {thing.name} ?", "yes"))
        other = (thing.colour, rng.pick(SHAPES)) if rng.chance(0.5) else (rng.pick(COLOURS), thing.shape)
        name = " ".join(other)
        if name not in present:
            turns.append(Turn("existence", f"is there a {name} ?", "no"))
    return turns


def side_of(thing: Thing, other: Thing) -> str | None:
    """The side of the other thing on which a thing lies, or None if that is not clear."""
    across, down = (mine - its for mine, its in zip(thing.centre, other.centre, strict=True))
    if max(abs(across), abs(down)) < 0.18 or min(abs(across), abs(down)) > 0.6 * max(abs(across), abs(down)):
        return None
    if abs(across) > abs(down):
        return "left" if across < 0 else "right"
    return "above" if down < 0 else "below"


def relation(scene: Scene, rng: Rng) -> list[Turn]:
    """Ask on which side of one thing another lies, openly and as yes or no."""
    opposite = {"left": "right", "right": "left", "above": "below", "below": "above"}
    turns = []
    for thing in (unique := scene.unique()):
        for other in unique:
            if thing is other or (side := side_of(thing, other)) is None:
                continue
            turns.append(Turn("relation", f"on which side of the {other.name} is the {thing.name} ?", side, "open"))
            asked = side if (yes := rng.chance(0.5)) else opposite[side]
            question = f"is the {thing.name} {_PHRASES[asked]} the {other.name} ?"
            turns.append(Turn("relation", question, "yes" if yes else "no", "closed"))
    return turns


def reading(scene: Scene, rng: Rng) -> list[Turn]:
    """Ask for the character on a thing, and for the code on the sign."""
    turns = [
        Turn("reading", f"which character is on the {thing.name} ?", thing.character, thing.size)
        for thing in scene.unique()
        if thing.character
    ]
    if scene.sign:
        turns.append(Turn("reading", "what does the sign say ?", " ".join(scene.sign.text), scene.sign.size))
    return turns


def grounding(scene: Scene, rng: Rng) -> list[Turn]:
    """Ask for the box of a thing."""
    return [Turn("grounding", f"where is the {thing.name} ?", write_box(thing.box)) for thing in scene.unique()]


def description(scene: Scene) -> Turn:
    """Ask for the whole scene in a fixed order: box, name and character of every thing from the left, then the sign."""
    parts = [f"{write_box(thing.box)} {thing.name} {thing.character or 'plain'} ;" for thing in scene.ordered()]
    if scene.sign:
        parts.append(f"{write_box(scene.sign.box)} sign {' '.join(scene.sign.text)} ;")
    return Turn("description", DESCRIBE, " ".join(parts))


PICTURE_TASKS: dict[str, Callable[[Scene, Rng], list[Turn]]] = {
    "colour": colour,
    "shape": shape,
    "count": count,
    "existence": existence,
    "relation": relation,
    "reading": reading,
    "grounding": grounding,
}
"""The tasks about one picture."""


def comparison(first: Scene, second: Scene, rng: Rng) -> list[Turn]:
    """Ask questions that need both of two pictures."""
    one, two = len(first.things), len(second.things)
    more = "neither" if one == two else "first" if one > two else "second"
    turns = [Turn("comparison", "which picture has more objects ?", more, "more")]
    for noun, attribute, options in (("object", "colour", COLOURS), ("", "shape", SHAPES)):
        mine, its = ({getattr(thing, attribute) for thing in scene.things} for scene in (first, second))
        for value in rng.some(sorted(mine ^ its), 2) + rng.some(sorted(mine & its), 1) + [rng.pick(options)]:
            answer = {(True, True): "both", (True, False): "first", (False, True): "second"}
            question = f"which picture has a {value} {noun} ?".replace("  ", " ")
            turns.append(Turn("comparison", question, answer.get((value in mine, value in its), "neither"), attribute))
    return list(dict.fromkeys(turns))


def vocabulary() -> list[str]:
    """Every word that questions, answers and descriptions are made of, sorted."""
    words = {*COLOURS, *SHAPES, *PLURALS.values(), *CHARACTERS, *SIDES, *(f"{step / 20:.2f}" for step in range(21))}
    words |= set("what colour is the shape object how many objects are there a on which side of does sign say".split())
    words |= set("character where describe picture has more first second both neither yes no plain ? . ; ,".split())
    words |= set("up down time times move direction appear appears in or change changes".split())
    words |= set("disappears after clip video happen happens last code".split())
    return sorted(words)
