"""Pictures and clips that are encoded once for many calls with the same pixels, whatever recipes these calls have."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...core.layout import Modality
from ...families import Family
from ..call.call import current


@dataclass
class Remembered:
    """Outputs of the vision towers for the pixels of one batch: features by modality, and every tap that was asked for.

    A recipe that asks for a new tap makes the towers run once more, and so do other pixels (compared by content), whose
    features replace the stored ones. Recipes that work inside the towers run as if nothing were stored; do not use :meth:`on`
    with recipes that work on pixels.

    given : arguments of the towers, by modality. passes : how often they ran to fill it.
    """

    features: dict[Modality, Any] = field(default_factory=dict)
    taps: dict[Modality, dict[tuple[str, int], list[Tensor]]] = field(default_factory=dict)
    given: dict[Modality, Any] = field(default_factory=dict)
    passes: int = 0

    @contextmanager
    def on(self, family: Family) -> Iterator[None]:
        """Inside, a model of this family takes features from here; enter it before the model is accelerated."""
        inner = family.inner
        named = {f"get_{modality}_features": modality for modality in family.modalities}
        if not all(hasattr(inner, name) for name in named):
            # one function for pictures and clips: its answers are not told apart
            named = {}
        own = {name: vars(inner)[name] for name in named if name in vars(inner)}
        for name, modality in named.items():
            setattr(inner, name, self.answering(modality, getattr(inner, name)))
        try:
            yield
        finally:
            for name in named:
                delattr(inner, name)
            vars(inner).update(own)

    def answering(self, modality: Modality, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``original``, which encodes pictures or clips: it runs when its pixels or taps are not stored yet."""

        @functools.wraps(original)
        def features(*args: Any, **kwargs: Any) -> Any:
            call, encoded, wanted = current(), None, set[tuple[str, int]]()
            if call is not None:
                if call.plan.in_towers:
                    return original(*args, **kwargs)
                if (encoded := call.vision.running) is not None:
                    wanted = {(kind, layer) for layer, kinds in call.vision.taps.layers.items() for kind in kinds}
            if not _equal(self.given.get(modality), (args, kwargs)):
                self.features.pop(modality, None)
                self.taps[modality] = {}
            known = self.taps[modality]
            if modality in self.features and wanted <= known.keys():
                if encoded is not None:
                    encoded.taps.update({tap: known[tap] for tap in wanted})
            else:
                self.features[modality] = original(*args, **kwargs)
                self.given[modality] = args, kwargs
                self.passes += 1
                if encoded is not None:
                    known.update(encoded.taps)
            return self.features[modality]

        return features


def _equal(one: Any, other: Any) -> bool:
    """Whether two arguments of a tower have the same content."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same_shape = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        return one is other or (same_shape and torch.equal(one, other))
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    return type(one) is type(other) and bool(one == other)
