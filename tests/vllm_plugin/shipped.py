"""The shipped models in vLLM and in transformers, asked the same questions of the generated suite."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import LLM, SamplingParams

import mmaccel
from mmaccel import accelerated
from mmaccel.families.load import load
from mmaccel.media.files import Clip, Prompt, encode
from mmaccel.programs.evaluate import ask_suite

MODELS = Path(mmaccel.__file__).parent / "models"
TOKENS = 12


def prompts(*tasks: str, count: int = 4) -> list[Prompt]:
    return [question.load() for question in ask_suite(tasks, count, frames=8)]


@functools.cache
def _loaded(name: str) -> Any:
    return load(MODELS / name, device="cpu")


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
    text = processor.apply_chat_template(list(prompt.chat().messages), tokenize=False, add_generation_prompt=True)
    return {
        "prompt": text,
        "multi_modal_data": media,
        **({"mm_processor_kwargs": processing} if processing else {}),
    }


def served(llm: LLM, requests: list[dict[str, Any]]) -> list[str]:
    """vLLM's answers, asked at once."""
    out = llm.generate(requests, SamplingParams(temperature=0.0, max_tokens=TOKENS), use_tqdm=False)
    return [one.outputs[0].text.strip() for one in out]


def length(llm: LLM, asked: dict[str, Any]) -> int:
    """Tokens of a prompt as vLLM runs it; exactly ``TOKENS`` are answered."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    (out,) = llm.generate([asked], params, use_tqdm=False)
    return len(out.prompt_token_ids)


def logprobs(llm: LLM, requests: list[dict[str, Any]]) -> list[Any]:
    """Tokens of every answer with the exact figures of their probabilities, asked one by one."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, logprobs=3)
    found = []
    for asked in requests:
        (out,) = llm.generate([asked], params, use_tqdm=False)
        found.append([{token: one.logprob for token, one in step.items()} for step in out.outputs[0].logprobs])
    return found


def model_of(llm: LLM) -> Any:
    """The model inside an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()


def watch(llm: LLM, into: list[torch.Tensor]) -> None:
    """Note the positions of every step that the language model runs."""
    model = model_of(llm)
    forward = model.forward

    def noted(input_ids: Any, positions: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        into.append(positions.clone())
        return forward(input_ids, positions, *args, **kwargs)

    model.forward = noted


def encoded(llm: LLM) -> list[int]:
    """The tokens that stay of every picture that is encoded from now on."""
    model, found = model_of(llm), []
    embed = model.embed_multimodal

    def noted(**kwargs: Any) -> Any:
        rows = embed(**kwargs)
        found.extend(map(len, rows))
        return rows

    model.embed_multimodal = noted
    return found


def slow(prompt: Prompt, seconds: float) -> Prompt:
    """The same question about a clip that is repeated eight times and takes so long."""
    clip = prompt.clip
    assert clip is not None
    frames = np.concatenate([clip.frames] * 8)
    return replace(prompt, clip=Clip(frames, list(range(len(frames))), len(frames), len(frames) / seconds))
