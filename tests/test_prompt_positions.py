"""Prompts that need more positions than the model has are refused with a sentence by every program."""

from __future__ import annotations

import base64
import io
import re
import threading
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from laws import oracle
from PIL import Image

import mmaccel
from mmaccel import MmaccelError
from mmaccel.accelerate.positions import check_positions, position_limit, prompt_positions
from mmaccel.media.files import Prompt
from mmaccel.programs.evaluate import Question, Row, evaluate
from mmaccel.programs.serve.engine import Engine, Limits
from mmaccel.programs.serve.schema import ChatRequest
from mmaccel.programs.serve.sources import Sources


def config(**values: Any) -> Any:
    """A model with this text configuration."""
    found = SimpleNamespace(**values)
    return SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: found))


@pytest.mark.parametrize(
    ("values", "limit"),
    [
        ({}, None),
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default"}}, 4096),
        # some configs state the original number, others the scaled one
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}, 16384),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 32768,
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
    ],
)
def test_positions_that_a_config_states(values: dict[str, Any], limit: int | None) -> None:
    assert position_limit(config(**values)) == limit


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_every_family_states_its_positions(family: str) -> None:
    # one family scales its RoPE
    assert position_limit(oracle.bare(family)) in (4096, 8192)


@pytest.mark.parametrize("family", ("llava", "qwen2_5_vl", "smolvlm"))
def test_positions_are_counted_as_the_model_counts_them(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With M-RoPE a picture takes fewer positions than tokens."""
    model, feed = oracle.subject(family), zoo.inputs(family, "image")
    tokens = feed["input_ids"].shape[1]
    seen: list[torch.Tensor] = []
    text = oracle.text_model(model)
    note = text.register_forward_pre_hook(lambda m, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True)
    try:
        model.generate(**feed, max_new_tokens=1, do_sample=False)
    finally:
        note.remove()
    last = int(seen[0][-3:].max()) + 1 if seen[0].dim() == 3 else int(seen[0].max()) + 1
    assert last < tokens if family == "qwen2_5_vl" else last == tokens
    divprune = mmaccel.get_recipe("divprune")
    monkeypatch.setattr(model.config.get_text_config(), "max_position_embeddings", last + 5)
    check_positions(model, divprune, feed, 5)
    with pytest.raises(
        MmaccelError, match=f"has {tokens} tokens at {last} positions, .* has {last + 5} positions in all"
    ):
        check_positions(model, divprune, feed, 6)
    # what is left is numbered anew, or stands side by side
    check_positions(model, divprune.override(positions="paper"), feed, 6)
    check_positions(model, mmaccel.get_recipe("homer"), feed, 6)


@pytest.mark.parametrize(("family", "case"), [("llava", "image"), ("qwen2_5_vl", "image"), ("qwen2_5_vl", "video")])
def test_generate_warns_and_answers(family: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the bare model answers; a second turn on the cache is counted from its beginning."""
    model, feed = oracle.subject(family), dict(zoo.inputs(family, case))
    asked = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    needed = prompt_positions(model, feed)
    text = model.config.get_text_config()
    with mmaccel.accelerated(model, "divprune", retain=0.5):
        monkeypatch.setattr(text, "max_position_embeddings", needed + 4)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            fits = model.generate(**feed, **asked)
        assert not any("positions in all" in note for note in model.mmaccel.stats().notes)
        monkeypatch.setattr(text, "max_position_embeddings", needed + 3)
        with pytest.warns(UserWarning, match=f"at {needed} positions, .* this model has {needed + 3} positions in all"):
            made = model.generate(**feed, **asked)
        assert any("positions in all" in note for note in model.mmaccel.stats().notes)
        assert torch.equal(made.sequences, fits.sequences)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            # the bare model
            model.generate(**feed, **asked, mmaccel=False)
        if family == "llava":
            ids = torch.cat([made.sequences, made.sequences[:, -3:]], dim=1)
            with pytest.warns(UserWarning, match=f"has {ids.shape[1]} tokens at {ids.shape[1]} positions"):
                model.generate(input_ids=ids, past_key_values=made.past_key_values, **asked)


def test_serve_counts_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not tokens, of which a picture has more with M-RoPE; and a RoPE may be scaled."""
    model, processor = zoo.model("qwen2_5_vl"), zoo.processor("qwen2_5_vl")
    picture = {"type": "image_url", "image_url": {"url": data_url(zoo.image(112, 112, 0))}}
    message = {"role": "user", "content": [picture, {"type": "text", "text": "what?"}]}

    def ask(limit: int, rope: dict[str, Any] | None = None, **options: Any) -> Any:
        text = model.config.get_text_config()
        with monkeypatch.context() as patch:
            patch.setattr(text, "max_position_embeddings", limit)
            if rope:
                patch.setattr(text, "rope_parameters", {**text.rope_parameters, **rope})
            engine = Engine(model, processor, mmaccel.get_recipe("divprune"), Sources(), Limits())
            request = ChatRequest.model_validate({"model": "m", "messages": [message], "temperature": 0, **options})
            try:
                return engine.answer(request, lambda piece: None, threading.Event())
            finally:
                model.mmaccel.remove()

    tokens = ask(4096, max_tokens=1).prompt_tokens
    with pytest.raises(MmaccelError, match=f"The prompt has {tokens} tokens at ") as error:
        ask(30, max_tokens=1)
    needed = int(re.search(r"at (\d+) positions", str(error.value))[1])
    assert needed < tokens
    assert ask(needed + 2, max_tokens=2).new_tokens <= 2
    # what is not asked for is as long as fits
    assert ask(needed + 2).new_tokens <= 2
    with pytest.raises(MmaccelError, match=f"this model has {needed + 2} positions"):
        ask(needed + 2, max_tokens=3)
    assert ask(30, {"factor": 8.0}, max_tokens=3).new_tokens <= 3


def data_url(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def test_eval_names_the_question_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = oracle.subject("llava"), zoo.processor("llava")
    monkeypatch.setattr(model.config.get_text_config(), "max_position_embeddings", 120)
    asked = {"short": "what?", "long": "what? " * 40}
    questions = [
        Question(name, "vqa", None, lambda words=words: Prompt(words, (zoo.image(60, 48, 0),)))
        for name, words in asked.items()
    ]
    said: list[str] = []
    row = Row(mmaccel.get_recipe("divprune"))
    found = evaluate(model, processor, questions, [row], batch_size=2, max_new_tokens=4, complain=said.append)
    assert sum(len(answers) for _, answers in found) == 1
    assert len(said) == 1 and said[0].startswith("long: ") and said[0].endswith("or ask for a shorter answer.")
