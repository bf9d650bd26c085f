"""A kind of method that does not exist yet is one run: hooks and attention call its moments and know nothing of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor

from mmaccel import accelerated
from mmaccel.accelerate import vlm
from mmaccel.errors import MmaccelError
from mmaccel.runtime.build import make_runs
from mmaccel.runtime.call.call import Call
from mmaccel.runtime.call.forward import Forward, Prompt
from mmaccel.runtime.call.runs import KeysToRead, LayerAttended, Run, TextInputs

pytestmark = pytest.mark.usefixtures("no_gradients")

#: the layer at whose input the new method dims visual tokens, and by how much
AT, FACTOR = 1, 0.5


class DimPictures(Run):
    """Halve the hidden states of visual tokens at one layer, note what every layer attends to, refuse to read twice."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.moments: list[str] = []
        self.attended: list[tuple[int, int]] = []

    def before_text(self, text: TextInputs) -> None:
        self.moments.append("before_text")

    def before_layer(self, number: int, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
        self.moments.append("before_layer")
        if number != AT or not isinstance(self.forward, Prompt):
            return hidden
        visual = self.forward.layout.visual.gather(1, self.forward.chosen.clamp(min=0))
        return torch.where(visual[..., None], hidden * FACTOR, hidden)

    def keys_to_read(self, layer: LayerAttended) -> KeysToRead | None:
        self.moments.append("keys_to_read")
        return None

    def after_attention(self, layer: LayerAttended) -> None:
        self.moments.append("after_attention")
        self.attended.append((layer.number, layer.key.shape[2]))

    def finish(self) -> None:
        self.moments.append("finish")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[DimPictures]:
    """The new runs, one a forward."""
    found: list[DimPictures] = []

    def with_ours(call: Call[Any], forward: Forward) -> Iterator[Run]:
        yield from make_runs(call, forward)
        found.append(DimPictures(forward))
        yield found[-1]

    monkeypatch.setattr(vlm, "make_runs", with_ours)
    return found


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "internvl"])
def test_a_new_kind_is_one_run(family: str, made: list[DimPictures]) -> None:
    model, feed = zoo.model(family), dict(zoo.inputs(family))
    with accelerated(model, "fastv", retain=1.0, layer=AT, processor=zoo.processor(family)):
        got = model(**feed)
        visual = model.mmaccel.layout.visual
        model(**_next(feed, got))

    def dim(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        dimmed = torch.where(visual[..., None], hidden * FACTOR, hidden)
        return ((dimmed, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": dimmed})

    hook = model.model.language_model.layers[AT].register_forward_pre_hook(dim, with_kwargs=True)
    wanted = model(**feed)
    hook.remove()
    torch.testing.assert_close(got.logits, wanted.logits, atol=2e-5, rtol=1e-4)
    assert (got.logits - model(**feed).logits).abs().max() > 1e-3
    prompt, step = made
    depth, length = len(model.model.language_model.layers), feed["input_ids"].shape[1]
    # the layers below the first at which anything may happen have no hook
    assert prompt.moments == [
        "before_text",
        *["keys_to_read", "after_attention"] * AT,
        *["before_layer", "keys_to_read", "after_attention"] * (depth - AT),
        "finish",
    ]
    assert prompt.attended == [(number, length) for number in range(depth)]
    assert step.attended == [(number, length + 1) for number in range(depth)]


def _next(feed: dict[str, Any], out: Any) -> dict[str, Any]:
    """The forward of one more token on the cache of ``out``."""
    token = out.logits[:, -1:].argmax(-1)
    mask = torch.cat([feed["attention_mask"], torch.ones_like(token)], dim=1)
    return {"input_ids": token, "attention_mask": mask, "past_key_values": out.past_key_values, "use_cache": True}


def test_a_run_that_fails_leaves_no_half_of_a_forward(made: list[DimPictures], monkeypatch: pytest.MonkeyPatch) -> None:
    model, feed = zoo.model("llava"), dict(zoo.inputs("llava"))

    def fail(self: DimPictures, layer: LayerAttended) -> None:
        raise RuntimeError("a fault")

    with accelerated(model, "divprune", retain=0.5):
        first = model(**feed)
        with monkeypatch.context() as patch:
            patch.setattr(DimPictures, "after_attention", fail)
            with pytest.raises(RuntimeError, match="a fault"):
                model(**_next(feed, first))
        # the cache may hold some layers of the step, so it is not continued
        with pytest.raises(MmaccelError, match="broken off"):
            model(**_next(feed, first))
        model(**feed)
