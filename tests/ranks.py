"""A program for ``torch.distributed.run``: the small LLaVA with its heads spread over two processes, beside itself undivided.

    python -m torch.distributed.run --standalone --nproc-per-node 2 tests/ranks.py RESULTS.json METHOD...

Writes of every method or recipe why it was refused, or how far the logits of an answer are from those of the model in one
process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmaccel import MmaccelError, accelerated
from mmaccel.cli.ask import shipped
from mmaccel.programs.evaluate import ask_suite, batches, inputs_of


def logits(model: Any, processor: Any, name: str) -> torch.Tensor:
    """``[T, B, V]`` of an answer, which is the same six tokens whatever the model would say."""
    (batch,) = batches(ask_suite(["count", "reading"], 2), 4)
    inputs, seen = inputs_of(model, processor, batch), []
    with accelerated(model, name, processor=processor), torch.no_grad():
        out = model(**inputs, use_cache=True)
        for token in range(20, 26):
            seen.append(out.logits[:, -1].float())
            fed = torch.full((4, 1), token)
            out = model(input_ids=fed, past_key_values=out.past_key_values)
    return torch.stack([x.full_tensor() if hasattr(x, "full_tensor") else x for x in seen])


def main() -> None:
    torch.set_num_threads(1)
    folder, (path, *names) = shipped(), sys.argv[1:]
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    spread = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, tp_plan="auto").eval()
    processor, found = AutoProcessor.from_pretrained(folder), {}
    for name in ("none", *names):
        try:
            mine = logits(spread, processor, name)
        except MmaccelError as error:
            found[name] = str(error)
            continue
        found[name] = float((mine - logits(whole, processor, name)).abs().max())
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
