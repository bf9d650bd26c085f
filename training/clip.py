"""Train ``mini-clip``: an open_clip model around the vision tower of ``mini-llava``.

``python -m training.clip --work DIR --to mmaccel/models/mini-clip --json benchmarks/results/mini-clip-quality.json``

The tower is frozen (as in LiT, arXiv 2111.07991): what it makes of the training pictures is computed once and kept in
``DIR``. The text tower and the visual projection learn that a text belongs to every picture that holds all it names
(CLS), and to every cell that shows one of the things it names (patches), so that the cosine of a patch and a question
means relevance. Positives are found by labels, so the loss has several for each row (as in SupCon, arXiv 2004.11362).

Started again, a run goes on. When the tower's weights have changed, the same command begins anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
from safetensors.torch import save
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from torch.nn.functional import normalize
from tqdm import tqdm
from transformers import AutoModelForImageTextToText, CLIPVisionModel, PreTrainedTokenizerFast

from mmaccel.suite import Rng, item_seed, render
from training.build import BOS, GRID, MEAN, PAD, PATCH, PIXELS, STD, build_tokenizer
from training.captions import caption, cells, meaning, means_cell, means_picture, padded, scene_at, text_about, things
from training.results import write

CONTEXT = 40
END_OF_TEXT = "<|endoftext|>"
WIDTH = 128
CHUNK = 500
CELLS = 24
"""Cells of every picture that take part in the training: those with characters first, then things, then ground."""


def config(tower: CLIPVisionModel) -> dict[str, Any]:
    """The ``open_clip_config.json`` of an open_clip model whose vision tower is a ``CLIPVisionModel``'s."""
    vision = tower.config
    return {
        "model_cfg": {
            "embed_dim": WIDTH,
            "vision_cfg": {
                "image_size": vision.image_size,
                "patch_size": vision.patch_size,
                "width": vision.hidden_size,
                "layers": vision.num_hidden_layers,
                "head_width": vision.hidden_size // vision.num_attention_heads,
                "mlp_ratio": vision.intermediate_size / vision.hidden_size,
                "norm_kwargs": {"eps": vision.layer_norm_eps},
            },
            "text_cfg": {
                "context_length": CONTEXT,
                "vocab_size": len(build_text_tokenizer()),
                "hf_tokenizer_name": "mini-clip",
                "width": WIDTH,
                "heads": 4,
                "layers": 2,
                "mlp_ratio": 3.0,
                "pad_id": PAD,
            },
        },
        "preprocess_cfg": {"mean": list(MEAN), "std": list(STD), "interpolation": "bicubic", "resize_mode": "squash"},
    }


def converted(tower: CLIPVisionModel) -> dict[str, Tensor]:
    """The weights of a ``CLIPVisionModel`` by the names of open_clip's ``visual``, all but its ``proj``."""
    own = tower.state_dict()
    weights = {
        "class_embedding": own["embeddings.class_embedding"],
        "positional_embedding": own["embeddings.position_embedding.weight"],
        "conv1.weight": own["embeddings.patch_embedding.weight"],
    }
    for kind in ("weight", "bias"):
        weights[f"ln_pre.{kind}"] = own[f"pre_layrnorm.{kind}"]
        weights[f"ln_post.{kind}"] = own[f"post_layernorm.{kind}"]
        for number in range(tower.config.num_hidden_layers):
            ours, theirs = f"encoder.layers.{number}", f"transformer.resblocks.{number}"
            heads = [own[f"{ours}.self_attn.{name}_proj.{kind}"] for name in "qkv"]
            weights[f"{theirs}.attn.in_proj_{kind}"] = torch.cat(heads)
            weights[f"{theirs}.attn.out_proj.{kind}"] = own[f"{ours}.self_attn.out_proj.{kind}"]
            weights[f"{theirs}.mlp.c_fc.{kind}"] = own[f"{ours}.mlp.fc1.{kind}"]
            weights[f"{theirs}.mlp.c_proj.{kind}"] = own[f"{ours}.mlp.fc2.{kind}"]
            weights[f"{theirs}.ln_1.{kind}"] = own[f"{ours}.layer_norm1.{kind}"]
            weights[f"{theirs}.ln_2.{kind}"] = own[f"{ours}.layer_norm2.{kind}"]
    return weights


