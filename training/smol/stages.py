"""The stages of training ``mini-smol``: tower, connector, everything."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from training.smol.language import Connector, switch
from training.smol.rows import (
    IMAGE,
    Row,
    Rows,
    answers_of_base,
    page_row,
    passages,
    prose,
    scene_row,
    screens_row,
    split_rows,
)
from training.smol.runs import Run, place
from training.smol.tower import GRID, Reader, drawn, page_at, scene_at, start_tower

Shown = Scene | Document


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
    return iter(DataLoader(_Feed(make, start, count), batch_size=None, num_workers=workers, **ahead))


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

    def make(seen: int) -> tuple[list[Shown], Tensor]:
        shown = mixed(seen, batch, scenes)
        return shown, drawn(shown)

    run = Run(work, "tower", {"reader": reader}, groups, minutes)
    source = feed(make, run.state["seen"], batch, means.workers)

    def step() -> tuple[dict[str, float], int]:
        shown, pixels = next(source)
        loss, scores = reader(reader.see(pixels.to(means.device)), shown)
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


class Trainee(nn.Module):
    """Tower, connector and language model."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.reader = Reader(start_tower())
        self.connector = Connector(self.reader.tower.config.hidden_size, model.config.hidden_size)
        self.model = model

    def answers(self, rows: Rows, visual: Tensor) -> tuple[Tensor, float]:
        """Loss of the answers of rows, and the share of first words that are right; ``visual``: ``[N, width]`` of all rows."""
        text = self.model.model
        embeds = text.embed_tokens(rows.ids)
        embeds = embeds.masked_scatter((rows.ids == IMAGE)[..., None], visual.to(embeds.dtype))
        hidden = text(
            inputs_embeds=embeds, attention_mask=rows.bias(embeds.dtype), position_ids=rows.positions, use_cache=False
        ).last_hidden_state
        asked = rows.labels != IGNORED
        logits, target, weight = self.model.lm_head(hidden[asked]).float(), rows.labels[asked], rows.weight[asked]
        each = functional.cross_entropy(logits, target, reduction="none")
        opening = asked.clone()
        opening[:, 1:] &= ~asked[:, :-1]
        right = (logits.argmax(-1) == target)[opening[asked]].float().mean().item()
        return (each * weight).sum() / weight.sum(), right

    def forgotten(self, ids: Tensor) -> Tensor:
        """How far the model has gone from the bare one on plain text ``[length]``: the divergence of the next word."""
        bias = torch.full((len(ids), len(ids)), -1e4, dtype=self.model.dtype, device=ids.device).triu_(1)[None, None]

        def told() -> Tensor:
            return (
                self.model(input_ids=ids[None], attention_mask=bias, use_cache=False).logits[0].float().log_softmax(-1)
            )

        with torch.no_grad():
            switch(self.model, False)
            bare = told()
            switch(self.model, True)
        return functional.kl_div(told(), bare, log_target=True, reduction="batchmean")


def train_all(
    work: Path,
    minutes: float,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    means: Means = Means(),
    rate: float = 1e-3,
    batch: int = 4,
    together: int = 1,
    questions: int = 12,
    scenes: float = 0.5,
    pairs: float = 0.04,
    screens: float = 0.1,
) -> None:
    """Tower, connector and low-rank changes together: questions packed behind pictures, and a plain text in every step.

    ``together`` rows are padded to one length and go through the language model at once (fewer, if they are long): 1 wastes
    nothing on a CPU. ``scenes``: share of rows about scenes; of these, ``pairs`` compare two; of the others, ``screens`` are
    chats in which two or three turns bring a screen each.
    """
    trainee = Trainee(model)
    stored(work, "tower", {"reader": trainee.reader})
    stored(work, "connector", {"connector": trainee.connector})
    switch(model, False)
    replay = [
        passages(tokenizer, prose("train")),
        answers_of_base(model, tokenizer, "train", work / "answers-train.json"),
    ]
    switch(model, True)
    trainee.to(means.device)
    heads = [weight for name, weight in trainee.reader.named_parameters() if not name.startswith("tower.")]
    changes = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": changes, "peak": rate, "weight_decay": 0.0},
        {"params": list(trainee.connector.parameters()), "peak": rate},
        {"params": list(trainee.reader.tower.parameters()), "peak": 0.3 * rate},
        {"params": heads, "peak": rate},
    ]

    def make(seen: int) -> tuple[list[list[Row]], list[Tensor], Tensor]:
        rng, rows = Rng(item_seed("train", seen, stream=248)), list[Row]()
        for at in range(seen, seen + batch):
            if rng.chance(scenes):
                shown = [scene_at("train", at)] + ([scene_at("train", at + (1 << 30))] if rng.chance(pairs) else [])
                rows.append(scene_row(tokenizer, shown, rng, questions))
            elif rng.chance(screens):
                rows.append(screens_row(tokenizer, rng, questions))
            else:
                rows.append(page_row(tokenizer, *page_at("train", at), rng, questions))
        parts = split_rows(sorted(rows, key=lambda row: len(row.ids)), together)
        pixels = [drawn([one for row in part for one in row.shown]) for part in parts]
        return parts, pixels, rng.pick(rng.pick(replay))

    run = Run(work, "all", {"trainee": trainee}, groups, minutes)
    source = feed(make, run.state["seen"], batch, means.workers)

    def step() -> tuple[dict[str, float], int]:
        parts, pixels, ids = next(source)
        scores: dict[str, float] = {}
        for some, pictures in zip(parts, pixels, strict=True):
            shown = [one for row in some for one in row.shown]
            sight = trainee.reader.see(pictures.to(means.device))
            dense, found = trainee.reader(sight, shown)
            loss, right = trainee.answers(Rows.of(some, means.device), trainee.connector(sight.cells).flatten(0, 1))
            ((loss + 0.1 * dense) * len(some) / batch).backward()
            kinds = {isinstance(one, Scene) for one in shown}
            kind = "mixed" if len(kinds) > 1 else "scene" if True in kinds else "page"
            scores |= {f"{kind} loss": loss.item(), f"{kind} first": right, **found}
        drift = trainee.forgotten(ids.to(means.device))
        drift.backward()
        return {**scores, "forgotten": drift.item()}, batch

    run.train(step)
