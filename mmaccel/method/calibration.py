"""Calibration: what ``mmaccel calibrate`` has found out about the heads of one model, and the base of policies that use it."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..core.files import write_whole
from ..errors import MmaccelError, UnsupportedError
from .base import ModelFacts
from .keys import Policy
from .selector import ModelFingerprint
from .selector_schema import Stamp, read_model, stamp

#: the name of the file; beside a model's weights it is found without being named
NAME = "calibration.safetensors"
#: figures by name, with the number of axes of one layer: ``[Hkv]`` or ``[Hkv, D]``
FIGURES: Mapping[str, int] = {"echo": 1, "induction": 1, "gates": 1, "filters": 2}
#: bytes of a file that are read at most
_MOST = 1 << 28


@dataclass(frozen=True)
class Calibration:
    """Figures of the heads of one model.

    model : the fingerprint of the model.
    figures : by name and by layer of the cache, float32 on the CPU. ``echo``, ``induction`` and ``gates`` are ``[Hkv]``,
        ``filters`` are ``[Hkv, D]``; see :mod:`mmaccel.programs.calibrate`.
    record : how it was made, for readers.
    """

    model: ModelFingerprint
    figures: Mapping[str, Mapping[int, Tensor]]
    record: Mapping[str, Any]

    def save(self, path: str | Path) -> None:
        """Write it as one safetensors file. Raises OSError if that cannot be written."""
        from safetensors.torch import save

        tensors = {f"{name}.{layer}": x.contiguous() for name, of in self.figures.items() for layer, x in of.items()}
        about = {"model": json.dumps(asdict(self.model)), "record": json.dumps(dict(self.record))}
        write_whole(Path(path), save(tensors, about))

    @staticmethod
    def load(path: str | Path) -> Calibration:
        """The calibration in a file, cached by its version.

        Raises :class:`MmaccelError` if there is none, or it cannot be used.
        """
        return _loaded(Path(path), stamp(Path(path), _refusal))

    def of(self, name: str, path: str) -> Mapping[int, Tensor]:
        """The figures ``name`` by layer. Raises :class:`MmaccelError` if the file at ``path`` has none."""
        if name not in self.figures:
            raise _refusal(Path(path), f"it has no figures {name!r}")
        return self.figures[name]


def _refusal(path: Path, why: str) -> MmaccelError:
    return MmaccelError(
        f"The calibration {str(path)!r} cannot be used: {why}; give another file, or make one with mmaccel calibrate."
    )


@functools.lru_cache(maxsize=16)
def _loaded(path: Path, changed: Stamp) -> Calibration:
    from safetensors import SafetensorError, safe_open

    if changed[1] > _MOST:
        raise _refusal(path, f"it is larger than {_MOST >> 20} MiB")
    figures: dict[str, dict[int, Tensor]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            about = {name: json.loads(text) for name, text in (file.metadata() or {}).items()}
            for key in file.keys():
                found = re.fullmatch(r"([a-z]+)\.(\d{1,4})", key)
                if found is None or found[1] not in FIGURES:
                    raise _refusal(path, f"tensor {key!r:.40} is not expected")
                x = file.get_tensor(key)
                if x.dtype != torch.float32 or x.dim() != FIGURES[found[1]] or not x.numel() or not x.isfinite().all():
                    raise _refusal(path, f"tensor {key!r} must hold finite float32 numbers on {FIGURES[found[1]]} axes")
                figures.setdefault(found[1], {})[int(found[2])] = x
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        if isinstance(error, MmaccelError):
            raise
        raise _refusal(path, "it is not a safetensors file, or a damaged one") from error
    if not figures or not isinstance(about.get("record"), dict):
        raise _refusal(path, "it is not a calibration")
    model = read_model(path, about.get("model"), _refusal)
    return Calibration(ModelFingerprint(**model), figures, about["record"])


class CalibratedPolicy(Policy):
    """A cache policy that uses the file of ``mmaccel calibrate``.

    ``calibration`` is the file; by default ``calibration.safetensors`` beside the model's weights. A file of another model is
    refused.
    """

    #: the figures that it needs
    uses: ClassVar[tuple[str, ...]] = ()
    #: whether it works without a file
    optional: ClassVar[bool] = False

    calibration: str

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "calibration", str(self.calibration))

    def fit(self, family: ModelFacts) -> Self:
        """This policy with the file that lies beside the model's weights, where none is given and it needs one."""
        if self.calibration or self.optional:
            return self
        name = getattr(getattr(getattr(family, "model", None), "config", None), "_name_or_path", "")
        beside = Path(str(name)) / NAME
        return replace(self, calibration=str(beside)) if name and beside.is_file() else self  # type: ignore[call-arg]

    def check(self, family: ModelFacts) -> None:
        """Raise :class:`UnsupportedError` without a file, or for one of another model."""
        super().check(family)
        if getattr(family, "model", None) is None or (self.optional and not self.calibration):
            # a family as such: each of its models may have a file
            return
        if not self.calibration:
            raise UnsupportedError(
                f"{self.name} needs figures of this model's heads; make them with `mmaccel calibrate --model MODEL -o {NAME}` "
                f"and give calibration={NAME!r}, or leave the file beside the model's weights."
            )
        found = Calibration.load(self.calibration)
        found.model.check(
            family, f"The calibration {self.calibration!r} was made for", "make one for it with mmaccel calibrate"
        )
        for name in self.uses:
            found.of(name, self.calibration)

    def figures(self, name: str) -> Mapping[int, Tensor]:
        """The figures ``name`` by layer of the cache."""
        return Calibration.load(self.calibration).of(name, self.calibration)

    def on_device(self, name: str, device: torch.device) -> Mapping[int, Tensor]:
        """The same on ``device``, where they are kept."""
        path = Path(self.calibration)
        return _moved(path, stamp(path, _refusal), name, device)


@functools.lru_cache(maxsize=32)
def _moved(path: Path, changed: Stamp, name: str, device: torch.device) -> Mapping[int, Tensor]:
    return {layer: x.to(device) for layer, x in _loaded(path, changed).of(name, str(path)).items()}


class HeadPolicy(CalibratedPolicy):
    """A policy that tells retrieval heads, which keep all keys, from others, which keep sinks and the newest."""

    budget = "none"
    default_retain = None
    by_layer = True
    prompt_only = True
    mixes_heads = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer_budget != "uniform" or self.head_budget != "uniform" or self.compact != "evict":
            raise MmaccelError(f"{self.name} decides for whole heads; leave out layer_budget, head_budget and compact.")

    def full_heads(self) -> Mapping[int, Tensor]:
        """Heads that keep all keys, ``[Hkv]`` bool on the CPU by layer of the cache."""
        raise NotImplementedError

    def kept_by(self, layer: int, device: torch.device) -> Tensor:
        """``[Hkv]`` float32, what every key of a head is worth: 0 for heads that keep all, ``-inf`` for the others."""
        version = stamp(Path(self.calibration), _refusal) if self.calibration else (0, 0, 0)
        return _worth(self, version, device)[layer]


@functools.lru_cache(maxsize=32)
def _worth(policy: HeadPolicy, version: Stamp, device: torch.device) -> dict[int, Tensor]:
    heads = policy.full_heads()
    return {n: torch.zeros(full.shape).masked_fill(~full, -torch.inf).to(device) for n, full in heads.items()}
