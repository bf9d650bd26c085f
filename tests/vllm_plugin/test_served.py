"""The shipped models in vLLM with a recipe, against transformers and against vLLM alone."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("vllm", reason="needs vLLM, see benchmarks/serving/environment.sh")

import shipped
import tiny
import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.registry import _ModelRegistry

from mmaccel.integrations.vllm import register
from mmaccel.method.selector import blind_selector_folder

pytestmark = pytest.mark.vllm

QWEN, LLAVA = "mini-qwen-vl", "mini-llava"
#: visual tokens of a picture of the suite
WHOLE = 49
DIVPRUNE = {"recipe": "divprune", "retain": 0.25}


def engine(name, recipe=None, **options):
    return tiny.engine(shipped.MODELS / name, recipe, **options)


# ------------------------------------------------------------------------------------------------------------- answers
def test_pictures_are_answered_as_on_transformers():
    """One picture and several, two budgets of one picture at once, and all of it again from the caches."""
    asked = shipped.prompts("existence", "comparison", "turns", count=4)
    want = shipped.expected(QWEN, asked, "divprune", retain=0.25)
    few = shipped.expected(QWEN, asked, "divprune", retain=0.1)
    with engine(QWEN, DIVPRUNE) as llm:
        requests = [shipped.request(QWEN, one) for one in asked]
        smaller = [shipped.request(QWEN, one, retain=0.1) for one in asked]
        mixed = [one for pair in zip(requests, smaller, strict=True) for one in pair]
        for _ in range(2):
            got = shipped.served(llm, mixed)
            assert got[::2] == want and got[1::2] == few
        whole, less = (shipped.length(llm, one) for one in mixed[:2])
    assert 0 < less < whole < 40


def test_clips_are_answered_as_on_transformers():
    asked = shipped.prompts("motion", "needle", count=4)
    # frames that stand later than the text behind them
    asked += [shipped.slow(one, 120.0) for one in asked[::3]]
    want = shipped.expected(QWEN, asked, "divprune", retain=0.25)
    requests = [shipped.request(QWEN, one) for one in asked]
    with engine(QWEN, {**DIVPRUNE, "numbering": "transformers"}, max_num_batched_tokens=32) as llm:
        assert shipped.served(llm, requests) == want


@pytest.mark.parametrize("name", [LLAVA, QWEN])
def test_the_selector_that_reads_no_question_is_found_beside_the_weights(name):
    """By the name of its method, alone and in a list."""
    selector = blind_selector_folder(str(shipped.MODELS / name))
    asked = shipped.prompts("existence", "colour", *(("motion",) if name == QWEN else ()), count=4)
    requests = [shipped.request(name, one) for one in asked]
    for recipe in ("learned", ["pixelprune", "learned"]):
        given = {"recipe": recipe, "retain": 0.1, "numbering": "transformers"}
        want = shipped.expected(name, asked, recipe, retain=0.1, selector=selector)
        with engine(name, given) as llm:
            assert shipped.served(llm, requests) == want
            (stage,) = shipped.model_of(llm).plan.plan.projector
            assert stage.method.selector == selector


def test_a_picture_is_encoded_once_for_every_budget():
    first, second = shipped.prompts("existence", "colour", count=1)
    again = shipped.Prompt(second.question, first.pictures)
    with engine(QWEN, DIVPRUNE) as llm:
        calls = shipped.encoded(llm)
        for prompt, options, wanted in (
            (first, {}, [12]),
            (again, {}, [12]),
            (again, {"retain": 0.1}, [12, 5]),
            (first, {"retain": 0.1}, [12, 5]),
            (first, {}, [12, 5]),
        ):
            shipped.served(llm, [shipped.request(QWEN, prompt, **options)])
            assert calls == wanted


def test_attention_of_the_tower_is_seen():
    asked = shipped.prompts("existence", "colour", "grounding", count=3)
    requests = [shipped.request(LLAVA, one) for one in asked]
    for which, overrides in (("vtc-cls", {}), ("divprune", {"positions": "paper"})):
        want = shipped.expected(LLAVA, asked, which, retain=0.25, **overrides)
        with engine(LLAVA, {"recipe": which, "retain": 0.25, **overrides}) as llm:
            assert shipped.served(llm, requests) == want


@pytest.mark.parametrize(
    "recipe", [{"recipe": "fopru", "retain": 0.3}, {"recipe": "visionzip", "retain": 0.3}], ids=str
)
def test_attention_of_a_windowed_tower_is_seen(recipe):
    asked = shipped.prompts("existence", "relation", count=3)
    given = dict(recipe)
    want = shipped.expected(QWEN, asked, given.pop("recipe"), **given)
    with engine(QWEN, recipe) as llm:
        assert shipped.served(llm, [shipped.request(QWEN, one) for one in asked]) == want


def test_without_a_recipe_vllm_is_left_alone():
    """No override makes vLLM's own classes; recipe none runs ours, with the same answers."""
    asked = shipped.prompts("existence", "motion", count=3)
    requests = [shipped.request(QWEN, one) for one in asked]
    seen = []
    for recipe in (None, {"recipe": "none"}):
        with engine(QWEN, recipe) as llm:
            seen.append(shipped.logprobs(llm, requests))
            kind = type(shipped.model_of(llm))
            assert kind.__module__.startswith("vllm." if recipe is None else "mmaccel.")
    assert seen[0] == seen[1]


