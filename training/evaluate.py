"""What a mini model sees: accuracy per task on held-out seeds, with controls, as a table and as JSON.

``python -m training.evaluate --model mmaccel/models/mini-llava --json benchmarks/results/mini-llava-quality.json``

Columns: ``full``; ``blank`` (the same questions about a grey picture: what guessing gives); ``half`` (every second
visual token dropped before the language model, the others at their positions: what ``uniform`` at 50% costs). Below,
how much attention the CLS token pays to things and signs, against the share of the picture that they cover.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from tqdm import tqdm
from transformers import AutoModelForImageTextToText, AutoProcessor, DynamicCache, PreTrainedModel, ProcessorMixin

from mmaccel.suite import IMAGE_TASKS, Dice, Item, cell_labels, is_right, item_seed, make_item, sample_scene
from mmaccel.suite.scene import render

LONGEST_ANSWER = 8


def conversation(item: Item) -> list[dict]:
    """The item as chat messages; earlier turns hold their expected answers."""
    messages: list[dict] = []
    for number, turn in enumerate(item.turns):
        pictures = [{"type": "image"}] * len(item.scenes) if number == 0 else []
        messages.append({"role": "user", "content": [*pictures, {"type": "text", "text": turn.question}]})
        if turn is not item.turns[-1]:
            messages.append({"role": "assistant", "content": [{"type": "text", "text": turn.answer}]})
    return messages


@torch.inference_mode()
def answer(
    model: PreTrainedModel, processor: ProcessorMixin, items: list[Item], *, blank: bool = False, retain: float = 1.0
) -> list[str]:
    """Greedy answers to a batch of items with equally many pictures, keeping evenly spaced visual tokens."""
    pixels = model.config.vision_config.image_size
    pictures = [[Image.fromarray(picture) for picture in item.pictures(pixels)] for item in items]
    if blank:
        pictures = [[Image.new("RGB", (pixels, pixels), (128, 128, 128)) for _ in row] for row in pictures]
    texts = [processor.apply_chat_template(conversation(item), add_generation_prompt=True) for item in items]
    inputs = processor(images=pictures, text=texts, padding=True, return_tensors="pt")
    ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
    inner, visual = model.model, inputs["input_ids"] == model.config.image_token_id
    features = inner.get_image_features(inputs["pixel_values"].to(model.dtype)).pooler_output
    embeds = inner.get_input_embeddings()(ids)
    embeds = embeds.masked_scatter(visual[..., None], torch.cat(tuple(features)).to(embeds.dtype))
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    rank, total = visual.long().cumsum(-1) - 1, visual.sum(-1, keepdim=True)
    kept = ~visual | ((rank * retain).floor() != ((rank + 1) * retain).floor())
    order = [row.nonzero()[:, 0] for row in kept]  # every row keeps equally many, since all have as many pictures
    index = torch.stack(order)
    assert (total == total[0]).all()
    embeds, mask = embeds.gather(1, index[..., None].expand(-1, -1, embeds.shape[-1])), mask.gather(1, index)
    cache, written = DynamicCache(), []
    now = positions.gather(1, index)
    for _ in range(LONGEST_ANSWER):
        out = inner.language_model(
            inputs_embeds=embeds, attention_mask=mask.long(), position_ids=now, past_key_values=cache, use_cache=True
        )
        word = model.lm_head(out.last_hidden_state[:, -1:]).argmax(-1)
        written.append(word)
        embeds, now = inner.get_input_embeddings()(word), now[:, -1:] + 1
        mask = torch.cat((mask, mask.new_ones(len(items), 1)), 1)
        if (torch.cat(written, 1) == model.config.text_config.eos_token_id).any(1).all():
            break
    end = processor.tokenizer.eos_token
    return [text.split(end)[0].strip() for text in processor.batch_decode(torch.cat(written, 1))]


def accuracies(
    model: PreTrainedModel, processor: ProcessorMixin, split: str, per_task: int, batch: int = 50
) -> dict[str, dict[str, float]]:
    """Accuracy in percent: setting -> task (and, for reading, ``reading/size``) -> value."""
    settings = {"full": {}, "blank": {"blank": True}, "half": {"retain": 0.5}}
    right: dict[str, dict[str, list[bool]]] = {name: defaultdict(list) for name in settings}
    bar = tqdm(total=len(IMAGE_TASKS) * per_task * len(settings), unit="item")
    for task in IMAGE_TASKS:
        for start in range(0, per_task, batch):
            items = [make_item(task, split, index) for index in range(start, min(per_task, start + batch))]
            for name, options in settings.items():
                for item, text in zip(items, answer(model, processor, items, **options), strict=True):
                    right[name][task].append(is_right(text, item.answer))
                    if task == "reading":
                        right[name][f"reading/{item.turns[-1].detail}"].append(right[name][task][-1])
                bar.update(len(items))
    bar.close()
    return {
        name: {task: round(100 * float(np.mean(hits)), 1) for task, hits in rows.items()}
        for name, rows in right.items()
    }


@torch.inference_mode()
def cls_attention(model: PreTrainedModel, split: str, count: int = 64) -> tuple[dict[str, float], np.ndarray]:
    """Share of CLS attention on things and signs by layer, the share of cells they cover, and a picture of it.

    The picture shows six scenes with the attention of the feature layer (the last but one) under each.
    """
    size, patch = model.config.vision_config.image_size, model.config.vision_config.patch_size
    grid = size // patch
    scenes = [sample_scene(Dice(item_seed(split, index, stream=254))) for index in range(count)]
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
    parser.add_argument("--json", type=Path, help="write the figures here, with a picture of CLS attention beside")
    options = parser.parse_args()
    model = AutoModelForImageTextToText.from_pretrained(options.model, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(options.model)
    began = time.monotonic()
    accuracy = accuracies(model, processor, options.split, options.per_task)
    attention, picture = cls_attention(model, options.split)
    for rows in accuracy.values():
        rows["average"] = round(float(np.mean([rows[task] for task in IMAGE_TASKS])), 1)
    print(f"{'task':<16}" + "".join(f"{name:>8}" for name in accuracy))
    for task in accuracy["full"]:
        print(f"{task:<16}" + "".join(f"{rows[task]:>8.1f}" for rows in accuracy.values()))
    print("CLS attention on things, %: " + ", ".join(f"{name} {value}" for name, value in attention.items()))
    if options.json:
        record = {
            "command": shlex.join(["python", "-m", "training.evaluate", *sys.argv[1:]]),
            "date": datetime.now(UTC).date().isoformat(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, CPU",
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "split": options.split,
            "items_per_task": options.per_task,
            "seconds": round(time.monotonic() - began, 1),
            "accuracy_percent": accuracy,
            "cls_attention_percent": attention,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=2) + "\n")
        Image.fromarray(picture).save(options.json.with_name(options.json.stem.replace("quality", "cls") + ".png"))


if __name__ == "__main__":
    main()
