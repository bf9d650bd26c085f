"""Clips: scenes over time, with questions about order, direction, number of occurrences, a needle, and what changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from mmaccel.suite.questions import Turn
from mmaccel.suite.rng import Rng
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


def _things(rng: Rng, count: int, taken: list[Box] | None = None) -> list[Thing]:
    """``count`` things of different shapes and different colours that do not overlap."""
    taken = list(taken or ())
    shapes, colours = rng.some(SHAPES, count), rng.some(COLOURS, count)
    things: list[Thing] = []
    for shape, colour in zip(shapes, colours, strict=True):
        thing = sample_thing(rng, taken, _LARGEST_SIDE, written=0.2)
        if thing is None:
            break
        things.append(repaint(replace(thing, shape=shape), colour, rng))
        taken.append(thing.box)
    return things


def _clip(ground: Ground, frames: list[list[Thing]], signs: dict[int, Sign] | None = None) -> Clip:
    return Clip(tuple(Scene(tuple(things), (signs or {}).get(at), ground) for at, things in enumerate(frames)))


def order(rng: Rng, length: int) -> tuple[Clip, list[Turn]] | None:
    """Things appear one after the other and stay."""
    things = _things(rng, 3)
    if len(things) < 2:
        return None
    starts = sorted(rng.some(range(1, length - 1, 2), len(things)))
    frames = [[thing for thing, start in zip(things, starts, strict=True) if start <= at] for at in range(length)]
    first, last = things[0].name, things[-1].name
    turns = [
        Turn("order", "which object appears first ?", first, "first"),
        Turn("order", "which object appears last ?", last, "last"),
    ]
    return _clip(sample_ground(rng), frames), turns


def motion(rng: Rng, length: int) -> tuple[Clip, list[Turn]] | None:
    """One thing crosses the picture, behind or in front of others that stand still."""
    things = _things(rng, rng.integer(1, 3))
    if not things:
        return None
    mover, direction = things[0], rng.pick(tuple(_DIRECTIONS))
    side = mover.box[2] - mover.box[0]
    path, (along_x, along_y) = rng.between(0.35, 0.95 - side), _DIRECTIONS[direction]
    start = rng.between(0.01, 0.98 - side - path)
    frames = []
    for at in range(length):
        done = start + path * at / (length - 1)
        left = mover.box[0] if not along_x else done if along_x > 0 else 0.99 - side - done
        top = mover.box[1] if not along_y else done if along_y > 0 else 0.99 - side - done
        frames.append([*things[1:], replace(mover, box=(left, top, left + side, top + side))])
    return _clip(sample_ground(rng), frames), [
        Turn("motion", f"in which direction does the {mover.name} move ?", direction)
    ]


def occurrences(rng: Rng, length: int) -> tuple[Clip, list[Turn]] | None:
    """One thing comes and goes several times."""
    things = _things(rng, rng.integer(1, 2))
    if not things:
        return None
    times = rng.integer(1, min(4, length // 4))
    slot = length // times
    shown: set[int] = set()
    for number in range(times):
        stay = rng.integer(2, max(2, slot - 2))
        start = number * slot + rng.integer(0, max(0, slot - 2 - stay))
        shown |= set(range(start, start + stay))
    frames = [[*things[1:], *([things[0]] if at in shown else [])] for at in range(length)]
    question = f"how many times does the {things[0].name} appear ?"
    return _clip(sample_ground(rng), frames), [Turn("occurrences", question, str(times))]


def needle(rng: Rng, length: int) -> tuple[Clip, list[Turn]] | None:
    """A sign is shown for a moment."""
    sign = sample_sign(rng, [])
    if sign is None:
        return None
    things = _things(rng, rng.integer(1, 3), [sign.box])
    start = 2 * rng.integer(0, length // 2 - 1)
    signs = dict.fromkeys(range(start, start + 2), sign)
    return _clip(sample_ground(rng), [things] * length, signs), [
        Turn("needle", "what does the sign say ?", " ".join(sign.text), sign.size)
    ]


def change(rng: Rng, length: int) -> tuple[Clip, list[Turn]] | None:
    """Between two scenes one thing changes its colour, goes or comes."""
    things = _things(rng, 3)
    if len(things) < 2:
        return None
    target, kind = things[0], rng.pick(("colour", "goes", "comes"))
    others = things[1:]
    if kind == "colour":
        fresh = rng.pick([colour for colour in COLOURS if all(colour != thing.colour for thing in things)])
        before, after = things, [*others, repaint(target, fresh, rng)]
        turn = Turn("change", "which object changes colour ?", target.shape, kind)
    elif kind == "goes":
        before, after, turn = things, others, Turn("change", "which object disappears ?", target.name, kind)
    else:
        before, after, turn = others, things, Turn("change", "which object appears ?", target.name, kind)
    cut = rng.integer(length // 4, 3 * length // 4)
    return _clip(sample_ground(rng), [before if at < cut else after for at in range(length)]), [turn]


CLIP_TASKS: dict[str, Callable[[Rng, int], tuple[Clip, list[Turn]] | None]] = {
    "order": order,
    "motion": motion,
    "occurrences": occurrences,
    "needle": needle,
    "change": change,
}
"""The tasks about a clip: from rng and a number of frames to a clip and its questions, or None for a bad throw."""
