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
from torch import nn

SAVE_EVERY = 120.0
"""Seconds between checkpoints."""


class Run:
    """One stage of the training in a folder; a run that was ended goes on where its checkpoint was written.

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

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        parts = {
            key: {name: weight.detach() for name, weight in part.named_parameters() if weight.requires_grad}
            for key, part in self.parts.items()
        }
        waiting = self.path.with_suffix(".new")
        torch.save({"state": self.state, "optimiser": self.optimiser.state_dict(), "parts": parts}, waiting)
        os.replace(waiting, self.path)

    def train(self, step: Callable[[], tuple[dict[str, float], int]]) -> None:
        """Train until the minutes are over or SIGTERM: ``step()`` adds gradients, and gives figures and how many pictures it
        has shown."""
        stop: list[int] = []
        previous = signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
        state, saved, before = self.state, time.monotonic(), time.monotonic()
        while state["seconds"] < 60 * self.minutes and not stop:
            rest = 1 - state["seconds"] / (60 * self.minutes)
            for group in self.optimiser.param_groups:
                group["lr"] = group["peak"] * min(1.0, (state["step"] + 1) / 50) * max(0.02, min(1.0, 1.8 * rest))
            scores, count = step()
            for group in self.optimiser.param_groups:
                nn.utils.clip_grad_norm_(group["params"], 1.0)
            self.optimiser.step()
            self.optimiser.zero_grad()
            state["step"] += 1
            state["seen"] += count
            average = state["average"]
            for key, value in scores.items():
                if value == value:
                    average[key] = value if key not in average else 0.95 * average[key] + 0.05 * value
            now = time.monotonic()
            state["seconds"] += min(now - before, 60.0)  # a paused process loses none of its minutes
            before = now
            if state["step"] % 10 == 0:
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
