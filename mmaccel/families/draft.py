"""Draft models: smaller models of the same family that read a prompt first."""

from __future__ import annotations

from pathlib import Path

from ..errors import UnsupportedError
from ..method.model_options import Loaded, load_once
from .base import Family
from .load import load
from .registry import family_of

#: where a draft lies beside the weights of a model
FOLDER = "draft"


def load_draft(method: str, draft: str | Loaded, family: Family) -> Family:
    """The adapter of the draft model of ``family``. ``draft`` is a folder or hub id, by default the folder ``draft``
    beside the model's weights, loaded on the model's device; or a loaded model, used as it is. ``method`` is named in errors.
    Refuses a draft that is accelerated itself, or cannot read the same prompts."""
    if isinstance(draft, Loaded):
        model = draft.model.get_base_model() if hasattr(draft.model, "get_base_model") else draft.model
        if model is family.model:
            raise UnsupportedError(f"The draft {draft!r} is the model that it would draft for; give a smaller one.")
    else:
        draft = draft or _draft_folder(method, family)
        # weights that wait elsewhere for their turn are on no device
        weight = next(x for x in family.text.parameters() if x.device.type != "meta")
        device, dtype = str(weight.device), str(weight.dtype).removeprefix("torch.")
        model = load_once("draft", draft, (device, dtype), lambda: load(draft, device=device, dtype=dtype)[0])
    drafting = family_of(model)
    check_free(drafting)
    if type(drafting) is not type(family):
        raise UnsupportedError(
            f"The draft {draft!r} is of family {drafting.name}, and this model of {family.name}; name another."
        )
    for what, mine, its in (
        ("words", family.text.config.vocab_size, drafting.text.config.vocab_size),
        *((f"{one} placeholder", family.token_id(one), drafting.token_id(one)) for one in family.modalities),
    ):
        if mine != its:
            raise UnsupportedError(
                f"The draft {draft!r} has other prompts than this model: {what} {its}, not {mine}; name one of the same "
                "series."
            )
    return drafting


def check_free(draft: Family) -> None:
    """Raise when a draft is accelerated itself, or being trained."""
    if getattr(draft.model, "mmaccel", None) is not None:
        raise UnsupportedError("The draft is an accelerated model itself; call draft.mmaccel.remove() first.")
    if draft.model.training:
        raise UnsupportedError("The draft is in training mode; call draft.eval() first.")


def _draft_folder(method: str, family: Family) -> str:
    folder = Path(str(family.config._name_or_path)) / FOLDER
    if not folder.is_dir():
        raise UnsupportedError(
            f"{method} needs a smaller model of the same family, and none lies beside this model's weights; name one, such as "
            "draft='Qwen/Qwen2.5-VL-3B-Instruct' for Qwen2.5-VL-7B."
        )
    return str(folder)
