"""Write a checkpoint of ``mini-smol`` as an adapted model (:mod:`mmaccel.families.adapted`), in float16.

``python -m training.smol.export --work DIR --to packages/mmaccel-models/mmaccel_models/mini-smol``
"""

from __future__ import annotations

import argparse
import json
from hashlib import sha256
from pathlib import Path

import torch
from safetensors.torch import load, save_file
from torch import nn
from transformers import CLIPImageProcessor, LlamaConfig, LlavaConfig

from mmaccel.families.adapted import ADAPTER, BASE
from mmaccel.families.smollm2 import SHA256
from training.build import MEAN, STD, clip_tower
from training.smol.language import language_config
from training.smol.rows import IMAGE
from training.smol.tower import GRID, PATCH, PIXELS

NAMES = {
    "reader.tower.": "model.vision_tower.",
    "connector.": "model.multi_modal_projector.",
    "model.model.": "model.language_model.",
}
"""Prefixes of weights: in training, and in the adapted model."""


def read_exported(trainee: nn.Module, folder: Path) -> int:
    """Give a trainee the weights of an adapted model; heads that only training has stay. Returns a number made from them."""
    told = (folder / ADAPTER).read_bytes()
    weights, own = load(told), trainee.state_dict()
    found = {}
    for name in own:
        for old, new in NAMES.items():
            exported = new + name.removeprefix(old).removeprefix("vision_model.")
            if name.startswith(old) and exported in weights:
                found[name] = weights.pop(exported)
    if weights:
        raise ValueError(f"{folder}: {sorted(weights)[0]!r} belongs to no part of the model that is trained.")
    trainee.load_state_dict(own | found)
    return int(sha256(told).hexdigest()[:6], 16)


def export(work: Path, folder: Path, text: LlamaConfig | None = None) -> int:
    """Write configuration, weights and picture processor of the stage ``all``; return the size of the weights in bytes."""
    trained = torch.load(work / "all.pt", weights_only=True)["parts"]["trainee"]
    weights = {
        new + name.removeprefix(old).removeprefix("vision_model."): weight.half().contiguous()
        for name, weight in trained.items()
        for old, new in NAMES.items()
        if name.startswith(old)
    }
    folder.mkdir(parents=True, exist_ok=True)
    config = LlavaConfig(
        vision_config=clip_tower(PIXELS, PATCH),
        text_config=text or language_config(),
        image_token_index=IMAGE,
        image_seq_length=GRID * GRID,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
    )
    described = json.loads(config.to_json_string()) | {BASE: SHA256, "architectures": ["LlavaForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    save_file(weights, folder / ADAPTER, {"format": "pt"})
    size = {"height": PIXELS, "width": PIXELS}
    CLIPImageProcessor(
        size=size, crop_size=size, do_center_crop=False, image_mean=list(MEAN), image_std=list(STD), resample=3
    ).save_pretrained(folder)
    return (folder / ADAPTER).stat().st_size


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the training run")
    parser.add_argument("--to", type=Path, required=True, help="folder to write")
    options = parser.parse_args()
    print(f"{options.to}: {export(options.work, options.to) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
