"""Clips: scenes over time, with questions about order, direction, number of occurrences, a needle, and what changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from mmaccel.suite.dice import Dice
from mmaccel.suite.questions import Turn
from mmaccel.suite.scene import (
    COLOURS,
    SHAPES,
    Box,
    Ground,
    Scene,
    Sign,
    Thing,
    render,
    render_ground,
    repaint,
    sample_ground,
    sample_sign,
    sample_thing,
)

_LARGEST_SIDE = 0.38
_DIRECTIONS = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0)}


@dataclass(frozen=True)
class Clip:
    """A clip as data: one scene a frame, all on the same ground."""

    frames: tuple[Scene, ...]
    fps: float = 4.0


def render_clip(clip: Clip, pixels: int = 112) -> np.ndarray:
    """Draw a clip: uint8 ``[frames, pixels, pixels, 3]``."""
    ground = render_ground(clip.frames[0].ground, pixels)
    return np.stack([render(scene, pixels, ground=ground, frame=number) for number, scene in enumerate(clip.frames)])


def _things(dice: Dice, count: int, taken: list[Box] | None = None) -> list[Thing]:
    """``count`` things of different shapes and different colours that do not overlap."""
    taken = list(taken or ())
    shapes, colours = dice.some(SHAPES, count), dice.some(COLOURS, count)
    things: list[Thing] = []
    for shape, colour in zip(shapes, colours, strict=True):
        thing = sample_thing(dice, taken, _LARGEST_SIDE, written=0.2)
        if thing is None:
            break
        things.append(repaint(replace(thing, shape=shape), colour, dice))
        taken.append(thing.box)
    return things


def _clip(ground: Ground, frames: list[list[Thing]], signs: dict[int, Sign] | None = None) -> Clip:
    return Clip(tuple(Scene(tuple(things), (signs or {}).get(at), ground) for at, things in enumerate(frames)))


def order(dice: Dice, length: int) -> tuple[Clip, list[Turn]] | None:
    """Things appear one after the other and stay."""
    things = _things(dice, 3)
    if len(things) < 2:
        return None
    starts = sorted(dice.some(range(1, length - 1, 2), len(things)))
    frames = [[thing for thing, start in zip(things, starts, strict=True) if start <= at] for at in range(length)]
    first, last = things[0].name, things[-1].name
    turns = [
        Turn("order", "which object appears first ?", first, "first"),
        Turn("order", "which object appears last ?", last, "last"),
    ]
    return _clip(sample_ground(dice), frames), turns


def motion(dice: Dice, length: int) -> tuple[Clip, list[Turn]] | None:
    """One thing crosses the picture, behind or in front of others that stand still."""
    things = _things(dice, dice.integer(1, 3))
    if not things:
        return None
    mover, direction = things[0], dice.pick(tuple(_DIRECTIONS))
    side = mover.box[2] - mover.box[0]
    path, (along_x, along_y) = dice.between(0.35, 0.95 - side), _DIRECTIONS[direction]
    start = dice.between(0.01, 0.98 - side - path)
    frames = []
    for at in range(length):
        done = start + path * at / (length - 1)
        left = mover.box[0] if not along_x else done if along_x > 0 else 0.99 - side - done
        top = mover.box[1] if not along_y else done if along_y > 0 else 0.99 - side - done
        frames.append([*things[1:], replace(mover, box=(left, top, left + side, top + side))])
    return _clip(sample_ground(dice), frames), [
        Turn("motion", f"in which direction does the {mover.name} move ?", direction)
    ]


def occurrences(dice: Dice, length: int) -> tuple[Clip, list[Turn]] | None:
    """One thing comes and goes several times."""
    things = _things(dice, dice.integer(1, 2))
    if not things:
        return None
    times = dice.integer(1, min(4, length // 4))
    slot = length // times
    shown: set[int] = set()
    for number in range(times):
        stay = dice.integer(2, max(2, slot - 2))
        start = number * slot + dice.integer(0, max(0, slot - 2 - stay))
        shown |= set(range(start, start + stay))
    frames = [[*things[1:], *([things[0]] if at in shown else [])] for at in range(length)]
    question = f"how many times does the {things[0].name} appear ?"
    return _clip(sample_ground(dice), frames), [Turn("occurrences", question, str(times))]


def needle(dice: Dice, length: int) -> tuple[Clip, list[Turn]] | None:
    """A sign is shown for a moment."""
    sign = sample_sign(dice, [])
    if sign is None:
        return None
    things = _things(dice, dice.integer(1, 3), [sign.box])
    start = 2 * dice.integer(0, length // 2 - 1)
    signs = dict.fromkeys(range(start, start + 2), sign)
    return _clip(sample_ground(dice), [things] * length, signs), [
        Turn("needle", "what does the sign say ?", " ".join(sign.text), sign.size)
    ]


def change(dice: Dice, length: int) -> tuple[Clip, list[Turn]] | None:
    """Between two scenes one thing changes its colour, goes or comes."""
    things = _things(dice, 3)
    if len(things) < 2:
        return None
    target, kind = things[0], dice.pick(("colour", "goes", "comes"))
    others = things[1:]
    if kind == "colour":
        fresh = dice.pick([colour for colour in COLOURS if all(colour != thing.colour for thing in things)])
        before, after = things, [*others, repaint(target, fresh, dice)]
        turn = Turn("change", "which object changes colour ?", target.shape, kind)
    elif kind == "goes":
        before, after, turn = things, others, Turn("change", "which object disappears ?", target.name, kind)
    else:
        before, after, turn = others, things, Turn("change", "which object appears ?", target.name, kind)
    cut = dice.integer(length // 4, 3 * length // 4)
    return _clip(sample_ground(dice), [before if at < cut else after for at in range(length)]), [turn]


CLIP_TASKS: dict[str, Callable[[Dice, int], tuple[Clip, list[Turn]] | None]] = {
    "order": order,
    "motion": motion,
    "occurrences": occurrences,
    "needle": needle,
    "change": change,
}
"""The tasks about a clip: from dice and a number of frames to a clip and its questions, or None for a bad throw."""
