"""What a mini model sees: accuracy per task on held-out seeds, with controls, as a table and as JSON.

``python -m training.evaluate --model mmaccel/models/mini-llava --json benchmarks/results/mini-llava-quality.json``

Columns: ``full``; ``blank`` (the same questions about grey pictures: what guessing gives); ``half`` (recipe ``uniform``
with every second visual token). Models that take clips are asked about clips too. For a tower with CLS: how much of its
attention goes to things and signs, against the share of the picture that they cover.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel, ProcessorMixin

from mmaccel.media.files import Prompt
from mmaccel.programs.evaluate import Question, Row, ask_suite, evaluate
from mmaccel.suite import (
    IMAGE_TASKS,
    VIDEO_TASKS,
    Rng,
    cell_labels,
    item_seed,
    make_item,
    render,
    sample_scene,
)
from training.results import write

LONGEST_ANSWER = 8
GREY = 128
PICTURE_SIDE, CLIP_SIDE = 224, 112
"""Pixels at which a model of any resolution is asked; one with a fixed size is asked at that."""


def questions(model: PreTrainedModel, processor: ProcessorMixin, split: str, per_task: int) -> list[Question]:
    """All tasks that the model can be asked, ``per_task`` questions each."""
    side = getattr(model.config.vision_config, "image_size", PICTURE_SIDE)
    asked = ask_suite(IMAGE_TASKS, per_task, split=split, pixels=side)
    if getattr(processor, "video_processor", None) is not None:
        asked += ask_suite(VIDEO_TASKS, per_task, split=split, pixels=CLIP_SIDE)
    return asked


def blanked(question: Question) -> Question:
    """The same question about grey pictures or frames."""

    def load() -> Prompt:
        prompt = question.load()
        pictures = tuple(Image.new("RGB", picture.size, (GREY,) * 3) for picture in prompt.pictures)
        clip = prompt.clip and replace(prompt.clip, frames=np.full_like(prompt.clip.frames, GREY))
        return replace(prompt, pictures=pictures, clip=clip)

    return replace(question, load=load)


def detail(question: Question, split: str) -> str:
    """What makes a question of the suite easy or hard, such as the size of the characters to read."""
    return make_item(question.task, split, int(question.name.rsplit("-", 1)[1])).turns[-1].detail


def accuracies(
    model: PreTrainedModel, processor: ProcessorMixin, split: str, per_task: int, batch: int = 50
) -> dict[str, dict[str, float]]:
    """Accuracy in percent: setting -> task (and, for reading, ``reading/size``) -> value."""
    asked = questions(model, processor, split, per_task)
    details = {question.name: detail(question, split) for question in asked if question.task == "reading"}
    runs = (
        (asked, {"full": Row("none"), "half": Row("uniform", 0.5)}),
        ([blanked(question) for question in asked], {"blank": Row("none")}),
    )
    right: dict[str, dict[str, list[bool]]] = {name: defaultdict(list) for name in ("full", "blank", "half")}
    with tqdm(total=3 * len(asked), unit="answer") as bar:
        for about, rows in runs:
            todo = list(rows.values())
            for row, answers in evaluate(
                model, processor, about, todo, batch_size=batch, max_new_tokens=LONGEST_ANSWER
            ):
                found = right[next(name for name, known in rows.items() if known is row)]
                for answer in answers:
                    found[answer.task].append(bool(answer.right))
                    if answer.task == "reading":
                        found[f"reading/{details[answer.name]}"].append(bool(answer.right))
                bar.update(len(answers))
    return {
        name: {task: round(100 * float(np.mean(found[task])), 1) for task in sorted(found, key=_place)}
        for name, found in right.items()
    }


def sample_answers(model: PreTrainedModel, processor: ProcessorMixin, split: str, per_task: int = 3) -> dict[str, str]:
    """Answers to the first questions of every task, by which the measured weights can be recognised."""
    asked = questions(model, processor, split, per_task)
    found = evaluate(model, processor, asked, [Row("none")], max_new_tokens=LONGEST_ANSWER)
    given = {answer.name: answer.answer for _, answers in found for answer in answers}
    return {question.name: given[question.name] for question in asked}


def _place(task: str) -> tuple[int, str]:
    return (*IMAGE_TASKS, *VIDEO_TASKS).index(task.split("/")[0]), task


def averages(accuracy: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Means over the image tasks and over the video tasks: kind -> setting -> percent."""
    return {
        kind: {name: round(float(np.mean([found[task] for task in tasks])), 1) for name, found in accuracy.items()}
        for kind, tasks in (("image", IMAGE_TASKS), ("video", VIDEO_TASKS))
        if set(tasks) <= accuracy["full"].keys()
    }


