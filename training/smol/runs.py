"""What the stages share: an optimiser, a learning rate that falls with the time, a log, and checkpoints."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

SAVE_EVERY = 120.0
"""Seconds between checkpoints."""


def place() -> tuple[int, int]:
    """This process among those that train together, and how many there are: ``(0, 1)`` unless ``torchrun`` started it."""
    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)


def average_gradients(weights: list[Tensor]) -> None:
    """Give every process the mean of the gradients of all; one that has none counts as 0."""
    grads = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
    flat = torch.cat([grad.flatten() for grad in grads])
    distributed.all_reduce(flat)
    flat /= distributed.get_world_size()
    for weight, grad in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
        weight.grad = grad.view_as(weight)


class Run:
    """One stage of the training in a folder; a run that was ended goes on where its checkpoint was written.

    Processes that train together show pictures of their own and average their gradients; the first writes, and keeps the time.

    Parameters
    ----------
    work : folder of ``NAME.pt`` and ``log.jsonl``.
    name : of the stage.
    parts : the modules by name; weights that need no gradient are not stored.
    groups : parameter groups of the optimiser, each with its highest rate ``peak``.
    minutes : length of the stage, the time of earlier runs included; the rate falls over the second half.
    """

    def __init__(
        self, work: Path, name: str, parts: dict[str, nn.Module], groups: list[dict[str, Any]], minutes: float
    ) -> None:
        self.path, self.parts, self.minutes, self.name = work / f"{name}.pt", parts, minutes, name
        self.log = work / "log.jsonl"
        self.optimiser = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
        self.state: dict[str, Any] = {"step": 0, "seen": 0, "seconds": 0.0, "average": {}}
        if self.path.exists():
            stored = torch.load(self.path, map_location="cpu", weights_only=True)
            self.state = stored["state"]
            self.optimiser.load_state_dict(stored["optimiser"])
            for key, part in parts.items():
                part.load_state_dict(stored["parts"][key], strict=False)

    def agreed(self, ended: bool) -> bool:
        """Whether any process was asked to end; all take over the clock of the first."""
        if place()[1] > 1:
            told = torch.tensor([self.state["seconds"] * (place()[0] == 0), float(ended)], dtype=torch.float64)
            distributed.all_reduce(told)
            self.state["seconds"], ended = told[0].item(), bool(told[1])
        return ended

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        if place()[0]:
            return
        parts = {
            key: {name: weight.detach() for name, weight in part.named_parameters() if weight.requires_grad}
            for key, part in self.parts.items()
        }
        waiting = self.path.with_suffix(".new")
        torch.save({"state": self.state, "optimiser": self.optimiser.state_dict(), "parts": parts}, waiting)
        os.replace(waiting, self.path)

    def train(self, step: Callable[[], tuple[dict[str, float], int]]) -> None:
        """Train until the minutes are over or SIGTERM: ``step()`` adds gradients, and gives figures and how many pictures it
        has shown, in this process."""
        stop: list[int] = []
        previous = signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
        state, saved, before = self.state, time.monotonic(), time.monotonic()
        weights = [weight for group in self.optimiser.param_groups for weight in group["params"]]
        first, processes = place()[0] == 0, place()[1]
        while not self.agreed(bool(stop)) and state["seconds"] < 60 * self.minutes:
            rest = 1 - state["seconds"] / (60 * self.minutes)
            for group in self.optimiser.param_groups:
                group["lr"] = group["peak"] * min(1.0, (state["step"] + 1) / 50) * max(0.02, min(1.0, 1.8 * rest))
            scores, count = step()
            if processes > 1:
                average_gradients(weights)
            for group in self.optimiser.param_groups:
                nn.utils.clip_grad_norm_(group["params"], 1.0)
            self.optimiser.step()
            self.optimiser.zero_grad()
            state["step"] += 1
            state["seen"] += count * processes
            average = state["average"]
            for key, value in scores.items():
                if value == value:
                    average[key] = value if key not in average else 0.95 * average[key] + 0.05 * value
            now = time.monotonic()
            state["seconds"] += min(now - before, 60.0)  # a paused process loses none of its minutes
            before = now
            if first and state["step"] % 10 == 0:
                line = {"stage": self.name, **{key: state[key] for key in ("step", "seen", "seconds")}, **average}
                with self.log.open("a") as log:
                    rounded = {
                        key: round(value, 4) if isinstance(value, float) else value for key, value in line.items()
                    }
                    log.write(json.dumps(rounded) + "\n")
            if now - saved > SAVE_EVERY:
                self.save()
                saved = now
        signal.signal(signal.SIGTERM, previous)
        self.save()
