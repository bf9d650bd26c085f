"""Rows for the language model: questions packed behind a picture, and plain texts that it should not forget."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from pydoc_data.topics import topics as documented
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from mmaccel.suite.document import Document
from mmaccel.suite.questions import Turn, comparison, description
from mmaccel.suite.rng import Rng
from mmaccel.suite.scene import Scene
from mmaccel.suite.screens import sample_screens
from training.data import IGNORED, choose, visible
from training.smol.tower import GRID

IMAGE = 3
"""The id that stands for a visual token: a special token which the base never uses in a conversation."""
TRANSCRIBE = "Read the text on the page."
PASSAGE = 128
"""Tokens of a passage of plain text."""
TYPICAL = 960
"""Tokens of a row, for groups of rows that go through the model at once."""


@dataclass
class Row:
    """One packed row; the first ``IMAGE`` tokens belong to ``shown``, in order.

    ``ids``, ``labels``, ``positions``, ``turn``: int64 ``[length]`` as in :func:`training.data.pack` (a label belongs to
    the position that predicts it); ``weight``: float32 ``[length]``, of every label.
    """

    shown: list[Scene | Document]
    ids: Tensor
    labels: Tensor
    positions: Tensor
    turn: Tensor
    weight: Tensor


def split_rows(rows: Sequence[Row], together: int) -> list[list[Row]]:
    """Split rows, in their order, into groups that are padded to one length each: ``together`` rows, fewer of long ones.

    A group has at most ``together`` times :data:`TYPICAL` tokens, padding counted, but always a row.
    """
    found: list[list[Row]] = []
    for row in rows:
        wider = [*found[-1], row] if found else [row]
        longest = max(len(one.ids) for one in wider)
        if found and len(wider) <= together and len(wider) * longest <= together * TYPICAL:
            found[-1] = wider
        else:
            found.append([row])
    return found


@dataclass
class Rows:
    """Rows of one length, padded behind: the fields of :class:`Row` as ``[rows, length]``; padding has turn -1."""

    ids: Tensor
    labels: Tensor
    positions: Tensor
    turn: Tensor
    weight: Tensor

    @classmethod
    def of(cls, rows: Sequence[Row], shortest: int = 0) -> Rows:
        """Pad rows to the longest of them, and to ``shortest`` at least."""
        fillers = {"ids": 2, "labels": IGNORED, "positions": 0, "turn": -1, "weight": 0.0}
        length = max(shortest, *(len(row.ids) for row in rows))

        def padded(name: str, filler: float) -> Tensor:
            parts = [getattr(row, name) for row in rows]
            return torch.stack([functional.pad(part, (0, length - len(part)), value=filler) for part in parts])

        return cls(**{name: padded(name, filler) for name, filler in fillers.items()})

    def to(self, device: torch.device | str) -> Rows:
        """The same on a device."""
        return type(self)(**{part.name: getattr(self, part.name).to(device) for part in fields(self)})

    def bias(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """What is added to attention logits: ``[rows, 1, length, length]``, 0 where a query sees a key."""
        return torch.where(visible(self.turn), 0.0, -1e4).to(dtype)


def packed(
    tokenizer: PreTrainedTokenizerFast,
    shown: Sequence[Scene | Document],
    turns: Sequence[Turn],
    chat: bool = False,
    spread: bool = False,
) -> Row:
    """Pack questions behind pictures; in a ``chat`` every turn sees the ones before, otherwise the pictures alone.

    ``spread`` pictures stand in the turns of a chat, the first in the first; turns after the last picture have none.
    """

    def coded(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def pictures(count: int) -> list[int]:
        return ([IMAGE] * (GRID * GRID) + coded("\n")) * count

    ids = coded("<|im_start|>user\n") + pictures(1 if spread else len(shown))
    first = len(ids)
    labels, weight, positions, turn = [IGNORED] * first, [0.0] * first, list(range(first)), [0] * first
    for number, asked in enumerate(turns):
        opening = coded("\n<|im_start|>user\n") if chat and number else []
        opening += pictures(int(spread and 0 < number < len(shown)))
        question = opening + coded(f"{asked.question}<|im_end|>\n<|im_start|>assistant\n")
        answer = coded(f"{asked.answer}<|im_end|>")
        start, length = positions[-1] + 1 if chat else first, len(question) + len(answer)
        ids += question + answer
        labels += [IGNORED] * (len(question) - 1) + answer + [IGNORED]
        weight += [len(answer) ** -0.5] * length  # a long answer counts more than a short one, but not by its length
        positions += range(start, start + length)
        turn += [0 if chat else number + 1] * length
    parts = (torch.tensor(part) for part in (ids, labels, positions, turn))
    return Row(list(shown), *parts, torch.tensor(weight))


def plain_row(ids: Tensor) -> Row:
    """A text without a picture, int64 ``[length]``, from which no answer is learnt."""
    none = torch.full_like(ids, IGNORED)
    return Row([], ids, none, torch.arange(len(ids)), torch.zeros_like(ids), torch.zeros(len(ids)))


def scene_row(tokenizer: PreTrainedTokenizerFast, scenes: Sequence[Scene], rng: Rng, count: int) -> Row:
    """Questions of the suite about a scene, or comparisons of two."""
    if len(scenes) == 2:
        return packed(tokenizer, list(scenes), rng.some(comparison(*scenes, rng), count))
    turns, chat = choose(scenes[0], rng, count), rng.chance(0.2)
    if rng.chance(0.3) and not chat:
        turns.append(description(scenes[0]))
    return packed(tokenizer, list(scenes), turns or [description(scenes[0])], chat)


def page_row(tokenizer: PreTrainedTokenizerFast, page: Document, turns: Sequence[Turn], rng: Rng, count: int) -> Row:
    """Questions about a page, a few of which want a sentence, and now and then the whole text."""
    short = [turn for turn in turns if turn.detail == "short"]
    chosen = rng.some(short, count - 2) + rng.some([turn for turn in turns if turn.detail == "sentence"], 2)
    chosen, chat = rng.shuffled(chosen), rng.chance(0.2)
    if rng.chance(0.5) and not chat:
        chosen.append(Turn("transcript", TRANSCRIBE, page.text))
    return packed(tokenizer, [page], chosen, chat)


def screens_row(tokenizer: PreTrainedTokenizerFast, rng: Rng, count: int) -> Row:
    """A chat in which two or three turns bring a screen each, and then up to ``count`` turns in all ask about any of them."""
    session, possible = sample_screens(rng, rng.integer(2, 3))
    pages, turns = [page for page, _ in session], [turn for _, turn in session]
    more = rng.some([turn for turn in possible if turn not in turns], max(0, count - len(turns)))
    return packed(tokenizer, pages, turns + more, chat=True, spread=True)


# ------------------------------------------------------------------------------------------------------- plain text

ASKS = (
    "Write a short story about {}.",
    "Explain in simple words how {} works or what it is for.",
    "Give me three tips about {}.",
    "What should a beginner know about {}?",
)
SUBJECTS = (
    "a garden,the weather,a train journey,cooking rice,learning a language,a lost dog,the sea,saving money,a good night's "
    "sleep,a rainy day,making friends,a small village,riding a bicycle,reading books,the moon,baking bread,a job interview,"
    "a birthday party,playing chess,growing tomatoes,a long walk,music,the heart,an old house"
).split(",")


def prose(split: str) -> list[str]:
    """Documentation that comes with Python: every fifth topic is for the report, unless its text is another one's too."""
    topics = sorted(documented.items())
    train = {text: None for number, (_, text) in enumerate(topics) if number % 5}
    return list(train) if split == "train" else [text for _, text in topics if text not in train]


