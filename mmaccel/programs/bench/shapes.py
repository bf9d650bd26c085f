"""Published architectures with random weights: real speed and memory, no real answers. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForImageTextToText, GenerationConfig

from ...errors import MmaccelError
from ..configs import make_config, read_tables

#: ids of the placeholders and of ordinary words in every shape; embeddings are random, so which ids does not matter
IMAGE, VIDEO, START, END, WORDS = 3, 4, 5, 6, 16

#: memory that a run needs with the weights, as a share of them: at least, and with a long prompt
_HEADROOM, _ROOM = 1.15, 1.5


@dataclass(frozen=True)
class Shape:
    """One architecture, a table of ``shapes.toml``.

    values : of its configuration.
    context : tokens that the model was trained for.
    source : the model on the hub whose configuration it is; None for the two that are ours.
    parameters : billions of weights of that model.
    tile : pixels along one side of a picture, frame or tile as its tower sees it; None for towers of any size.
    cell, frame : pixels along one side of one token and of a frame, for towers of any size.
    scale : pictures of the workloads have this share of the sides of the real ones.
    """

    values: Mapping[str, Any]
    context: int
    source: str | None = None
    parameters: float | None = None
    tile: int | None = None
    cell: int = 0
    frame: int = 0
    scale: float = 1.0

    def config(self) -> Any:
        """Its configuration."""
        # configurations keep the tables that they are given, and some callers change theirs
        return make_config(deepcopy(dict(self.values)))


SHAPES: dict[str, Shape] = {
    name: Shape(table.pop("config"), **table)
    for name, table in read_tables(Path(__file__).with_name("shapes.toml")).items()
}


def shape(name: str) -> Shape:
    """A shape by name. Raises MmaccelError if there is none; the message lists those that are."""
    if name not in SHAPES:
        raise MmaccelError(f"There is no shape {name!r}; known are {', '.join(SHAPES)}.")
    return SHAPES[name]


def thin_tower(config: Any) -> Any:
    """``config`` with a vision tower of a few layers and hardly any width, changed in place. Pictures make the tokens that they
    made; what the language model does, and what it costs, is as it was."""
    vision = config.vision_config
    if hasattr(vision, "depth"):
        values: dict[str, Any] = {"depth": 4, "hidden_size": 32, "intermediate_size": 32, "num_heads": 1}
        if hasattr(vision, "embed_dim"):
            # that of Qwen2-VL names its own width so, and the language model's as others do their own
            values |= {"embed_dim": 32, "hidden_size": config.text_config.hidden_size}
        deep = hasattr(vision, "deepstack_visual_indexes")
        values |= {"deepstack_visual_indexes": [0, 1, 2]} if deep else {"fullatt_block_indexes": [3]}
    else:
        values = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 1}
        # that of Pixtral is written into its configuration
        values |= {"head_dim": 32}
    return change_config(config, vision, values)


def change_config(config: Any, part: Any, values: dict[str, Any]) -> Any:
    """Set the values of a part of a configuration that it has; returns the configuration."""
    for name, value in values.items():
        if hasattr(part, name):
            setattr(part, name, value)
    return config


def skeleton(name: str, dtype: torch.dtype = torch.float32, config: Any = None) -> Any:
    """The model of a shape without memory for its weights (on the device ``meta``); ``config`` may stand in for its own."""
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config or shape(name).config(), dtype=dtype).eval()


def count_parameters(model: nn.Module) -> int:
    """Weights of a model; those that are tied count once."""
    return sum(weight.numel() for weight in {id(p): p for p in model.parameters()}.values())


def build(name: str, device: torch.device, dtype: torch.dtype, config: Any = None) -> Any:
    """The model of a shape on a device, with random weights; ``config`` may stand in for its own, see :func:`thin`.

    It is planned without memory, then laid out empty on the device in its final type and initialised there as transformers
    would, so that 7B never pass through the memory of the host.

    Raises MmaccelError if the weights and what a run needs beside them do not fit.
    """
    model = skeleton(name, dtype, config)
    needed = count_parameters(model) * dtype.itemsize * _HEADROOM
    if (free := free_memory(device)) is not None and needed > free:
        raise MmaccelError(
            f"Shape {name!r} needs about {needed / 2**30:.0f} GiB in {str(dtype).removeprefix('torch.')}, but {device} has "
            f"{free / 2**30:.0f} GiB free; take a smaller shape such as 'tiny' or 'small', or a larger device."
        )
    model.to_empty(device=device)
    torch.manual_seed(0)
    # also computes the buffers that no checkpoint holds, such as frequencies of rotary embeddings, and ties what is tied
    model.init_weights()
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
    return model


def largest(device: torch.device, dtype: torch.dtype) -> str | None:
    """The shape of the largest model that fits on a device with room for a long prompt, or None."""
    free = free_memory(device) or 0
    room = {name: one.parameters * 1e9 * dtype.itemsize * _ROOM for name, one in SHAPES.items() if one.parameters}
    return max((name for name, bytes_ in room.items() if bytes_ < free), key=room.__getitem__, default=None)


def free_memory(device: torch.device) -> int | None:
    """Bytes that a device has free, if that can be known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)