def build_clip(tower: CLIPVisionModel) -> open_clip.CLIP:
    """An open_clip model with the given tower, frozen, and an untrained text tower and visual projection."""
    model = open_clip.CLIP(**config(tower)["model_cfg"])
    model.visual.load_state_dict(converted(tower) | {"proj": model.visual.proj})
    for name, weight in model.visual.named_parameters():
        weight.requires_grad_(name == "proj")
    return model


def build_text_tokenizer() -> PreTrainedTokenizerFast:
    """The suite's tokenizer as open_clip calls it: begin, words, end, padding on the right.

    The end is a token of its own with the highest id, since that is where open_clip looks for the meaning of a text.
    """
    tokenizer = build_tokenizer((END_OF_TEXT,))
    tokenizer.padding_side, tokenizer.model_max_length = "right", CONTEXT
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"<s> $A {END_OF_TEXT}",
        special_tokens=[("<s>", BOS), (END_OF_TEXT, tokenizer.convert_tokens_to_ids(END_OF_TEXT))],
    )
    return tokenizer


def tokens(model: open_clip.CLIP, pixels: Tensor) -> Tensor:
    """CLS and all patches after the last norm, ``[B, 1 + N, width]``; times ``visual.proj`` they compare with texts."""
    seen = model.visual.forward_intermediates(
        pixels,
        indices=1,
        normalize_intermediates=True,
        intermediates_only=True,
        output_fmt="NLC",
        output_extra_tokens=True,
    )
    return torch.cat((seen["image_intermediates_prefix"][0], seen["image_intermediates"][0]), 1)


def pixels_of(indices: range, split: str) -> Tensor:
    """Pictures as the preprocessing of the model makes them: float32 ``[B, 3, PIXELS, PIXELS]``."""
    pictures = np.stack([render(scene_at(split, index), PIXELS) for index in indices])
    mean, std = (torch.tensor(level).view(3, 1, 1) for level in (MEAN, STD))
    return (torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255 - mean) / std


def choose_cells(labels: np.ndarray, number: int) -> np.ndarray:
    """``CELLS`` of a picture's cells: up to 6 with a character, up to 8 more of things, the rest mostly ground."""
    shuffled = np.random.default_rng(number).permutation(len(labels))
    rank = np.where(labels[shuffled, 2] > 0, 0, np.where(labels[shuffled, 0] > 0, 1, 2))
    kinds = [shuffled[rank == kind] for kind in range(3)]
    return np.concatenate((kinds[0][:6], kinds[1][:8], kinds[2], kinds[1][8:]))[:CELLS]