def test_transformers_numbering_alone():
    asked = shipped.prompts("motion", "order", count=4)
    with engine(QWEN, {"recipe": "none", "numbering": "transformers"}) as llm:
        got = shipped.served(llm, [shipped.request(QWEN, one) for one in asked])
    assert got == shipped.expected(QWEN, asked)


# ----------------------------------------------------------------------------------------------------------- positions
def test_kept_positions_are_those_of_the_unreduced_prompt():
    """As the model is given them, against vLLM's own of the prompt as it was, for an hour of video."""
    (asked,) = shipped.prompts("motion", count=1)
    clip = shipped.slow(asked, 3600.0)
    before, after = [], []
    with engine(QWEN, {"recipe": "none"}, max_model_len=4096) as llm:
        shipped.watch(llm, before)
        shipped.length(llm, shipped.request(QWEN, clip))
    with engine(QWEN, {"recipe": "uniform", "retain": 0.25}, max_model_len=4096, max_num_batched_tokens=64) as llm:
        shipped.watch(llm, after)
        shipped.length(llm, shipped.request(QWEN, clip))
    whole, kept = (torch.cat(found, 1) for found in (before, after))
    assert int(whole.max()) > 3500 and kept.shape[1] < whole.shape[1]
    there = {tuple(place) for place in whole.T.tolist()}
    assert all(tuple(place) in there for place in kept.T.tolist())
    # text: equal on all axes; the last of the prompt and all that were generated
    assert torch.equal(whole[:, -shipped.TOKENS :], kept[:, -shipped.TOKENS :])


@pytest.mark.parametrize("numbering", ["vllm", "transformers"])
def test_what_follows_a_prompt_that_ends_in_a_picture_stands_where_it_stood(numbering):
    """Its last token, and those that say how large it is, may be among those that go."""
    made = shipped.prompts("existence", "motion", count=1)
    asked = [shipped.request(QWEN, one) for one in (made[0], shipped.slow(made[1], 120.0))]
    for one in asked:
        one["prompt"] = one["prompt"][: one["prompt"].rindex("_pad|>") + len("_pad|>")]
    seen = []
    for recipe in ({"recipe": "none"}, {"recipe": "divprune", "retain": 3}):
        positions: list[torch.Tensor] = []
        with engine(QWEN, {**recipe, "numbering": numbering}, max_model_len=4096, max_num_batched_tokens=64) as llm:
            shipped.watch(llm, positions)
            for one in asked:
                positions.clear()
                shipped.length(llm, one)
                # of the tokens that were answered, the last of which nothing follows
                seen.append(torch.cat(positions, 1)[0, 1 - shipped.TOKENS :].tolist())
    assert seen[:2] == seen[2:]


