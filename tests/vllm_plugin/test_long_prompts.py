"""Long prompts of every family: what stays stands where it stood, in pictures beyond position 256 and in an hour of video."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM, see benchmarks/serving/environment.sh")

import shipped
import tiny
import torch
import zoo
from torch import Tensor
from vllm import LLM, SamplingParams

pytestmark = pytest.mark.vllm

#: visual tokens of a prompt of pictures, at least (positions of M-RoPE grow by sides of pictures), and frames of an hour
PICTURES, TURNING, FRAMES = 400, 1600, 90
ANSWER = 4
FAMILIES = ["qwen3_vl", "llava_next", "llava_onevision", "internvl", "llava"]


def _requests(family: str) -> list[dict[str, Any]]:
    """A prompt with many pictures, and one with a clip of an hour where the family takes clips."""
    ((pictures, _, question),) = tiny.rows(family, "image", count=1)
    each = tiny.visual(family, (pictures, [], question))
    wanted = TURNING if family.startswith("qwen") else PICTURES
    found = [tiny.prompt(family, (pictures * -(-wanted // each), [], question))]
    if "video" in zoo.kinds(family):
        film = zoo.clip(FRAMES, 64, 48, seed=3)
        asked = tiny.prompt(family, ([], [film], question))
        if family == "qwen3_vl":
            about = {"total_num_frames": FRAMES, "fps": FRAMES / 3600, "duration": 3600.0, "do_sample_frames": False}
            asked["multi_modal_data"]["video"] = [(film, {**about, "frames_indices": list(range(FRAMES))})]
        found.append(asked)
    return found


def _read(llm: LLM, asked: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Positions ``[3, n]`` and embeddings ``[n, D]`` as the language model reads a prompt and its answer."""
    model, places, embeddings = shipped.model_of(llm), [], []
    forward = model.forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        count = kwargs["positions"].shape[-1]
        places.append(kwargs["positions"].expand(3, -1).clone())
        embeddings.append(kwargs["inputs_embeds"][:count].clone())
        return forward(*args, **kwargs)

    model.forward = noted
    llm.generate([asked], SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True), use_tqdm=False)
    model.forward = forward
    return torch.cat(places, 1), torch.cat(embeddings)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_stays_stands_where_it_stood(family: str, models: Path) -> None:
    """Every row that the language model reads is at its position one of the prompt without a recipe."""
    options = {"max_model_len": 4096, "max_num_batched_tokens": 4096, "limit_mm_per_prompt": {"image": 100}}
    seen = []
    for recipe in ({"recipe": "none"}, {"recipe": "divprune", "retain": 0.25}):
        with tiny.engine(tiny.folder(family, models), recipe, **options) as llm:
            seen.append([_read(llm, asked) for asked in _requests(family)])
    for (whole, before), (kept, after) in zip(*seen, strict=True):
        assert whole.max() > 256 and kept.shape[1] < whole.shape[1]
        there = {tuple(place): row for place, row in zip(whole.T.tolist(), before, strict=True)}
        prompt = kept.shape[1] - ANSWER + 1
        for place, row in zip(kept.T.tolist()[:prompt], after, strict=False):
            torch.testing.assert_close(row, there[tuple(place)], rtol=1e-4, atol=1e-4)
        assert torch.equal(whole[:, 1 - ANSWER :], kept[:, 1 - ANSWER :])
