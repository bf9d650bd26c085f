"""Training batches: pictures with dense labels, and questions packed behind them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from mmaccel.suite.clip import CLIP_TASKS, Clip, render_clip
from mmaccel.suite.questions import PICTURE_TASKS, Turn, comparison, description
from mmaccel.suite.rng import Rng, item_seed
from mmaccel.suite.scene import CHARACTERS, COLOURS, SHAPES, Scene, cell_labels, render, sample_scene
from training.build import ASSISTANT, END, PAD, PATCH, PIXELS, USER, prefix, word_ids

IGNORED = -100
TASKS = (*PICTURE_TASKS, "comparison", "description", *CLIP_TASKS)
CLIP_SHARES = {"order": 3, "motion": 1, "occurrences": 4, "needle": 3, "change": 4}
"""How often every task is thrown: more often what is learnt late."""
PRESENCE = len(SHAPES) * len(COLOURS) + len(CHARACTERS)


@dataclass(frozen=True)
class Plan:
    """What a stage of the training shows: ``batch`` pictures with ``questions`` each, or fewer clips.

    ``describe`` and ``turns`` are shares of the pictures (that are described; whose questions form one conversation),
    ``pairs`` and ``clips`` shares of the batches. ``pixels`` lists the sides that pictures come in, ``cell`` is the
    side of a visual token in pixels. A clip has up to ``frames`` frames and the first of the sides.
    """

    batch: int = 16
    questions: int = 0
    describe: float = 0.0
    pairs: float = 0.0
    turns: float = 0.25
    clips: float = 0.0
    frames: int = 16
    model: str = "mini-llava"
    pixels: tuple[int, ...] = (PIXELS,)
    cell: int = PATCH


def presence(scene: Scene) -> np.ndarray:
    """Which named things and which characters a scene holds: float32 ``[PRESENCE]``, what CLS must know."""
    found = np.zeros(PRESENCE, np.float32)
    for thing in scene.things:
        found[SHAPES.index(thing.shape) * len(COLOURS) + COLOURS.index(thing.colour)] = 1
    for character in "".join(thing.character for thing in scene.things) + (scene.sign.text if scene.sign else ""):
        found[len(SHAPES) * len(COLOURS) + CHARACTERS.index(character)] = 1
    return found


def choose(scene: Scene, rng: Rng, count: int) -> list[Turn]:
    """``count`` questions about a scene, taken from the tasks in turn."""
    pools = [rng.shuffled(pool) for pool in (make(scene, rng) for make in PICTURE_TASKS.values()) if pool]
    chosen: list[Turn] = []
    while pools and len(chosen) < count:
        for pool in pools:
            chosen.append(pool.pop())
        pools = [pool for pool in pools if pool]
    return rng.shuffled(chosen)[:count]


def pack(
    rows: list[list[Turn]], prefix: list[int], multi: list[bool], words: dict[str, int]
) -> dict[str, torch.Tensor]:
    """Pack questions behind their pictures, whose token ids are the ``prefix`` of every row.

    Rows of ``multi`` are conversations: every turn sees the ones before. In the other rows every question sees the
    pictures and itself alone, and its positions start right after them, exactly as in a conversation of one turn.

    Returns
    -------
    ``ids``, ``labels``, ``task`` and ``positions``: int64 ``[rows, length]`` (``labels`` and ``task`` belong to the
    position that *predicts*); ``turn``: int64 ``[rows, length]``, 0 for the shared part, else the number of the block;
    padding has turn -1.
    """
    columns: list[list[list[int]]] = []
    for turns, chat in zip(rows, multi, strict=True):
        ids, labels, task, positions, block = list(prefix), [], [], list(range(len(prefix))), [0] * len(prefix)
        labels, task = [IGNORED] * len(prefix), [0] * len(prefix)
        for number, turn in enumerate(turns):
            asked = ([USER] if chat and number else []) + [words[word] for word in turn.question.split()] + [ASSISTANT]
            answer = [words[word] for word in turn.answer.split()] + [END]
            start = positions[-1] + 1 if chat else len(prefix)
            ids += asked + answer
            labels += [IGNORED] * (len(asked) - 1) + answer + [IGNORED]
            task += [TASKS.index(turn.task)] * (len(asked) + len(answer))
            positions += range(start, start + len(asked) + len(answer))
            block += [0 if chat else number + 1] * (len(asked) + len(answer))
        columns.append([ids, labels, task, positions, block])
    length = -(-max(len(row[0]) for row in columns) // 8) * 8
    packed = {}
    for name, which, filler in (
        ("ids", 0, PAD),
        ("labels", 1, IGNORED),
        ("task", 2, 0),
        ("positions", 3, 0),
        ("turn", 4, -1),
    ):
        packed[name] = torch.tensor([row[which] + [filler] * (length - len(row[which])) for row in columns])
    return packed


def visible(turn: torch.Tensor) -> torch.Tensor:
    """Which key every query may see: bool ``[rows, 1, length, length]`` from ``turn`` of :func:`pack`."""
    causal = torch.ones(turn.shape[1], turn.shape[1], dtype=torch.bool, device=turn.device).tril()
    query, key = turn[:, :, None], turn[:, None, :]
    itself = torch.eye(turn.shape[1], dtype=torch.bool, device=turn.device)
    return ((causal & ((key == query) | (key == 0))) | itself)[:, None]


class Batches(IterableDataset):
    """Endless batches of fresh scenes for one stage, starting at picture number ``start`` of the training split."""

    def __init__(self, plan: Plan, start: int) -> None:
        self.plan, self.start = plan, start

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker, words = get_worker_info(), word_ids()
        place, places = (worker.id, worker.num_workers) if worker else (0, 1)
        number = self.start + place * self.plan.batch
        while True:
            yield self.batch(number, words)
            number += places * self.plan.batch

    def batch(self, number: int, words: dict[str, int]) -> dict[str, torch.Tensor]:
        """The batch that starts at picture ``number``."""
        plan, rng = self.plan, Rng(item_seed("train", number, stream=254))
        if rng.chance(plan.clips):
            return self.clips(number, rng, words)
        dices = [Rng(item_seed("train", number + row, stream=255)) for row in range(plan.batch)]
        scenes, pixels = [sample_scene(rng) for rng in dices], rng.pick(plan.pixels)
        pictures = torch.from_numpy(np.stack([render(scene, pixels) for scene in scenes]))
        batch = {"pixels": pictures.permute(0, 3, 1, 2), **labelled([[scene] for scene in scenes], pixels // plan.cell)}
        if not plan.questions and not plan.describe:
            return batch
        pairs = rng.chance(plan.pairs)
        rows: list[list[Turn]] = []
        if pairs:
            for first in range(0, plan.batch, 2):
                asked = comparison(scenes[first], scenes[first + 1], dices[first])
                rows.append(dices[first].some(asked, plan.questions))
        else:
            for scene, rng in zip(scenes, dices, strict=True):
                turns = choose(scene, rng, plan.questions)
                if rng.chance(plan.describe):
                    turns.append(description(scene))
                rows.append(turns or [description(scene)])
        multi = [rng.chance(plan.turns) for rng in dices[: len(rows)]]
        places = [(pixels // plan.cell) ** 2] * (2 if pairs else 1)
        return batch | pack(rows, prefix(plan.model, places), multi, words)

    def clips(self, number: int, rng: Rng, words: dict[str, int]) -> dict[str, torch.Tensor]:
        """A batch of clips, half as many as pictures; ``step`` is the time in seconds between two grids."""
        plan, pixels, length = self.plan, self.plan.pixels[0], 2 * rng.integer(4, self.plan.frames // 2)
        tasks = [task for task, share in CLIP_SHARES.items() for _ in range(share)]
        shown: list[tuple[Clip, list[Turn]]] = []
        while len(shown) < max(1, plan.batch // 2):
            thrown = CLIP_TASKS[rng.pick(tasks)](rng, length)
            shown += [thrown] if thrown else []
        frames = torch.from_numpy(np.stack([render_clip(clip, pixels) for clip, _ in shown]))
        grid = pixels // plan.cell
        ids = prefix(plan.model, [length // 2 * grid * grid], clip=True)
        return {
            "pixels": frames.permute(0, 1, 4, 2, 3),
            "step": torch.tensor(rng.pick((0.25, 0.5, 0.5, 0.5, 0.5, 1.0))),
            **labelled([list(clip.frames[1::2]) for clip, _ in shown], grid),
            **pack([turns for _, turns in shown], ids, [False] * len(shown), words),
        }


def labelled(rows: list[list[Scene]], grid: int) -> dict[str, torch.Tensor]:
    """Labels of rows of scenes: ``presence`` (any of the row's scenes) and cells ``[rows, scenes, grid, grid]``."""
    labels = [[cell_labels(scene, grid) for scene in row] for row in rows]
    cells = {
        name: torch.from_numpy(np.stack([[getattr(label, name) for label in row] for row in labels]))
        for name in ("shape", "colour", "character", "box")
    }
    found = np.stack([np.max([presence(scene) for scene in row], axis=0) for row in rows])
    return {"presence": torch.from_numpy(found), **cells}
