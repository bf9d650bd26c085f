"""Train ``mini-smol``: ``python -m training.smol STAGE --work DIR --minutes 20``, for the stages in this order:

1. ``tower``: the tower of ``mini-llava-deep`` at 200 pixels learns to read pages; dense labels, no language model;
2. ``connector``: every cell gives the sum of the language model's own word embeddings of what it shows;
3. ``all``: tower, connector and low-rank changes of the language model, on packed questions; with every step a plain text, on
   which the model must say what the bare one says.

A stage writes a checkpoint every two minutes and when it is asked to end (SIGTERM), and a line of ``DIR/log.jsonl`` every ten
steps. Started again, it goes on; ``--minutes`` is the length of the whole stage. On a CPU two processes of one thread are
faster than one of two: ``torchrun --nproc-per-node 2 -m training.smol ...``; each shows ``--batch`` pictures of its own a step.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import distributed
from transformers import AutoTokenizer

from mmaccel.families.smollm2 import folder
from training.smol.language import build_language
from training.smol.stages import Means, train_all, train_connector, train_tower


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["tower", "connector", "all"])
    parser.add_argument(
        "--work", type=Path, required=True, help="folder of checkpoints and log; an existing one is resumed"
    )
    parser.add_argument("--minutes", type=float, required=True, help="length of the stage, earlier runs included")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=0, help="processes that draw pictures; for a GPU, all cores")
    parser.add_argument("--batch", type=int, help="pictures a step of a process  [default: 16, and 4 in the stage all]")
    parser.add_argument(
        "--together",
        type=int,
        default=1,
        help="rows at once in the stage all; on a GPU as many as --batch, which is fastest",
    )
    parser.add_argument("--start", type=Path, help="an exported model, whose weights the stage all begins with")
    options = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        distributed.init_process_group("gloo")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    options.work.mkdir(parents=True, exist_ok=True)
    means = Means(options.device, options.workers)
    size: dict[str, Any] = {"batch": options.batch} if options.batch else {}
    if options.stage == "tower":
        train_tower(options.work, options.minutes, means, **size)
        return
    base = folder()
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = build_language(load_file(base / "model.safetensors"))
    if options.stage == "connector":
        train_connector(options.work, options.minutes, model, tokenizer, means, **size)
    else:
        size |= {"together": options.together, "start": options.start}
        train_all(options.work, options.minutes, model, tokenizer, means, **size)


if __name__ == "__main__":
    main()
