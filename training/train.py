"""Train a mini model from scratch.

``python -m training.train mini-llava --work DIR --hours 2`` trains, or goes on with what ``DIR`` holds; every few
minutes a checkpoint, every few steps a line of the loss log ``DIR/log.jsonl``. The curriculum advances on accuracy:

1. ``see``: the tower alone, labels for every cell (shape, colour, character, box) and the names in the picture for CLS;
2. ``describe``: the language model writes the whole scene in a fixed order;
3. ``ask``: questions, packed behind one picture, mixed with descriptions;
4. ``compare``: the same, with batches of two pictures;
5. ``watch`` (models that see clips): the same, with batches of clips.

The learning rate falls over the last two fifths of the hours given. More hours than before go on from the checkpoint;
``--start FOLDER`` begins a new run with the weights of a shipped model (what it knows lets it pass the first stages at
once).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AttentionInterface, AutoModelForImageTextToText

from mmaccel.suite.scene import CHARACTERS, COLOURS, SHAPES
from training.build import (
    ASSISTANT,
    BUILDERS,
    DEEP_PIXELS,
    END,
    MEAN,
    PAD,
    QWEN_FRAMES,
    QWEN_MERGE,
    QWEN_PATCH,
    STD,
    VOCABULARY_SIZE,
    word_ids,
)
from training.captions import NOUNS
from training.data import IGNORED, PRESENCE, TASKS, Batches, Plan, visible

_LLAVA = {
    "see": Plan(batch=16),
    "describe": Plan(batch=8, describe=1.0),
    "ask": Plan(batch=8, questions=14, describe=0.3, pairs=0.12),
    "compare": Plan(batch=8, questions=14, describe=0.2, pairs=0.25),
}
_SIZES = {"model": "mini-qwen-vl", "pixels": (112, 128, 144, 176), "cell": QWEN_PATCH * QWEN_MERGE}
_LARGE = {"pixels": (112, 144, 176, 224, 224)}
STAGES: dict[str, dict[str, Plan]] = {
    "mini-llava": _LLAVA,
    "mini-llava-deep": {
        name: replace(plan, model="mini-llava-deep", pixels=(DEEP_PIXELS,)) for name, plan in _LLAVA.items()
    },
    "mini-qwen-vl": {
        **{name: replace(plan, **_SIZES) for name, plan in _LLAVA.items()},
        "compare": replace(_LLAVA["compare"], **_SIZES | _LARGE),
        "watch": replace(_LLAVA["compare"], clips=0.7, **_SIZES | _LARGE),
    },
}
DONE_AT = {"see": 0.90, "describe": 0.60, "ask": 0.75, "compare": 0.80}
"""The accuracy at which a stage ends: of characters per cell, of the description's words, of answers on average."""


def plain_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Two matrix products and a softmax in the products' precision: on a CPU twice as fast backwards as the fused one."""
    rows, heads, length, width = query.shape
    if groups := heads // key.shape[1] - 1:
        key, value = (part.repeat_interleave(groups + 1, 1) for part in (key, value))
    if attention_mask is None and getattr(module, "is_causal", False):
        attention_mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()[None, None]
    query, key, value = (part.flatten(0, 1) for part in (query * (scaling or width**-0.5), key, value))
    if attention_mask is None:
        logits = torch.bmm(query, key.transpose(1, 2))
    else:
        bias = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, -1e4)
        logits = torch.baddbmm(bias.expand(rows, heads, -1, -1).flatten(0, 1), query, key.transpose(1, 2))
    if hasattr(module, "watched"):
        module.watched = logits.unflatten(0, (rows, heads))
    mixed = torch.bmm(functional.softmax(logits, -1, dtype=logits.dtype), value)
    return mixed.view(rows, heads, length, -1).transpose(1, 2), None


AttentionInterface.register("plain", plain_attention)


POINTING_LAYERS = {1: False, 2: False, 3: True}
"""Layers of a language model of five whose first head learns to look at what the question names: from the very word, or
(True) from where the answer begins. A deeper one has them where `Trainee.at` says."""
PLACED = 2
"""So many layers of the language model must do to know the box of the thing that a visual token shows."""
LOOKING_BACK = 0
"""The layer whose last head learns to look, from every cell of a clip, at the same cell one step before."""
COUNTED = 3
"""So many layers of the language model must do to know how often something has appeared in a cell of a clip."""
MOST_OFTEN = 4
"""Where counting ends."""

