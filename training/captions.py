"""Texts about scenes for contrastive training: captions and questions, and which pictures and cells each one means."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mmaccel.suite import Rng, Scene, cell_labels, item_seed, sample_scene
from mmaccel.suite.questions import PICTURE_TASKS
from mmaccel.suite.scene import CHARACTERS, COLOURS, MAX_THINGS, PLURALS, SHAPES

Label = tuple[int, int, int]
"""Shape, colour and character, numbered as in :class:`mmaccel.suite.scene.CellLabels`; in a text 0 means any."""

SIGN = len(SHAPES) + 1
NOUNS = {
    **{word: number for number, shape in enumerate(SHAPES, 1) for word in (shape, PLURALS[shape])},
    **{"object": 0, "objects": 0, "sign": SIGN},
}
MOST_NAMED = MAX_THINGS + 2
"""How many labels one text can hold: all things, and a sign of two characters."""


def meaning(text: str) -> list[Label]:
    """The things that a text names: ``"7 on a red star , a sign"`` -> 7 on a red star, any sign.

    >>> meaning("what shape is the red object ?")
    [(0, 1, 0)]
    """
    named: list[Label] = []
    for part in text.split(","):
        colour, characters = 0, [0]
        for word in part.split():
            if word in COLOURS:
                colour = 1 + COLOURS.index(word)
            elif word in CHARACTERS:
                characters = [number for number in characters if number] + [1 + CHARACTERS.index(word)]
            elif word in NOUNS:
                named += [(NOUNS[word], colour, number) for number in characters]
                colour, characters = 0, [0]
        named += [(0, 0, number) for number in characters]
    return [label for label in named if any(label)]


def caption(scene: Scene, rng: Rng | None = None) -> str:
    """What a scene holds; with rng in random order, now and then without a character or without some things."""
    parts = [(thing.name, thing.character) for thing in scene.things]
    parts += [("sign", " ".join(scene.sign.text))] if scene.sign else []
    if rng:
        count = len(parts) if rng.chance(0.5) else rng.integer(1, len(parts))
        parts = [(name, letters if rng.chance(0.6) else "") for name, letters in rng.some(parts, count)]
    return " , ".join(f"{letters} on a {name}" if letters else f"a {name}" for name, letters in parts)


def text_about(scene: Scene, rng: Rng) -> str:
    """A caption, a few words for one of the things, or a question of the suite."""
    if rng.chance(0.4):
        return caption(scene, rng)
    if rng.chance(0.5) and scene.things:
        thing = rng.pick(scene.things)
        short = [f"a {thing.name}", thing.name, f"a {thing.shape}", f"a {thing.colour} object"]
        return rng.pick([*short, f"the character {thing.character}"] if thing.character else short)
    asked = [turn.question for make in PICTURE_TASKS.values() for turn in make(scene, rng)]
    return rng.pick([question for question in asked if meaning(question)] or [caption(scene)])


def scene_at(split: str, index: int) -> Scene:
    """Scene number ``index`` for ``mini-clip``."""
    return sample_scene(Rng(item_seed(split, index, stream=253)))


def things(scene: Scene) -> list[Label]:
    """One label for every thing and for every character of the sign."""
    rows = [(thing.shape, thing.colour, thing.character) for thing in scene.things]
    found = [
        (1 + SHAPES.index(shape), 1 + COLOURS.index(colour), 1 + CHARACTERS.index(character) if character else 0)
        for shape, colour, character in rows
    ]
    return found + [(SIGN, 0, 1 + CHARACTERS.index(character)) for character in (scene.sign.text if scene.sign else "")]


def padded(rows: list[list[Label]]) -> Tensor:
    """Labels of texts or scenes as int64 ``[rows, MOST_NAMED, 3]``; a place that is not used holds zeros."""
    return torch.tensor([(row + [(0, 0, 0)] * MOST_NAMED)[:MOST_NAMED] for row in rows])


def cells(scene: Scene, grid: int) -> np.ndarray:
    """The label of every cell, row by row: int64 ``[grid * grid, 3]``, zeros on the ground."""
    labels = cell_labels(scene, grid)
    return np.stack([getattr(labels, name).reshape(-1) for name in ("shape", "colour", "character")], 1)


def _agree(texts: Tensor, labels: Tensor) -> Tensor:
    asked = texts[:, :, None]
    return ((asked == 0) | (asked == labels)).all(-1) & texts.any(-1)[:, :, None]


def means_picture(texts: Tensor, pictures: Tensor) -> Tensor:
    """Whether a picture holds all that a text names.

    Parameters
    ----------
    texts, pictures : int64 ``[T, MOST_NAMED, 3]`` and ``[P, MOST_NAMED, 3]`` of :func:`padded`.

    Returns
    -------
    bool ``[T, P]``.
    """
    held = _agree(texts, pictures.flatten(0, 1)).unflatten(-1, pictures.shape[:2]).any(-1)
    return (held | ~texts.any(-1)[..., None]).all(1) & texts.any((1, 2))[:, None]


def means_cell(texts: Tensor, labels: Tensor) -> Tensor:
    """Whether a cell shows one of the things that a text names: ``[T, MOST_NAMED, 3]``, ``[N, 3]`` -> bool ``[T, N]``."""
    return _agree(texts, labels).any(1)
