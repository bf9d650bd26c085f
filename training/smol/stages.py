"""The stages of training ``mini-smol``: tower, connector, everything."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from mmaccel.suite.document import Document, document_cells
from mmaccel.suite.rng import Rng, item_seed
from mmaccel.suite.scene import CHARACTERS, COLOURS, SHAPES, Scene, cell_labels
from training.data import IGNORED
from training.smol.export import read_exported
from training.smol.language import Connector, switch
from training.smol.rows import (
    IMAGE,
    Row,
    Rows,
    answers_of_base,
    page_row,
    passages,
    plain_row,
    prose,
    scene_row,
    screens_row,
    split_rows,
)
from training.smol.runs import Run, place
from training.smol.tower import GRID, DenseLabels, Reader, drawn, page_at, scene_at, start_tower
from training.train import Sight

Shown = Scene | Document
LONGEST = 768
"""Tokens of the rows that a GPU replays; nearly all with one picture fit."""
HEADS_FIRST = 200
"""Steps after which heads that begin with noise teach the tower."""


class _Feed(IterableDataset[Any]):
    """What ``make`` gives for ``start``, ``start + count`` and so on, drawn by the workers of a loader in turn.

    Processes that train together take turns too.
    """

    def __init__(self, make: Callable[[int], Any], start: int, count: int) -> None:
        self.make, self.start, self.count = make, start, count

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        process, processes = place()
        for step in itertools.count(first, workers):
            yield self.make(self.start + (step * processes + process) * self.count)


def feed(make: Callable[[int], Any], start: int, count: int, workers: int) -> Iterator[Any]:
    """Data of one step after the other, made by ``workers`` processes (0: by this one)."""
    ahead = {"prefetch_factor": 4, "multiprocessing_context": "fork"} if workers else {}
    as_it_is = {"batch_size": None, "collate_fn": lambda made: made}
    return iter(DataLoader(_Feed(make, start, count), num_workers=workers, **as_it_is, **ahead))


@dataclass(frozen=True)
class Means:
    """Where a stage is trained: the device, and how many processes draw pictures for it."""

    device: str = "cpu"
    workers: int = 0


def mixed(seen: int, count: int, scenes: float) -> list[Shown]:
    """``count`` training pictures from number ``seen`` on, of which a share ``scenes`` are scenes."""
    rng = Rng(item_seed("train", seen, stream=249))
    numbers = range(seen, seen + count)
    return [scene_at("train", at) if rng.chance(scenes) else page_at("train", at)[0] for at in numbers]


def stored(work: Path, stage: str, parts: dict[str, nn.Module]) -> None:
    """Read the weights that another stage has left.

    Raises
    ------
    FileNotFoundError : when that stage was not run.
    """
    path = work / f"{stage}.pt"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; run the stage {stage!r} first.")
    weights = torch.load(path, weights_only=True)["parts"]
    for name, part in parts.items():
        part.load_state_dict(weights[name], strict=False)


def train_tower(work: Path, minutes: float, means: Means = Means(), batch: int = 16, scenes: float = 0.25) -> None:
    """The tower alone: dense labels of scenes and pages."""
    reader = Reader(start_tower()).to(means.device)
    heads = [weight for name, weight in reader.named_parameters() if not name.startswith("tower.")]
    groups = [{"params": list(reader.tower.parameters()), "peak": 1e-3}, {"params": heads, "peak": 2e-3}]

    def make(seen: int) -> tuple[DenseLabels, Tensor]:
        shown = mixed(seen, batch, scenes)
        return DenseLabels.of(shown), drawn(shown)

    run = Run(work, "tower", {"reader": reader}, groups, minutes)
    source = feed(make, run.state["seen"], batch, means.workers)

    def step() -> tuple[dict[str, float], int]:
        labels, pixels = (part.to(means.device) for part in next(source))
        loss, scores = reader(reader.see(pixels), labels)
        loss.backward()
        return {"loss": loss.item(), **scores}, batch

    run.train(step)


def words_of_cells(shown: Shown, words: Tensor, coded: Callable[[str], list[int]]) -> Tensor:
    """The sum of the word embeddings of what every cell shows: ``[GRID * GRID, width]`` from ``words`` ``[V, width]``."""
    target = words.new_zeros(GRID * GRID, words.shape[1])
    if isinstance(shown, Document):
        for at, cell in enumerate(text for row in document_cells(shown, GRID) for text in row):
            if cell:
                target[at] = words[coded(cell)].sum(0)
        return target
    labels = cell_labels(shown, GRID)
    kinds = (
        (labels.colour, ["", *(f" {name}" for name in COLOURS)]),
        (labels.shape, ["", *(f" {name}" for name in SHAPES), " sign"]),
        (labels.character, ["", *(f" {name}" for name in CHARACTERS)]),
    )
    for numbers, names in kinds:
        table = torch.stack([words[coded(name)].sum(0) for name in names])
        target += table[torch.from_numpy(numbers).flatten()]
    return target


def train_connector(
    work: Path,
    minutes: float,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    means: Means = Means(),
    batch: int = 16,
) -> None:
    """The connector alone: every cell gives the language model's own words for what it shows."""
    reader = Reader(start_tower()).requires_grad_(False)
    stored(work, "tower", {"reader": reader})
    reader.to(means.device)
    connector = Connector(hidden=model.config.hidden_size).to(means.device)
    words = model.model.embed_tokens.weight.detach().float().cpu()
    scale = words.square().sum(-1).mean()

    def coded(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def make(seen: int) -> tuple[Tensor, Tensor]:
        shown = mixed(seen, batch, 0.5)
        return drawn(shown), torch.stack([words_of_cells(one, words, coded) for one in shown])

    groups = [{"params": list(connector.parameters()), "peak": 3e-3}]
    run = Run(work, "connector", {"connector": connector}, groups, minutes)
    source = feed(make, run.state["seen"], batch, means.workers)

    def step() -> tuple[dict[str, float], int]:
        pixels, target = (part.to(means.device) for part in next(source))
        with torch.no_grad():
            cells = reader.see(pixels).cells
        made, owned = connector(cells), target.any(-1)
        each = (made - target).square().sum(-1) / scale
        loss = each[owned].mean() + 0.2 * each[~owned].mean()
        loss.backward()
        alike = functional.cosine_similarity(made[owned], target[owned], dim=-1).mean().item()
        return {"loss": loss.item(), "cosine": alike}, batch

    run.train(step)


@dataclass
class Lesson:
    """Rows that go through the language model at once, with the pictures that they show and the labels of these.

    ``share``: of the pictures of a step; ``plain``: tokens of a plain text, which is the last row, or 0.
    """

    rows: Rows
    pixels: Tensor
    labels: DenseLabels
    kind: str
    share: float
    plain: int

    @classmethod
    def of(cls, rows: Sequence[Row], share: float, shortest: int = 0) -> Lesson:
        """Draw and pad rows; those that show nothing are plain texts, one at most, which must be the last."""
        shown = [one for row in rows for one in row.shown]
        kinds = {isinstance(one, Scene) for one in shown}
        return cls(
            Rows.of(rows, shortest),
            drawn(shown) if shown else torch.zeros(0),
            DenseLabels.of(shown),
            "mixed" if len(kinds) > 1 else "scene" if True in kinds else "page",
            share,
            0 if rows[-1].shown else len(rows[-1].ids),
        )

    def to(self, device: torch.device | str) -> Lesson:
        """The same on a device."""
        parts = {name: getattr(self, name).to(device) for name in ("rows", "pixels", "labels")}
        return replace(self, **parts)


def detached(sight: Sight) -> Sight:
    """The same, through which no gradient flows."""
    parts = {part.name: getattr(sight, part.name) for part in fields(sight)}
    return Sight(**{name: part if part is None else part.detach() for name, part in parts.items()})


class Reading(nn.Module):
    """The language model over embeddings ``[rows, length, width]``; a module of its own, which a GPU can replay as a graph."""

    def __init__(self, text: nn.Module) -> None:
        super().__init__()
        self.text = text

    def forward(self, embeds: Tensor, bias: Tensor, positions: Tensor) -> Tensor:
        """The last hidden states."""
        told = self.text(inputs_embeds=embeds, attention_mask=bias, position_ids=positions, use_cache=False)
        return told.last_hidden_state


class Trainee(nn.Module):
    """Tower, connector and language model."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.reader = Reader(start_tower())
        self.connector = Connector(self.reader.tower.config.hidden_size, model.config.hidden_size)
        self.model = model
        self.graphs: dict[tuple[int, int], Callable[..., Tensor]] = {}

    def capture(self, rows: int, length: int) -> None:
        """From now on rows of this shape are read by replaying a CUDA graph, at most once between two steps of an optimiser."""
        weight = self.model.model.embed_tokens.weight
        embeds = weight.new_zeros(rows, length, weight.shape[1], requires_grad=True)
        positions = torch.arange(length, device=weight.device).expand(rows, -1).contiguous()
        sample = (embeds, weight.new_zeros(rows, 1, length, length), positions)
        self.graphs[rows, length] = torch.cuda.make_graphed_callables(Reading(self.model.model), sample)

    def read(self, rows: Rows, visual: Tensor) -> Tensor:
        """Hidden states ``[rows, length, width]``; ``visual``: ``[N, width]`` of all rows."""
        embeds = self.model.model.embed_tokens(rows.ids)
        embeds = embeds.masked_scatter((rows.ids == IMAGE)[..., None], visual.to(embeds.dtype))
        reading = self.graphs.get((rows.ids.shape[0], rows.ids.shape[1]), Reading(self.model.model))
        return reading(embeds, rows.bias(embeds.dtype), rows.positions)

    def answers(self, rows: Rows, hidden: Tensor) -> tuple[Tensor, float]:
        """Loss of the answers of rows, and the share of first words that are right, from the hidden states."""
        asked = rows.labels != IGNORED
        logits, target, weight = self.model.lm_head(hidden[asked]).float(), rows.labels[asked], rows.weight[asked]
        each = functional.cross_entropy(logits, target, reduction="none")
        opening = asked.clone()
        opening[:, 1:] &= ~asked[:, :-1]
        right = (logits.argmax(-1) == target)[opening[asked]].float().mean().item()
        return (each * weight).sum() / weight.sum(), right

    @torch.no_grad()
    def bare(self, ids: Tensor) -> Tensor:
        """Hidden states ``[length, width]`` of the bare model on a plain text ``[length]``."""
        switch(self.model, False)
        hidden = self.read(Rows.of([plain_row(ids.cpu())]).to(ids.device), self.model.model.embed_tokens.weight[:0])
        switch(self.model, True)
        return hidden[0]

    def forgotten(self, hidden: Tensor, bare: Tensor) -> Tensor:
        """How far the model has gone from the bare one on a plain text: the divergence of the next word, from hidden states."""
        told, wanted = (self.model.lm_head(states).float().log_softmax(-1) for states in (hidden, bare))
        return functional.kl_div(told, wanted, log_target=True, reduction="batchmean")


def train_all(
    work: Path,
    minutes: float,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    means: Means = Means(),
    rate: float = 1e-3,
    batch: int = 4,
    together: int = 1,
    start: Path | None = None,
    questions: int = 12,
    scenes: float = 0.5,
    pairs: float = 0.04,
    screens: float = 0.1,
) -> None:
    """Tower, connector and low-rank changes together: questions packed behind pictures, and a plain text in every step.

    ``together`` rows are padded to one length and go through the language model at once (fewer, if they are long): 1 wastes
    nothing on a CPU. On a GPU, rows that are all the rows of a step are read by replaying a graph, where they fit in
    :data:`LONGEST` tokens. ``start``: an exported model, whose weights a new run begins with. ``scenes``: share of rows about
    scenes; of these, ``pairs`` compare two; of the others, ``screens`` are chats in which two or three turns bring a screen
    each. A step has such long rows alone, or none.
    """
    trainee = Trainee(model)
    first = 0
    if start is None:
        stored(work, "tower", {"reader": trainee.reader})
        stored(work, "connector", {"connector": trainee.connector})
    else:
        first = read_exported(trainee, start) << 6  # other pictures than those of the run that led to these weights
    switch(model, False)
    replay = [
        passages(tokenizer, prose("train")),
        answers_of_base(model, tokenizer, "train", work / "answers-train.json"),
    ]
    switch(model, True)
    trainee.to(means.device)
    known: dict[tuple[int, int], Tensor] = {}
    heads = [weight for name, weight in trainee.reader.named_parameters() if not name.startswith("tower.")]
    changes = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": changes, "peak": rate, "weight_decay": 0.0},
        {"params": list(trainee.connector.parameters()), "peak": rate},
        {"params": list(trainee.reader.tower.parameters()), "peak": 0.3 * rate},
        {"params": heads, "peak": rate},
    ]
    whole = together == batch > 1
    if whole and means.device.startswith("cuda"):
        trainee.capture(batch + 1, LONGEST)

    many = scenes * pairs + (1 - scenes) * screens

    def make(seen: int) -> tuple[list[Lesson], tuple[int, int]]:
        rng, rows = Rng(item_seed("train", seen, stream=248)), list[Row]()
        long = rng.chance(many)
        for at in range(seen, seen + batch):
            if rng.chance(scenes * pairs / many if long else scenes):
                shown = [scene_at("train", at), *([scene_at("train", at + (1 << 30))] if long else [])]
                rows.append(scene_row(tokenizer, shown, rng, questions))
            elif long:
                rows.append(screens_row(tokenizer, rng, questions))
            else:
                rows.append(page_row(tokenizer, *page_at("train", at), rng, questions))
        rows.sort(key=lambda row: len(row.ids))
        kind = rng.integer(0, len(replay) - 1)
        text = (kind, rng.integer(0, len(replay[kind]) - 1))
        plain = plain_row(replay[text[0]][text[1]])
        if whole and not long:
            return [Lesson.of([*rows, plain], 1.0, LONGEST)], text
        lessons = [Lesson.of(part, len(part) / batch) for part in split_rows(rows, together)]
        return [*lessons, Lesson.of([plain], 0.0)], text

    run = Run(work, "all", {"trainee": trainee}, groups, minutes)
    source = feed(make, first + run.state["seen"], batch, means.workers)

    def step() -> tuple[dict[str, float], int]:
        lessons, text = next(source)
        if text not in known:
            known[text] = trainee.bare(replay[text[0]][text[1]].to(means.device))
        scores: dict[str, float] = {}
        for lesson in lessons:
            one, loss, visual = lesson.to(means.device), torch.zeros((), device=means.device), known[text][:0]
            if one.share:
                sight = trainee.reader.see(one.pixels)
                visual = trainee.connector(sight.cells).flatten(0, 1)
                # heads that begin with noise learn first what the tower shows already
                fresh = start is not None and run.state["step"] < HEADS_FIRST
                dense, found = trainee.reader(detached(sight) if fresh else sight, one.labels)
                scores |= found
                loss = 0.1 * one.share * dense
            hidden = trainee.read(one.rows, visual)
            if one.share:
                told, right = trainee.answers(one.rows, hidden)
                scores |= {f"{one.kind} loss": told.item(), f"{one.kind} first": right}
                loss = loss + one.share * told
            if one.plain:
                drift = trainee.forgotten(hidden[-1, : one.plain], known[text])
                scores["forgotten"] = drift.item()
                loss = loss + drift
            loss.backward()
        return scores, batch

    run.train(step)