@torch.inference_mode()
def look(model: open_clip.CLIP, folder: Path, pictures: int) -> dict[str, Tensor]:
    """What the frozen tower makes of the training pictures, in chunks that are kept in ``folder``.

    Returns
    -------
    ``cls`` float16 ``[P, width]``, ``cells`` float16 ``[P, CELLS, width]``, ``labels`` int64 ``[P, CELLS, 3]``.
    """
    parts: list[dict[str, Tensor]] = []
    for start in tqdm(range(0, pictures, CHUNK), unit="chunk", desc="pictures"):
        path = folder / f"{start:06d}.pt"
        if not path.exists():
            labels = [cells(scene_at("train", index), GRID) for index in range(start, start + CHUNK)]
            chosen = np.stack([choose_cells(label, start + row) for row, label in enumerate(labels)])
            rows = []
            for first in range(start, start + CHUNK, 50):
                rows.append(tokens(model, pixels_of(range(first, first + 50), "train")).half())
            seen, index = torch.cat(rows), torch.from_numpy(chosen)
            taken = seen[:, 1:].gather(1, index[..., None].expand(-1, -1, seen.shape[-1]))
            shown = torch.from_numpy(np.stack([label[row] for label, row in zip(labels, chosen, strict=True)]))
            _write({"cls": seen[:, 0].clone(), "cells": taken, "labels": shown}, path)
        parts.append(torch.load(path, weights_only=True))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _write(parts: dict[str, Any], path: Path) -> None:
    """Write a file whole or not at all."""
    torch.save(parts, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def matched(logits: Tensor, positive: Tensor) -> Tensor:
    """Cross entropy from rows to all their positive columns alike, ``[R, C]`` -> scalar; rows without one are left out."""
    asked = positive.any(1)
    target = positive[asked].float()
    return -(target * logits[asked].log_softmax(1)).sum(1).div(target.sum(1)).mean()


class Run:
    """One training run and its folder, which belongs to the weights of one tower."""

    def __init__(
        self, tower: CLIPVisionModel, work: Path, *, minutes: float, rate: float, pictures: int, batch: int
    ) -> None:
        digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in tower.state_dict().values()))
        self.work = work / f"tower-{digest.hexdigest()[:12]}"
        self.work.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        self.model, self.tokenizer = build_clip(tower), build_text_tokenizer()
        self.minutes, self.rate, self.batch = minutes, rate, batch
        self.seen = look(self.model.eval(), self.work, pictures)
        self.learnt = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        groups = [
            {"params": [weight for weight in self.learnt.values() if (weight.ndim > 1) == wide], "weight_decay": decay}
            for wide, decay in ((True, 0.02), (False, 0.0))
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98))
        self.state: dict[str, Any] = {"step": 0, "seconds": 0.0, "average": {}}
        if self.checkpoint.exists():
            stored = torch.load(self.checkpoint, weights_only=True)
            self.model.load_state_dict(stored["model"], strict=False)
            self.optimizer.load_state_dict(stored["optimizer"])
            self.state = stored["state"]

    @property
    def checkpoint(self) -> Path:
        """The file that holds all that was learnt."""
        return self.work / "checkpoint.pt"

    def save(self) -> None:
        """Write the checkpoint."""
        parts = {"model": self.learnt, "optimizer": self.optimizer.state_dict(), "state": self.state}
        _write(parts, self.checkpoint)

    def loss(self, step: int) -> tuple[Tensor, dict[str, float]]:
        """The loss of a batch of pictures with one text each, and how often the best match is a right one."""
        rng = Rng(item_seed("train", step, stream=252))
        chosen = [rng.integer(0, len(self.seen["cls"]) - 1) for _ in range(self.batch)]
        scenes = [scene_at("train", number) for number in chosen]
        texts = [text_about(scene, rng) for scene in scenes]
        ids = self.tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt")["input_ids"]
        asked, index, model = padded([meaning(text) for text in texts]), torch.tensor(chosen), self.model
        written = model.logit_scale.exp() * model.encode_text(ids, normalize=True)
        total, scores = written.new_zeros(()), {}
        for name, positive in (
            ("cls", means_picture(asked, padded([things(scene) for scene in scenes]))),
            ("cells", means_cell(asked, self.seen["labels"][index].flatten(0, 1))),
        ):
            features = self.seen[name][index].float().view(positive.shape[1], -1)
            logits = written @ normalize(features @ model.visual.proj, dim=-1).T
            total = total + matched(logits, positive) + matched(logits.T, positive.T)
            hit = positive[torch.arange(self.batch), logits.argmax(1)]
            scores[f"right {name}"] = hit[positive.any(1)].float().mean().item()
        return total, scores

    def train(self) -> open_clip.CLIP:
        """Train until the minutes are used; every half minute a checkpoint. The learning rate falls as half a cosine."""
        state, whole = self.state, 60 * self.minutes
        bar = tqdm(total=round(whole), initial=round(state["seconds"]), unit="s", smoothing=0, desc="texts")
        saved = before = time.monotonic()
        with (self.work / "log.jsonl").open("a") as log:
            while state["seconds"] < whole:
                done = state["seconds"] / whole
                for group in self.optimizer.param_groups:
                    group["lr"] = self.rate * min(1.0, (state["step"] + 1) / 50) * (1 + math.cos(math.pi * done)) / 2
                loss, scores = self.loss(state["step"])
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.learnt.values(), 1.0)
                self.optimizer.step()
                with torch.no_grad():
                    self.model.logit_scale.clamp_(max=math.log(100))
                for name, value in (scores | {"loss": loss.item()}).items():
                    state["average"][name] = 0.95 * state["average"].get(name, value) + 0.05 * value
                now = time.monotonic()
                state["step"], state["seconds"], before = state["step"] + 1, state["seconds"] + now - before, now
                if state["step"] % 25 == 0:
                    line = {"step": state["step"], "seconds": state["seconds"], **state["average"]}
                    line = {name: round(value, 4) for name, value in line.items()}
                    log.write(json.dumps(line) + "\n")
                    log.flush()
                    bar.set_postfix_str(f"step {state['step']} loss {line['loss']:.3f} right {line['right cls']:.3f}")
                bar.n = round(min(state["seconds"], whole))
                if now - saved > 30:
                    self.save()
                    saved = now
        bar.close()
        self.save()
        return self.model.eval()