# ------------------------------------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    "recipe, options, said",
    [
        ({"recipe": "divprun"}, {}, "did you mean 'divprune'"),
        ({"recipe": "fastv"}, {}, "inside the language model"),
        ({"recipe": "cdpruner"}, {}, "reads the question"),
        ({"recipe": "learned", "selector": str(shipped.MODELS / QWEN / "selector")}, {}, "mmaccel distil --blind"),
        (
            {**DIVPRUNE, "proportional": "all"},
            {},
            "proportional='all' gives keys weights, which attention in vLLM does not",
        ),
        ({"recipe": "prunevid-merge"}, {}, "lets the content decide"),
        ({"recipe": "divprune", "retain": 0.0}, {}, "outside"),
        (DIVPRUNE, {"video_pruning_rate": 0.5}, "--video-pruning-rate"),
        (DIVPRUNE, {"enable_mm_embeds": True}, "--enable-mm-embeds"),
        ({"recipe": "fopru"}, {"tensor_parallel_size": 2}, "tensor parallelism"),
        (DIVPRUNE, {"pipeline_parallel_size": 2}, "pipeline parallelism"),
        (DIVPRUNE, {"mm_processor_kwargs": {"retain": 0.1}}, "'retain' in mm_processor_kwargs is for requests"),
        (DIVPRUNE, {"mm_processor_kwargs": {"mmaccel": {"retain": 0.1}}}, "'mmaccel' in mm_processor_kwargs"),
        ("divprune", {}, "needs an object with a recipe"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_at_the_start(recipe, options, said):
    from vllm.engine.arg_utils import EngineArgs

    made = EngineArgs(str(shipped.MODELS / QWEN), dtype="float32", hf_overrides={"mmaccel": recipe}, **options)
    with pytest.raises(ValueError, match=said):
        made.create_engine_config()


def test_what_requests_say_is_done_or_refused_and_others_go_on():
    asked = shipped.prompts("existence", "motion", count=1)
    first = asked[0]
    wrong = [
        {"retain": 0},
        {"retain": 1.5},
        {"retain": "much"},
        {"mmaccel": {"retain": float("nan")}},
        {"mmaccel": {"retain": [0.1]}},
        {"mmaccel": {"recipe": "uniform"}},
        {"mmaccel": {"retian": 0.1}},
        {"mmaccel": "off"},
        {"retain": 0.1, "mmaccel": False},
        {"recipe": "uniform"},
        {"retian": 0.1},
        {"images_kwargs": {"retain": 0.1}},
    ]
    tenth = shipped.expected(QWEN, asked, "divprune", retain=0.1)
    bare, quarter = shipped.expected(QWEN, asked), shipped.expected(QWEN, asked, "divprune", retain=0.25)
    with engine(QWEN, {**DIVPRUNE, "numbering": "transformers"}) as llm:
        for processing in wrong:
            with pytest.raises(ValueError, match=r"retain|mmaccel"):
                shipped.served(llm, [shipped.request(QWEN, first, **processing)])
        for processing, want in (
            ({"mmaccel": {"retain": 0.1}}, tenth),
            ({"retain": 0.1}, tenth),
            ({"mmaccel": False}, bare),
            ({"mmaccel": None}, quarter),
            # what is for the model's processor is none of our business
            ({"images_kwargs": {"do_resize": True}, "retain": 0.1}, tenth),
        ):
            assert shipped.served(llm, [shipped.request(QWEN, one, **processing) for one in asked]) == want, processing
        # one token and all of them, in one batch
        both = [shipped.request(QWEN, first, retain=retain) for retain in (1, 1.0)]
        alone = [shipped.served(llm, [one])[0] for one in both]
        assert shipped.served(llm, both) == alone
        assert shipped.length(llm, both[1]) - shipped.length(llm, both[0]) == WHOLE - 1


def test_a_request_without_reduction_has_the_positions_of_the_bare_model():
    """Even where the recipe numbers through what stays."""
    asked = shipped.prompts("existence", "relation", count=3)
    requests = [shipped.request(QWEN, one, mmaccel=False) for one in asked]
    with engine(QWEN, {**DIVPRUNE, "positions": "paper"}) as llm:
        assert shipped.served(llm, requests) == shipped.expected(QWEN, asked)


def test_registering_again_changes_nothing():
    guarded, resolve = VllmConfig.try_verify_and_update_config, _ModelRegistry.resolve_model_cls
    register()
    register()
    assert VllmConfig.try_verify_and_update_config is guarded and _ModelRegistry.resolve_model_cls is resolve
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_positions_beyond_the_table_are_refused():
    pictures = shipped.prompts("existence", count=1)[0].pictures
    asked = shipped.Prompt("is there a red square ?", pictures * 80)
    limit = {"limit_mm_per_prompt": {"image": 100}}
    with engine(LLAVA, {"recipe": "divprune", "retain": 1}, max_model_len=1024, **limit) as llm:
        with pytest.raises(ValueError, match="can keep its positions"):
            shipped.served(llm, [shipped.request(LLAVA, asked)])
        few = shipped.Prompt(asked.question, pictures * 2)
        assert shipped.served(llm, [shipped.request(LLAVA, few)]) == shipped.expected(
            LLAVA, [few], "divprune", retain=1
        )
