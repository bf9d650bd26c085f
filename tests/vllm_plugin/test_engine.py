"""What vLLM's engine does beside answering greedily, with a recipe: as on transformers, or as vLLM does without one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM, see benchmarks/serving/environment.sh")

import shipped
import tiny
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.vllm

QWEN = "mini-qwen-vl"
DIVPRUNE = {"recipe": "divprune", "retain": 0.25, "numbering": "transformers"}


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": shipped.TOKENS, **options})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options = {"limit_mm_per_prompt": {"image": 4}, "max_num_batched_tokens": 48}
    with tiny.engine(shipped.MODELS / QWEN, DIVPRUNE, **options) as made:
        yield made


def asked(*tasks: str, count: int = 3) -> tuple[list[shipped.Prompt], list[dict[str, Any]]]:
    prompts = shipped.prompts(*tasks, count=count)
    return prompts, [shipped.request(QWEN, one) for one in prompts]


def test_a_choice_is_among_those_given_and_the_likeliest_of_them(llm: LLM) -> None:
    prompts, requests = asked("existence")
    free = shipped.expected(QWEN, prompts, "divprune", retain=0.25)
    choices = sorted({*free, "yes", "no"})
    guided = params(structured_outputs=StructuredOutputsParams(choice=choices))
    out = llm.generate(requests, guided, use_tqdm=False)
    # what it would have said unguided is among them
    assert [one.outputs[0].text.strip() for one in out] == free


def test_guided_json_is_json(llm: LLM) -> None:
    # the words of the model have digits, but no braces
    _, requests = asked("colour")
    guided = params(structured_outputs=StructuredOutputsParams(json={"enum": [4, 7]}))
    for one in llm.generate(requests, guided, use_tqdm=False):
        assert json.loads(one.outputs[0].text) in (4, 7)


def test_several_answers_to_one_prompt(llm: LLM) -> None:
    """Each is the greedy one, as nothing else may be sampled; vLLM gives but one at temperature zero."""
    prompts, requests = asked("existence", "motion")
    want = shipped.expected(QWEN, prompts, "divprune", retain=0.25)
    sampled = params(n=3, temperature=1.0, top_k=1)
    for one, answer in zip(llm.generate(requests, sampled, use_tqdm=False), want, strict=True):
        assert [each.text.strip() for each in one.outputs] == [answer] * 3


def test_probabilities_of_a_prompt_do_not_depend_on_how_it_comes(llm: LLM) -> None:
    """One figure a token of the reduced prompt, the same alone and among others."""
    _, requests = asked("existence", "comparison")
    wanted = params(prompt_logprobs=1, max_tokens=1)
    together = llm.generate(requests, wanted, use_tqdm=False)
    for one, request in zip(together, requests, strict=True):
        (alone,) = llm.generate([request], wanted, use_tqdm=False)
        tokens, first, second = one.prompt_token_ids, one.prompt_logprobs, alone.prompt_logprobs
        assert len(first) == len(second) == len(tokens) and first[0] is None
        for token, a, b in zip(tokens[1:], first[1:], second[1:], strict=True):
            assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-3) and a[token].logprob <= 0


def test_several_pictures_in_a_prompt(llm: LLM) -> None:
    pictures = [one.pictures[0] for one in shipped.prompts("existence", "colour", count=2)]
    prompts = [shipped.Prompt("is there a red square ?", tuple(pictures[:count])) for count in (2, 3, 4)]
    want = shipped.expected(QWEN, prompts, "divprune", retain=0.25)
    assert shipped.served(llm, [shipped.request(QWEN, one) for one in prompts]) == want


def test_requests_that_are_preempted_answer_as_alone() -> None:
    """A cache for some of the answers only: requests give up their blocks and are computed anew, pictures and all."""
    _, requests = asked("existence", "comparison", "motion", count=4)
    longer = params(max_tokens=48, ignore_eos=True)
    with tiny.engine(shipped.MODELS / QWEN, DIVPRUNE) as roomy:
        want = [roomy.generate([one], longer, use_tqdm=False)[0].outputs[0].token_ids for one in requests]
    narrow = {"num_gpu_blocks_override": 9, "block_size": 32, "enable_prefix_caching": False, "max_model_len": 256}
    preempted: list[str] = []
    with tiny.engine(shipped.MODELS / QWEN, DIVPRUNE, **narrow) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        original = scheduler._preempt_request

        def noted(request: Any, *args: Any, **kwargs: Any) -> None:
            preempted.append(request.request_id)
            original(request, *args, **kwargs)

        scheduler._preempt_request = noted
        got = [one.outputs[0].token_ids for one in llm.generate(requests, longer, use_tqdm=False)]
    assert preempted and got == want