def export(model: open_clip.CLIP, tower: CLIPVisionModel, folder: Path) -> int:
    """Write what ``open_clip.create_model_from_pretrained("local-dir:FOLDER")`` reads; return the size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "open_clip_config.json").write_text(json.dumps(config(tower), indent=2) + "\n")
    half = {name: weight.half().contiguous() for name, weight in model.state_dict().items()}
    (folder / "open_clip_model.safetensors").write_bytes(save(half))
    build_text_tokenizer().save_pretrained(folder)
    return sum(path.stat().st_size for path in folder.iterdir())


def auc(score: Tensor, positive: Tensor) -> float:
    """Chance that a positive scores higher than a negative; ``score [N]``, ``positive [N]`` bool with both kinds."""
    high, low = score[positive][:, None], score[~positive]
    return ((high > low).float() + 0.5 * (high == low).float()).mean().item()


@torch.inference_mode()
def quality(folder: Path, split: str = "test", count: int = 200) -> dict[str, float]:
    """What a shipped model is worth on ``count`` held-out scenes, in percent.

    ``caption to picture``: whether the picture of a whole caption is the best (or among the best five) of 50; chance is 2
    (10). ``object to picture``: AUC of all names, over all pictures; ``object to patch`` and ``question to patch``: AUC of
    a thing's own patches among all patches of its picture; chance is 50.
    """
    model, _ = open_clip.create_model_from_pretrained(f"local-dir:{folder}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    scenes = [scene_at(split, index) for index in range(count)]

    def read(texts: list[str]) -> Tensor:
        return model.encode_text(tokenizer(texts), normalize=True)

    rows = [tokens(model, pixels_of(range(first, min(first + 50, count)), split)) for first in range(0, count, 50)]
    features = normalize(torch.cat(rows) @ model.visual.proj, dim=-1)
    shown, figures = padded([things(scene) for scene in scenes]), {}
    similar = read([caption(scene) for scene in scenes]) @ features[:, 0].T
    groups = torch.arange(count) // 50
    rank = ((similar >= similar.diagonal()[:, None]) & (groups == groups[:, None])).sum(1)
    for most in (1, 5):
        figures[f"caption to picture, first {most} of 50"] = (rank <= most).float().mean().item()
    names = sorted({thing.name for scene in scenes for thing in scene.things})
    held = means_picture(padded([meaning(name) for name in names]), shown)
    objects = zip(read([f"a {name}" for name in names]) @ features[:, 0].T, held, strict=True)
    figures["object to picture, AUC"] = float(np.mean([auc(row, positive) for row, positive in objects]))
    for kind, wording in (("object", "a {}"), ("question", "where is the {} ?")):
        values = []
        for scene, seen in zip(scenes, features[:, 1:], strict=True):
            labels = torch.from_numpy(cells(scene, PIXELS // PATCH))
            texts = [wording.format(thing.name) for thing in scene.unique()]
            if texts:
                owned = means_cell(padded([meaning(text) for text in texts]), labels)
                values += [auc(row, mine) for row, mine in zip(read(texts) @ seen.T, owned, strict=True)]
        figures[f"{kind} to patch, AUC"] = float(np.mean(values))
    return {name: round(100 * value, 1) for name, value in figures.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of features, checkpoint and log")
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the training, earlier runs included")
    parser.add_argument("--llava", type=Path, default=Path("mmaccel/models/mini-llava"), help="whose tower to take")
    parser.add_argument("--to", type=Path, help="folder to write the model to")
    parser.add_argument("--json", type=Path, help="write the figures of the written model here")
    parser.add_argument("--pictures", type=int, default=8000, help="training pictures, looked at once")
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if options.json and not options.to:
        parser.error("--json measures the written model: give --to as well")
    torch.set_num_threads(options.threads)
    tower = AutoModelForImageTextToText.from_pretrained(options.llava, dtype=torch.float32).model.vision_tower
    chosen = {name: getattr(options, name) for name in ("minutes", "rate", "pictures", "batch")}
    run = Run(tower, options.work, **chosen)
    model = run.train()
    if not options.to:
        return
    print(f"{options.to}: {export(model, tower, options.to) / 1e6:.2f} MB")
    figures = quality(options.to)
    print("\n".join(f"{name:<36}{value:>8.1f}" for name, value in figures.items()))
    if options.json:
        record = {
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "pictures": len(run.seen["cls"]),
            "steps": run.state["step"],
            "training_seconds": round(run.state["seconds"], 1),
            "split": "test",
            "quality_percent": figures,
        }
        write(options.json, "training.clip", ("transformers", "open_clip_torch"), record)


if __name__ == "__main__":
    main()
