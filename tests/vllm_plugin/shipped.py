"""The shipped models in vLLM and in transformers, asked the same questions of the generated suite."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

import mmaccel
from mmaccel import accelerated
from mmaccel.families.load import load_model
from mmaccel.media.files import Prompt, encode
from mmaccel.programs.evaluate import ask_suite

MODELS = Path(mmaccel.__file__).parent / "models"
TOKENS = 12


def prompts(*tasks: str, count: int = 4) -> list[Prompt]:
    return [question.load() for question in ask_suite(tasks, count, frames=8)]


@functools.cache
def _loaded(name: str) -> Any:
    return load_model(MODELS / name, device="cpu")


def expected(name: str, asked: list[Prompt], recipe: str = "none", **options: Any) -> list[str]:
    """The answers of transformers, one prompt at a time."""
    model, processor = _loaded(name)
    answers = []
    for prompt in asked:
        inputs = encode(processor, [prompt])
        with torch.inference_mode(), accelerated(model, recipe, processor=processor, **options):
            out = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
        answers.append(processor.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    return answers


def request(name: str, prompt: Prompt, **processing: Any) -> dict[str, Any]:
    """A request of vLLM; ``processing`` becomes its ``mm_processor_kwargs``."""
    processor = _loaded(name)[1]
    media: dict[str, Any] = {}
    if prompt.pictures:
        media["image"] = list(prompt.pictures)
    if prompt.clip is not None:
        metadata = {**prompt.clip.metadata(), "do_sample_frames": False}
        media["video"] = [(prompt.clip.frames, metadata)]
    text = processor.apply_chat_template(prompt.messages(), tokenize=False, add_generation_prompt=True)
    return {
        "prompt": text,
        "multi_modal_data": media,
        **({"mm_processor_kwargs": processing} if processing else {}),
    }


def served(llm: LLM, requests: list[dict[str, Any]]) -> list[str]:
    """vLLM's answers, asked at once."""
    out = llm.generate(requests, SamplingParams(temperature=0.0, max_tokens=TOKENS), use_tqdm=False)
    return [one.outputs[0].text.strip() for one in out]