WEIGHTS = {"description": 0.3, "grounding": 0.6, "shape": 1.0, "reading": 1.5}
"""How much a word of a task's answers counts in the loss; 3 where nothing is said."""


def naming() -> tuple[torch.Tensor, torch.Tensor]:
    """For every token id the shape that it names (0: any, -1: none), and the colour (0: none), as in the cells' labels."""
    nouns = torch.full((VOCABULARY_SIZE,), -1)
    colours = torch.zeros(VOCABULARY_SIZE, dtype=torch.int64)
    for word, number in word_ids().items():
        nouns[number] = NOUNS.get(word, -1)
        colours[number] = 1 + COLOURS.index(word) if word in COLOURS else 0
    return nouns, colours


def middles(grid: int) -> torch.Tensor:
    """The middle of every cell as a box without extent: ``[1, grid * grid, 4]``."""
    at = (torch.arange(grid) + 0.5) / grid
    down, across = torch.meshgrid(at, at, indexing="ij")
    return torch.stack((across, down, across, down), -1).view(1, -1, 4)


def appearances(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """How often something new has appeared in every cell of a clip so far: int64 ``[rows, N]``, at most `MOST_OFTEN`."""
    shown = batch["shape"] * (len(COLOURS) + 1) + batch["colour"]
    fresh = batch["shape"] > 0
    fresh[:, 1:] &= shown[:, 1:] != shown[:, :-1]
    return fresh.cumsum(1).clamp(max=MOST_OFTEN).flatten(1)


@dataclass
class Sight:
    """What a tower gave for a batch.

    ``cells``: ``[rows, N, width]``, what the probes read; ``visual``: ``[rows, N, hidden]`` or None, what the language
    model gets; ``early`` and ``late``: the CLS token of the feature layer and of the end ``[rows, width]``, or None.
    """

    cells: torch.Tensor
    visual: torch.Tensor | None
    early: torch.Tensor | None = None
    late: torch.Tensor | None = None


class Probes(nn.Module):
    """Heads that only the training has: what each cell shows, and what CLS says is in the picture."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.sizes = {"shape": len(SHAPES) + 2, "colour": len(COLOURS) + 1, "character": len(CHARACTERS) + 1, "box": 4}
        self.norm = nn.LayerNorm(width)
        self.cells = nn.Linear(width, sum(self.sizes.values()))
        self.early, self.late = nn.Linear(width, PRESENCE), nn.Linear(width, PRESENCE)
        self.place = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 4))
        self.before = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, self.sizes["shape"] + self.sizes["colour"]))
        self.tally = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, MOST_OFTEN + 1))

    def placed(self, hidden: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Loss of the boxes that the language model's states of visual tokens ``[rows, N, hidden]`` tell."""
        owned = batch["shape"].reshape(hidden.shape[:2]) > 0
        return (self.place(hidden).float() - batch["box"].reshape(*hidden.shape[:2], 4))[owned].abs().mean()

    def remembered(self, hidden: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Loss of what the same states, of a clip, tell about the same cell one step before."""
        steps = batch["shape"].shape[1]
        told = (
            self.before(hidden.unflatten(1, (steps, -1))[:, 1:])
            .float()
            .split((self.sizes["shape"], self.sizes["colour"]), -1)
        )
        was = (batch[name][:, :-1].flatten(2) for name in ("shape", "colour"))
        return sum(
            functional.cross_entropy(part.flatten(0, 2), label.flatten()) for part, label in zip(told, was, strict=True)
        )

    def counted(self, hidden: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, float]:
        """Loss and accuracy of how often, by the same states, something has appeared in every cell that shows a thing.

        Every number counts as much as every other one: most things appear once.
        """
        often, owned = appearances(batch), batch["shape"].flatten(1) > 0
        told, often = self.tally(hidden[owned]).float(), often[owned]
        weight = 1 / often.bincount(minlength=MOST_OFTEN + 1).clamp(min=1)
        right = (told.argmax(-1) == often) * weight[often]
        return functional.cross_entropy(told, often, weight), (right.sum() / weight[often].sum()).item()

    def forward(self, sight: Sight, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        """Loss and accuracies."""
        read = self.cells(self.norm(sight.cells)).float().split(list(self.sizes.values()), -1)
        parts = dict(zip(self.sizes, read, strict=True))
        loss, scores = read[0].new_zeros(()), {}
        owned = batch["shape"].flatten(1) > 0
        for name in ("shape", "colour", "character"):
            target = batch[name].flatten(1)
            each = functional.cross_entropy(parts[name].transpose(1, 2), target, reduction="none")
            loss = loss + each[target > 0].sum() / (target > 0).sum().clamp(min=1) + each[target == 0].mean()
            right = parts[name].argmax(-1) == target
            scores[f"cell {name}"] = right[target > 0].float().mean().item()
        box = batch["box"].flatten(1, -2)
        if sight.early is None or sight.late is None:
            # a tower with relative positions alone knows where a thing lies from the cell, not in the picture
            box = box - middles(batch["box"].shape[2]).to(box.device).repeat(1, batch["box"].shape[1], 1)
            return loss + 4 * (parts["box"] - box)[owned].abs().mean(), scores
        loss = loss + 4 * (parts["box"] - box)[owned].abs().mean()
        found = batch["presence"] > 0
        for name, logits in (("early", self.early(self.norm(sight.early))), ("late", self.late(sight.late))):
            each = functional.binary_cross_entropy_with_logits(logits.float(), batch["presence"], reduction="none")
            loss = loss + 4 * each.mean()
            scores[f"cls {name}"] = (logits > 0)[found].float().mean().item()
        return loss, scores


class Trainee(nn.Module):
    """A model with its probes."""

    name = "mini-llava"
    at: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Where the five layers that losses and weights of others speak of lie in the language model."""
    weights: torch.Tensor
    nouns: torch.Tensor
    colours: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        # a description has a hundred words, a colour one: without weights the long answers are all that is learnt
        weights = torch.tensor([WEIGHTS.get(task, 3.0) for task in TASKS])
        self.register_buffer("weights", weights, persistent=False)
        nouns, colours = naming()
        self.register_buffer("nouns", nouns, persistent=False)
        self.register_buffer("colours", colours, persistent=False)
        self.model = BUILDERS[self.name][0]()
        self.model.set_attn_implementation("plain")
        for layer in (LOOKING_BACK, *POINTING_LAYERS):
            self.attention(layer).watched = None
        self.probes = Probes(self.width, self.model.config.text_config.hidden_size)

    @property
    def width(self) -> int:
        """Width of the features that the probes read."""
        return self.model.config.vision_config.hidden_size

    def attention(self, layer: int) -> nn.Module:
        """The attention of one of the five layers."""
        return self.model.model.language_model.layers[self.at[layer]].self_attn

    def normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pictures uint8 ``[..., 3, height, width]`` as the processor hands them to the tower."""
        mean, std = (torch.tensor(level, device=pixels.device).view(3, 1, 1) for level in (MEAN, STD))
        return (pixels.float() / 255 - mean) / std

    def look(self, batch: dict[str, torch.Tensor]) -> Sight:
        """Run the tower."""
        inner = self.model.model
        seen = inner.vision_tower(self.normalised(batch["pixels"]), output_hidden_states=True)
        cells = seen.hidden_states[-2]
        visual = inner.multi_modal_projector(cells[:, 1:]) if "ids" in batch else None
        return Sight(cells[:, 1:], visual, cells[:, 0], seen.pooler_output)

    def positions(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Position ids for the language model."""
        return batch["positions"]

    def named(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Where questions name something, and which visual tokens show it.

        Returns
        -------
        Bool ``[rows, length]`` and ``[rows, length, N]``: nouns that name something, and what they, and the place that
        opens the answer, mean. The latter is given the last noun before it and what the answer itself says of the
        thing, so that "which object appears last ?" means one. All False where nothing is named.
        """
        ids = batch["ids"]
        asked, at = batch["labels"] == IGNORED, torch.arange(ids.shape[1], device=ids.device)
        noun, colour = self.nouns[ids], torch.cat((torch.zeros_like(ids[:, :1]), self.colours[ids[:, :-1]]), 1)
        naming = (noun >= 0) & asked
        last = torch.where(naming, at, -1).cummax(1).values
        answered = torch.where(asked | (ids == ASSISTANT), -1, at).cummax(1).values
        valid = (naming | (ids == ASSISTANT)) & (last > answered)
        noun, colour = (label.gather(1, last.clamp(min=0))[..., None] for label in (noun, colour))
        # an answer is a colour, a shape, both, or none of them
        one, two = (torch.cat((ids[:, by:], torch.full_like(ids[:, :by], PAD)), 1) for by in (1, 2))
        painted = torch.where(ids == ASSISTANT, self.colours[one], 0)[..., None]
        shaped = torch.where(ids == ASSISTANT, self.nouns[torch.where(self.colours[one] > 0, two, one)], 0)[..., None]
        # two pictures of a pair lie behind each other, as their tokens do
        shape, paint = (batch[name].reshape(len(ids), 1, -1) for name in ("shape", "colour"))
        meant = (shape > 0) & torch.where(noun > 0, shape == noun, shape <= len(SHAPES))
        meant = meant & ((colour == 0) | (paint == colour)) & valid[..., None]
        meant &= ((painted == 0) | (paint == painted)) & ((shaped <= 0) | (shape == shaped))
        if "step" in batch:
            # the last time a thing appears tells how often it did
            often = appearances(batch)[:, None].masked_fill(~meant, 0)
            counting = (batch["task"] == TASKS.index("occurrences")) & (ids == ASSISTANT)
            meant &= ~counting[..., None] | (often == often.amax(-1, keepdim=True))
        return naming, meant

    def pointing(self, batch: dict[str, torch.Tensor], places: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Loss and share of the attention that questions pay, among the visual tokens, to what they name.

        Answers alone teach it late: by colour first, by shape only after very many pictures.
        """
        naming, meant = self.named(batch)
        loss, share = batch["presence"].new_zeros(()), []
        for layer, opens in POINTING_LAYERS.items():
            row, place = (meant.any(2) & (~naming if opens else naming)).nonzero(as_tuple=True)
            columns = places[row].nonzero()[:, 1].view(len(row), meant.shape[2])
            logits = self.attention(layer).watched[row, 0, place]
            logits = logits.gather(1, columns)
            each = functional.log_softmax(logits.float(), -1).masked_fill(~meant[row, place], -torch.inf).logsumexp(-1)
            loss = loss - each.sum() / max(1, len(row))
            share.append(each.exp().sum().item() / max(1, len(row)))
        return loss, sum(share) / len(share)

    def looking_back(self, batch: dict[str, torch.Tensor], places: torch.Tensor) -> torch.Tensor:
        """Loss of the head that tells what was in the same cell one step before, from which events can be seen."""
        cells, count = batch["shape"].shape[-1] ** 2, int(places[0].sum())
        first = int(places[0].int().argmax())
        seen = slice(first, first + count)
        logits = self.attention(LOOKING_BACK).watched[:, -1, seen, seen].float()
        return -logits.log_softmax(-1).diagonal(-cells, 1, 2).mean()

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        """Loss and accuracies of a batch of :class:`Batches`."""
        sight = self.look(batch)
        loss, scores = self.probes(sight, batch)
        if "ids" not in batch or sight.visual is None:
            return loss, scores
        ids, config, text = batch["ids"], self.model.config, self.model.model.language_model
        embeds = text.embed_tokens(ids)
        places = (ids == config.image_token_id) | (ids == getattr(config, "video_token_id", -1))
        embeds = embeds.masked_scatter(places[..., None], sight.visual.to(embeds.dtype))
        read = text(
            inputs_embeds=embeds,
            attention_mask=visible(batch["turn"]),
            position_ids=self.positions(batch),
            use_cache=False,
            output_hidden_states=True,
        )
        hidden = read.last_hidden_state
        between, later = (
            states[places].view(len(ids), -1, states.shape[-1])
            for states in (read.hidden_states[self.at[number - 1] + 1] for number in (PLACED, COUNTED))
        )
        placed = self.probes.placed(between, batch)
        asked = batch["labels"] != IGNORED
        logits, target, task = self.model.lm_head(hidden[asked]).float(), batch["labels"][asked], batch["task"][asked]
        each = functional.cross_entropy(logits, target, reduction="none")
        weight = self.weights[task]
        weight = torch.where(target == END, 0.2 * weight, weight)  # it is easy to see and comes after every answer
        answers = (each * weight).sum() / weight.sum()
        right = logits.argmax(-1) == target
        opening = asked.clone()  # the first word of every answer; what follows is easier
        opening[:, 1:] &= ~asked[:, :-1]
        opening = opening[asked]
        scores["answer loss"] = answers.item()
        pointing, scores["pointing"] = self.pointing(batch, places)
        for number in task.unique().tolist():
            scores[f"word {TASKS[number]}"] = right[task == number].float().mean().item()
            scores[f"first {TASKS[number]}"] = right[opening & (task == number)].float().mean().item()
        if batch["pixels"].ndim == 5:
            back = self.looking_back(batch, places)
            scores["looking back"] = (-back).exp().item()
            tally, scores["tally"] = self.probes.counted(later, batch)
            pointing = pointing + back + 4 * self.probes.remembered(between, batch) + 4 * tally
        scores["box error"] = placed.item()
        return 2 * answers + 0.25 * pointing + 2 * placed + 0.5 * loss, scores


class DeepTrainee(Trainee):
    """``mini-llava-deep``: the same tower over larger pictures, and a language model of twelve layers."""

    name = "mini-llava-deep"
    at = (1, 3, 5, 7, 9)


class QwenTrainee(Trainee):
    """``mini-qwen-vl``: patches in merger order, no CLS, three-dimensional positions."""

    name = "mini-qwen-vl"

    @property
    def width(self) -> int:
        """Width of the merged features."""
        return self.model.config.vision_config.out_hidden_size

    def grids(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Time, height and width of every picture or clip in patches: int64 ``[count, 3]``."""
        pixels = batch["pixels"]
        steps = pixels.shape[1] // QWEN_FRAMES if pixels.ndim == 5 else 1
        side = pixels.shape[-1] // QWEN_PATCH
        return torch.tensor([[steps, side, side]] * pixels.shape[0], device=pixels.device)

    def look(self, batch: dict[str, torch.Tensor]) -> Sight:
        """Run the tower on ``[B, 3, H, W]`` pictures or ``[B, T, 3, H, W]`` clips."""
        pixels = self.normalised(batch["pixels"])
        if pixels.ndim == 4:
            pixels = pixels[:, None].expand(-1, QWEN_FRAMES, -1, -1, -1)
        count, frames, channels, height, width = pixels.shape
        across, down = width // QWEN_PATCH // QWEN_MERGE, height // QWEN_PATCH // QWEN_MERGE
        patches = pixels.reshape(
            *(count, frames // QWEN_FRAMES, QWEN_FRAMES, channels),
            *(down, QWEN_MERGE, QWEN_PATCH, across, QWEN_MERGE, QWEN_PATCH),
        ).permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9)
        flat = patches.reshape(-1, channels * QWEN_FRAMES * QWEN_PATCH * QWEN_PATCH)
        merged = self.model.model.visual(flat, grid_thw=self.grids(batch)).pooler_output.view(count, -1, self.width)
        return Sight(merged, merged)

    def positions(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Positions ``[3, rows, length]``: the model's own for what it sees; every block of text goes on after them."""
        ids, flat, config = batch["ids"], batch["positions"], self.model.config
        start = int((ids[0] == config.vision_end_token_id).nonzero().max()) + 1
        kinds = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
        grids = self.grids(batch)
        clip = batch["pixels"].ndim == 5
        each = grids.shape[0] // ids.shape[0]
        own, _ = self.model.model.get_rope_index(
            ids[:1, :start],
            kinds[:1, :start],
            image_grid_thw=None if clip else grids[:each],
            video_grid_thw=grids[:each] if clip else None,
            second_per_grid_ts=batch["step"].expand(each) if clip else None,
        )
        text = (flat - start + own[:, 0, -1].max() + 1).expand(3, -1, -1).clone()
        text[:, :, :start] = own
        return text


TRAINEES = {trainee.name: trainee for trainee in (Trainee, DeepTrainee, QwenTrainee)}


def grown(shipped: nn.Module, own: nn.Module, at: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The weights of a shipped model in one for larger pictures, whose language model has its layers at ``at``.

    Learned positions are interpolated. The layers between add nothing at first: their outputs are zero, so the language
    model begins as the one that it was.
    """
    weights = own.state_dict()
    for name in weights:
        if name.startswith("model.language_model.layers.") and name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name].zero_()
    for name, part in shipped.state_dict().items():
        if name.endswith("position_embedding.weight"):
            sides = [round((len(places) - 1) ** 0.5) for places in (part, weights[name])]
            grid = part[1:].T.unflatten(1, (sides[0], sides[0]))[None]
            wider = functional.interpolate(grid, (sides[1], sides[1]), mode="bicubic", align_corners=False)
            part = torch.cat((part[:1], wider[0].flatten(1).T))
        if name.startswith("model.language_model.layers."):
            number, _, rest = name.removeprefix("model.language_model.layers.").partition(".")
            name = f"model.language_model.layers.{at[int(number)]}.{rest}"
        weights[name] = part
    return weights


def progress(stage: str, average: dict[str, float]) -> float:
    """The accuracy that decides whether a stage is done."""
    if stage == "see":
        return min(average.get("cell character", 0.0), average.get("cell shape", 0.0))
    if stage == "describe":
        return average.get("word description", 0.0)
    asked = [value for name, value in average.items() if name.startswith("first ") and name != "first description"]
    return sum(asked) / max(1, len(asked))


def _plain_signals(worker: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Run:
    """One training run and its folder."""

    def __init__(
        self,
        model: str,
        work: Path,
        rate: float,
        hours: float,
        *,
        threads: int = 1,
        workers: int = 1,
        times: int = 1,
        device: str = "cpu",
        start: Path | None = None,
        stage: str | None = None,
    ) -> None:
        self.work, self.rate, self.hours, self.workers, self.device = work, rate, hours, workers, device
        self.stages = {name: replace(plan, batch=plan.batch * times) for name, plan in STAGES[model].items()}
        work.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.trainee = TRAINEES[model]().to(device)
        self.optimizer = torch.optim.AdamW(list(self.groups()), lr=rate, betas=(0.9, 0.98))
        self.state: dict = {"step": 0, "seen": 0, "stage": "see", "since": 0, "seconds": 0.0, "average": {}, "blind": 0}
        if self.checkpoint.exists():
            stored = torch.load(self.checkpoint, weights_only=True, map_location=device)
            self.trainee.load_state_dict(stored["trainee"])
            self.optimizer.load_state_dict(stored["optimizer"])
            self.state = stored["state"]
        if start and (self.state["stage"] == "see" or not self.checkpoint.exists()):
            self.begin_with(AutoModelForImageTextToText.from_pretrained(start, dtype=torch.float32))
        if stage and stage != self.state["stage"]:
            self.state |= {"stage": stage, "since": 0, "average": {}}

    def begin_with(self, shipped: nn.Module) -> None:
        """Take the weights of a shipped model; of one with another tower, those of the language model.

        The probes are not shipped: they learn alone for a while, lest they shake the tower that they read. In stage
        ``see`` the language model learns nothing, so it can still be exchanged.
        """
        own = self.trainee.model
        if type(shipped) is type(own):
            if not self.checkpoint.exists():
                same = shipped.config.text_config.num_hidden_layers == own.config.text_config.num_hidden_layers
                own.load_state_dict(shipped.state_dict() if same else grown(shipped, own, self.trainee.at))
                self.state["blind"] = 150
        else:
            text = {name: part for name, part in shipped.state_dict().items() if ".language_model." in name}
            text["lm_head.weight"] = shipped.lm_head.weight
            missing, unknown = own.load_state_dict(text, strict=False)
            if unknown or any(".language_model." in name and not name.endswith(".bias") for name in missing):
                raise SystemExit(f"The language model of {type(shipped).__name__} does not fit into this one.")

    def groups(self) -> Iterator[dict]:
        """Parameter groups: the tower learns at half the rate, biases and norms do not decay."""
        seeing = ("model.model.vision_tower.", "model.model.visual.", "probes.")
        named = list(self.trainee.named_parameters())
        for tower in (True, False):
            for decay in (0.02, 0.0):
                chosen = [p for n, p in named if n.startswith(seeing) == tower and (p.ndim > 1) == (decay > 0)]
                yield {"params": chosen, "weight_decay": decay, "scale": 0.5 if tower else 1.0}

    @property
    def checkpoint(self) -> Path:
        """The file that holds everything a run needs to go on."""
        return self.work / "checkpoint.pt"

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        parts = {"trainee": self.trainee.state_dict(), "optimizer": self.optimizer.state_dict(), "state": self.state}
        torch.save(parts, self.checkpoint.with_suffix(".new"))
        os.replace(self.checkpoint.with_suffix(".new"), self.checkpoint)

    def step(self, batch: dict[str, torch.Tensor]) -> None:
        """One step of the optimiser."""
        state = self.state
        left = 1 - state["seconds"] / (3600 * self.hours)
        warm = min(1.0, (state["since"] + 1) / 100)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * group["scale"] * warm * max(0.02, min(1.0, left / 0.4))
        self.trainee.model.requires_grad_(state["step"] >= state["blind"])
        with torch.autocast(self.device, dtype=torch.bfloat16):
            loss, scores = self.trainee(batch)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.trainee.parameters(), 1.0)
        self.optimizer.step()
        average = state["average"]
        for name, value in (scores | {"loss": loss.item()}).items():
            if value == value:  # a batch without a task has no accuracy for it
                average[name] = value if name not in average else 0.98 * average[name] + 0.02 * value
        state["step"] += 1
        state["since"] += 1
        state["seen"] += batch["pixels"].shape[0]

    def train(self) -> None:
        """Train until the hours are used or the process is asked to end; either way the checkpoint is written."""
        stop: list[int] = []
        previous = signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
        state, log = self.state, (self.work / "log.jsonl").open("a")
        bar = tqdm(total=round(3600 * self.hours), initial=round(state["seconds"]), unit="s", smoothing=0)
        saved = time.monotonic()
        while state["seconds"] < 3600 * self.hours and not stop:
            source = DataLoader(
                Batches(self.stages[state["stage"]], state["seen"]),
                batch_size=None,
                num_workers=self.workers,
                prefetch_factor=6,
                worker_init_fn=_plain_signals,
            )
            before = time.monotonic()
            for batch in source:
                self.step({name: part.to(self.device, non_blocking=True) for name, part in batch.items()})
                now = time.monotonic()
                state["seconds"] += min(now - before, 60.0)  # a paused process loses none of its hours
                before = now
                bar.n = round(state["seconds"])
                reached = progress(state["stage"], state["average"])
                if state["step"] % 25 == 0:
                    bar.set_postfix_str(
                        f"{state['stage']} {state['step']} loss {state['average']['loss']:.3f} reached {reached:.3f}"
                    )
                    line = {key: state[key] for key in ("step", "seen", "stage", "seconds")} | state["average"]
                    log.write(
                        json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}) + "\n"
                    )
                    log.flush()
                if now - saved > 180:
                    self.save()
                    saved = now
                names = list(self.stages)
                last = state["stage"] == names[-1]
                if not last and state["since"] > 200 and reached >= DONE_AT[state["stage"]]:
                    state["stage"] = names[names.index(state["stage"]) + 1]
                    state["since"] = 0
                    state["average"] = {}
                    break
                if stop or state["seconds"] >= 3600 * self.hours:
                    break
        signal.signal(signal.SIGTERM, previous)
        self.save()
        bar.close()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(TRAINEES))
    parser.add_argument(
        "--work", type=Path, required=True, help="folder of checkpoint and log; an existing one is resumed"
    )
    parser.add_argument("--hours", type=float, default=2.0, help="length of the whole training, earlier runs included")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="peak learning rate (of the tower: half)")
    parser.add_argument(
        "--stage", choices=list(STAGES["mini-qwen-vl"]), help="go to this stage now, whatever the accuracy"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--times", type=int, default=1, help="so many times larger batches, for a GPU")
    parser.add_argument("--workers", type=int, default=1, help="processes that draw pictures")
    parser.add_argument("--start", type=Path, help="Hugging Face folder whose weights a new run starts from")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    chosen = {name: getattr(options, name) for name in ("threads", "workers", "times", "device", "start", "stage")}
    Run(options.model, options.work, options.rate, options.hours, **chosen).train()


if __name__ == "__main__":
    main()
