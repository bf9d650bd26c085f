"""Draft models: smaller models of the same family that read a prompt first."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from ..core.shipped_models import located
from ..errors import MmaccelError, UnsupportedError, first_line
from ..method.model_options import Loaded, load_once
from .base import Family
from .load import load
from .registry import family_of

#: where a draft lies beside the weights of a model
FOLDER = "draft"
#: rows that embeddings may have more than those of another model with the same tokenizer: they are padded to multiples of 64 to
#: 512 (Qwen2.5-VL has 151,936 of 3B and 152,064 of 7B)
_PADDING = 1024
#: tokenizers of drafts that were loaded and are still in use
_tokenizers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def load_draft(method: str, draft: str | Loaded, family: Family, processor: Any) -> Family:
    """The adapter of the draft model of ``family``. ``draft`` is a folder or hub id, by default the folder ``draft``
    beside the model's weights, loaded on the model's device; or a loaded model, used as it is. ``method`` is named in errors.
    Refuses a draft that is accelerated itself, or cannot read the same prompts: its placeholders are others, or its tokenizer
    has other words than that of ``processor``, where both are known."""
    if isinstance(draft, Loaded):
        model = draft.model.get_base_model() if hasattr(draft.model, "get_base_model") else draft.model
        if model is family.model:
            raise UnsupportedError(f"The draft {draft!r} is the model that it would draft for; give a smaller one.")
    else:
        draft = draft or _draft_folder(method, family)
        device, dtype = _place(family)

        def loaded() -> Any:
            model, its = load(draft, device=device, dtype=dtype)
            _tokenizers[model] = getattr(its, "tokenizer", None)
            return model

        model = load_once("draft", draft, (device, dtype), loaded)
        # also of one that another model has loaded
        _check_words(draft, getattr(processor, "tokenizer", None), _tokenizers.get(model))
    drafting = family_of(model)
    check_free(drafting)
    if type(drafting) is not type(family):
        raise UnsupportedError(
            f"The draft {draft!r} is of family {drafting.name}, and this model of {family.name}; name another."
        )
    mine, its = family.text.config.vocab_size, drafting.text.config.vocab_size
    if abs(mine - its) > _PADDING:
        raise _other_prompts(draft, f"words {its}, not {mine}")
    for one in family.modalities:
        if (mine := family.token_id(one)) != (its := drafting.token_id(one)):
            raise _other_prompts(draft, f"{one} placeholder {its}, not {mine}")
    return drafting


def _check_words(draft: str, ours: Any, theirs: Any) -> None:
    """Raise UnsupportedError if two tokenizers, where both are known, have other words; added ones may differ."""
    if ours is None or theirs is None:
        return
    added = {*ours.get_added_vocab(), *theirs.get_added_vocab()}
    own, other = ours.get_vocab(), theirs.get_vocab()
    differing = sorted(word for word in {*own, *other} - added if own.get(word) != other.get(word))
    if differing:
        word = differing[0]
        raise _other_prompts(draft, f"word {word!r} is token {other.get(word)}, not {own.get(word)}")


def _other_prompts(draft: str | Loaded, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"The draft {draft!r} has other prompts than this model: {why}; name one of the same series."
    )


def load_head(draft: str | Loaded, family: Family) -> Any:
    """The head that drafts for a model of ``family`` from its hidden states and keys, loaded or from a folder or hub id; None
    if ``draft`` is no head. Refuses a head of other models, and those that transformers does not load."""
    about = draft.model.config.to_dict() if isinstance(draft, Loaded) else _config(draft)
    kind = str(about.get("model_type"))
    if kind not in family.heads:
        names = " ".join(map(str, (kind, about.get("speculators_model_type"), *(about.get("architectures") or ()))))
        if (why := next((why for word, why in _HEADS.items() if word in names.lower()), None)) is not None:
            raise UnsupportedError(
                f"The draft {draft!r} is a head, {why}; give a smaller model of this one's series, or lookup=True."
            )
        return None
    head = (
        draft.model
        if isinstance(draft, Loaded)
        else load_once("head", draft, _place(family), lambda: _head(draft, family))
    )
    _check_mode(head)
    for what, mine, its in (
        ("words", family.text.config.vocab_size, head.config.get_text_config().vocab_size),
        ("channels of hidden states", family.text.config.hidden_size, head.config.backbone_hidden_size),
    ):
        if mine != its:
            raise UnsupportedError(
                f"The draft {draft!r} is a head of another model: {what} {its}, not {mine}; name the one of this model."
            )
    return head


#: heads that draft for no model of ours, by a word in their types, and why they do not
_HEADS = {
    "eagle": "and transformers loads no EAGLE heads",
    "dflash": "and DFlash heads draft for none of the models that mmaccel accelerates",
    "_assistant": "and drafts for models of another family",
}


def _config(name: str) -> dict[str, Any]:
    """What the configuration of a folder or a hub id says; empty without one."""
    from ..core.transformers_api import PreTrainedConfig

    try:
        about: dict[str, Any] = PreTrainedConfig.get_config_dict(located(name))[0] if name else {}
    except Exception:
        # who loads from it says what is wrong
        return {}
    return about


def _head(name: str, family: Family) -> Any:
    from transformers import AutoModelForCausalLM

    device, dtype = _place(family)
    try:
        head = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, use_safetensors=True)
    except Exception as error:
        raise MmaccelError(
            f"Cannot load the draft {name!r} ({first_line(error).rstrip('.')}); give a folder with config and safetensors."
        ) from error
    return head.to(device).eval()


def _place(family: Family) -> tuple[str, str]:
    """Device and dtype of a model; weights that wait elsewhere for their turn are on no device."""
    weight = next(x for x in family.text.parameters() if x.device.type != "meta")
    return str(weight.device), str(weight.dtype).removeprefix("torch.")


def check_free(draft: Family) -> None:
    """Raise when a draft is accelerated itself, or being trained."""
    if getattr(draft.model, "mmaccel", None) is not None:
        raise UnsupportedError("The draft is an accelerated model itself; call draft.mmaccel.remove() first.")
    _check_mode(draft.model)


def _check_mode(model: Any) -> None:
    if model.training:
        raise UnsupportedError("The draft is in training mode; call draft.eval() first.")


def _draft_folder(method: str, family: Family) -> str:
    folder = Path(str(family.config._name_or_path)) / FOLDER
    if not folder.is_dir():
        raise UnsupportedError(
            f"{method} needs a smaller model of the same family, and none lies beside this model's weights; name one, such as "
            "draft='Qwen/Qwen2.5-VL-3B-Instruct' for Qwen2.5-VL-7B."
        )
    return str(folder)
