"""Write a trained mini model as a Hugging Face folder in half precision.

``python -m training.export mini-llava --work DIR --to mmaccel/models/mini-llava``
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from training.build import BUILDERS


def load_trained(name: str, work: Path) -> PreTrainedModel:
    """The model of a run's checkpoint, in float32."""
    weights = torch.load(work / "checkpoint.pt", weights_only=True)["trainee"]
    model = BUILDERS[name][0]()
    model.load_state_dict({key[6:]: value for key, value in weights.items() if key.startswith("model.")})
    return model.eval()


def export(name: str, work: Path, folder: Path) -> int:
    """Write config, float16 weights, generation settings, tokenizer and processor; return the size in bytes."""
    load_trained(name, work).half().save_pretrained(folder)
    BUILDERS[name][1]().save_pretrained(folder)
    return sum(path.stat().st_size for path in folder.iterdir())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(BUILDERS))
    parser.add_argument("--work", type=Path, required=True, help="folder of the training run")
    parser.add_argument("--to", type=Path, required=True, help="folder to write")
    options = parser.parse_args()
    logging.disable_progress_bar()
    print(f"{options.to}: {export(options.model, options.work, options.to) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