def passages(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[Tensor]:
    """Cut texts into runs of :data:`PASSAGE` tokens, int64 ``[PASSAGE]`` each; what is left over is dropped."""
    runs = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        runs += [torch.tensor([1, *ids[at : at + PASSAGE - 1]]) for at in range(0, len(ids) - PASSAGE, PASSAGE)]
    return runs


@torch.inference_mode()
def answers_of_base(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    split: str,
    path: Path | None = None,
    batch: int = 24,
    longest: int = 80,
) -> list[Tensor]:
    """Conversations in which the bare language model answers, int64 ``[length]`` each; read from ``path``, or written there.

    Every fourth subject is for the report, the others to train.
    """
    if path and path.exists():
        return [torch.tensor(ids) for ids in json.loads(path.read_text())]
    subjects = [subject for number, subject in enumerate(SUBJECTS) if (number % 4 == 0) == (split == "test")]
    prompts = [
        f"<|im_start|>user\n{ask.format(one)}<|im_end|>\n<|im_start|>assistant\n" for one in subjects for ask in ASKS
    ]
    settings: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "max_new_tokens": longest, "pad_token_id": 2}
    found: list[list[int]] = []
    torch.manual_seed(0)
    used = model.config._attn_implementation
    model.set_attn_implementation("sdpa")  # the one of the training takes masks of its own
    for first in range(0, len(prompts), batch):
        coded = tokenizer(prompts[first : first + batch], return_tensors="pt", padding=True, padding_side="left")
        made = model.generate(coded["input_ids"], attention_mask=coded["attention_mask"], **settings)
        for ids, mask in zip(made, coded["attention_mask"], strict=True):
            padding = int((mask == 0).sum())
            row, answer = ids[padding:].tolist(), len(mask) - padding
            end = next((at + 1 for at in range(answer, len(row)) if row[at] == 2), len(row))
            found.append(row[:end])
    model.set_attn_implementation(used)
    if path:
        path.write_text(json.dumps(found))
    return [torch.tensor(ids) for ids in found]