@torch.inference_mode()
def cls_attention(model: PreTrainedModel, split: str, count: int = 64) -> tuple[dict[str, float], np.ndarray]:
    """Share of CLS attention on things and signs by layer, the share of cells they cover, and a picture of it.

    The picture shows six scenes with the attention of the feature layer (the last but one) under each.
    """
    size, patch = model.config.vision_config.image_size, model.config.vision_config.patch_size
    grid = size // patch
    scenes = [sample_scene(Rng(item_seed(split, index, stream=254))) for index in range(count)]
    pictures = np.stack([render(scene, size) for scene in scenes])
    owned = torch.from_numpy(np.stack([cell_labels(scene, grid).shape > 0 for scene in scenes])).flatten(1)
    tower = model.model.vision_tower
    implementation = tower.config._attn_implementation
    tower.set_attn_implementation("eager")
    pixels = (torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.25
    attentions = tower(pixels.to(model.dtype), output_attentions=True).attentions
    tower.set_attn_implementation(implementation)
    rows = [layer[:, :, 0, 1:].float().mean(1) for layer in attentions]
    shares = {f"layer {number}": (row * owned).sum(1) / row.sum(1) for number, row in enumerate(rows)}
    figures = {name: round(100 * share.mean().item(), 1) for name, share in shares.items()}
    figures["covered"] = round(100 * owned.float().mean().item(), 1)
    heat = rows[-2][:6].reshape(-1, grid, grid)
    heat = (heat / heat.amax((1, 2), keepdim=True) * 255).byte().numpy()
    panels = []
    for picture, map_ in zip(pictures, heat, strict=False):
        large = np.asarray(Image.fromarray(map_).resize((size, size), Image.Resampling.NEAREST))
        panels.append(np.concatenate((picture, np.repeat(large[..., None], 3, 2))))
    return figures, np.concatenate(panels, 1)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder of a mini model")
    parser.add_argument("--split", default="test", choices=["val", "test"])
    parser.add_argument("--per-task", type=int, default=200)
    parser.add_argument("--batch", type=int, default=50, help="questions at a time")
    parser.add_argument("--json", type=Path, help="write the figures here, with a picture of CLS attention beside")
    options = parser.parse_args()
    model = AutoModelForImageTextToText.from_pretrained(options.model, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(options.model)
    began = time.monotonic()
    accuracy = accuracies(model, processor, options.split, options.per_task, options.batch)
    means, figures = averages(accuracy), {}
    rows = [(task, [found[task] for found in accuracy.values()]) for task in accuracy["full"]]
    rows += [(f"{kind} average", list(found.values())) for kind, found in means.items()]
    print(f"{'task':<16}" + "".join(f"{name:>8}" for name in accuracy))
    for name, values in rows:
        print(f"{name:<16}" + "".join(f"{value:>8.1f}" for value in values))
    if model.config.vision_config.model_type == "clip_vision_model":
        attention, picture = cls_attention(model, options.split)
        print("CLS attention on things, %: " + ", ".join(f"{name} {value}" for name, value in attention.items()))
        figures["cls_attention_percent"] = attention
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(options.json.with_name(options.json.stem.replace("quality", "cls") + ".png"))
    if options.json:
        record = {
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "split": options.split,
            "items_per_task": options.per_task,
            "seconds": round(time.monotonic() - began, 1),
            "accuracy_percent": accuracy,
            "average_percent": means,
            "sample_answers": sample_answers(model, processor, options.split),
        }
        write(options.json, "training.evaluate", ("transformers",), record | figures)


if __name__ == "__main__":
    main()
