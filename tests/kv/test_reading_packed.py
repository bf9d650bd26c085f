"""Sparse reads of packed keys: a step reads the packed pages that it chose, and only these."""

from __future__ import annotations

from typing import Any

import pytest
import simulated
import torch
import zoo
from laws import helpers, oracle
from tail import few, in_turn
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mmaccel import Recipe, Stage, accelerated
from mmaccel.kv import decoding
from mmaccel.kv.sparse import SparseMemory
from mmaccel.runtime.cache import reading
from mmaccel.runtime.call import readers

pytestmark = pytest.mark.usefixtures("no_gradients")

# by choice: those that rate keys by a summary; tokenselect looks at keys before it chooses, and decodes them
POLICIES = ("quest", "loki", "squeezed-attention")
SMALL: dict[str, dict[str, Any]] = {"quest": {"page": 3, "least": 1, "layer": 1}, "loki": {"layer": 1}}
SMALL["squeezed-attention"] = {"clusters": 0.3, "layer": 1}
CODECS = {
    "kivi": {"page": 16, "group": 16, "residual": 4, "bits": 4},
    "think": {"page": 16, "group": 16, "residual": 4},
    "calibquant": {"page": 16},
}
PROMPTS = (("llava", "images"), ("qwen2_5_vl", "uneven"), ("internvl", "images"))


def both(name: str, codec: str = "kivi", retain: float = 0.3) -> Recipe:
    return Recipe("both", (Stage(name, retain, SMALL[name]), Stage(codec, None, CODECS[codec])))


class Watch:
    """Compares every layer that reads packed pages with dense attention over decoded keys, of which all others are hidden.

    reads : how often pages were chosen. fewer : how often some packed pages were left out.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads = self.fewer = 0
        self.chosen: dict[int, Any] = {}
        self.choose, self.attend = reading.read_layer, readers.attend
        monkeypatch.setattr(reading, "read_layer", self.layered)
        monkeypatch.setattr(readers, "attend", self.attended)

    def layered(self, policy: Any, layer: Any, *others: Any) -> Any:
        made = self.chosen[layer.number] = self.choose(policy, layer, *others)
        return made

    def attended(self, layer: Any, query: Tensor, visible: Tensor | None, scaling: float, pages: Any = None) -> Tensor:
        out = self.attend(layer, query, visible, scaling, pages=pages)
        if pages is None:
            return out
        keys, values = layer.stored()
        heads, total = keys.shape[1:3]
        mask = self.chosen[layer.number].mask(total).expand(-1, heads, -1, -1)
        there = layer.index.by_head[:, :, None] >= 0
        assert visible is None and not (mask & ~there).any()
        table, shared = layer.shared.places.grid_table, layer.shared
        visual = (table[..., 0] >= 0)[:, None].expand(-1, layer.index.by_head.shape[1], -1)
        place = layer.index.by_head.long()
        is_visual = visual.gather(2, place.clamp(0, visual.shape[2] - 1)) & (place >= 0) & (place < visual.shape[2])
        assert mask[:, :, 0].logical_or(is_visual | ~there[:, :, 0]).all(), "text is left out"
        # whole pages, the same as in the table
        counts = layer.pages.count[pages.table[: int(pages.cu_pages[-1])].long()]
        head = torch.repeat_interleave(pages.cu_pages.diff().long())
        packed = torch.zeros(len(query) * heads, dtype=torch.long).index_add_(0, head, counts.long())
        assert torch.equal(packed.view(-1, heads), mask[:, :, 0, : layer.width].sum(-1))
        groups = query.shape[1] // heads
        wide = (x.repeat_interleave(groups, dim=1) for x in (keys, values, mask))
        k, v, m = wide
        wanted = scaled_dot_product_attention(query, k, v, m, scale=scaling).transpose(1, 2)
        torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
        self.reads += 1
        self.fewer += bool((mask[..., : layer.width] != there[..., : layer.width]).any())
        assert shared.memory(SparseMemory).layers[layer.number].listed is not None
        return out


@pytest.mark.parametrize(("family", "kind", "name"), in_turn(PROMPTS, POLICIES))
def test_a_step_reads_the_packed_pages_that_it_chose(
    family: str, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And attends to what it would of the same keys decoded; new tokens are packed in between."""
    feed = zoo.inputs(family, kind)
    forced = oracle.force(family, len(feed["input_ids"]), 12)
    recipe = both(name)
    with accelerated(oracle.subject(family), recipe, processor=zoo.processor(family)) as model:
        wanted, _ = oracle.decode(model, feed, forced)
        with monkeypatch.context() as patch:
            patch.setattr(decoding, "on_gpu", lambda x: True)
            watch = Watch(patch)
            got, _ = oracle.decode(model, feed, forced)
    assert watch.reads == 11 * 3 and watch.fewer
    oracle.close(got, wanted)


@pytest.mark.parametrize("codec", few(CODECS, ["think"]))
def test_pages_of_other_codecs(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    feed, forced = zoo.inputs("llava", "images"), oracle.force("llava", 1, 4)
    monkeypatch.setattr(decoding, "on_gpu", lambda x: True)
    with accelerated(oracle.subject("llava"), both("quest", codec)) as model:
        watch = Watch(monkeypatch)
        oracle.decode(model, feed, forced)
    assert watch.reads == 3 * 3 and watch.fewer


@pytest.mark.parametrize("name", POLICIES)
def test_beams_and_second_turns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    feed, second = (zoo.inputs("internvl", kind, batch=2, question="a?") for kind in ("image", "text"))
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    said: list[Tensor] = []
    with accelerated(oracle.subject("internvl"), both(name)) as model:
        for as_stored in (False, True):
            with monkeypatch.context() as patch:
                patch.setattr(decoding, "on_gpu", lambda x, s=as_stored: s)
                watch = Watch(patch)
                said.append(model.generate(**feed, **options, num_beams=3).sequences)
                beams = watch.reads
                out = model.generate(**feed, **options)
                follow, _ = helpers.follow(feed, out, second)
                again = watch.reads
                said.append(model.generate(**follow, past_key_values=out.past_key_values, **options).sequences)
    assert beams and watch.fewer and watch.reads > again > beams
    assert torch.equal(said[0], said[2]) and torch.equal(said[1], said[3])


def test_as_many_pages_as_fit_and_text_within_them_always() -> None:
    """Pages with text, and what is not packed, are read within the budget; of the others as many as are left of it."""
    feed = zoo.inputs("llava", "images")
    visual = oracle.visual("llava", feed)[0]
    with accelerated(oracle.subject("llava"), both("quest", retain=0.8)) as model:
        out = model(**feed, use_cache=True)
        model(input_ids=torch.tensor([[5]]), past_key_values=out.past_key_values, use_cache=True)
        layer = out.past_key_values.mmaccel.layers[1]
    choices = layer.shared.memory(SparseMemory).layers[1].choices
    whole = [n for n in range(layer.width // 16) if visual[16 * n : 16 * n + 16].all()]
    assert choices.pages[0, 0].tolist() == whole and len(whole) > 1
    # six units of three keys, the last of one
    assert choices.each == 6 and [int((unit >= 0).sum()) for unit in choices.rated[0, 0, :6]] == [3] * 5 + [1]
    left = int(0.8 * int(visual.sum()) + 0.5) - (int(visual.sum()) - 16 * len(whole))
    assert choices.count.tolist() == [[left // 16]] and 0 < left // 16 < len(whole)
    assert choices.always.shape[2] == len(visual) - 16 * len(whole)


@pytest.mark.full
@pytest.mark.parametrize("name", POLICIES)
def test_a_step_on_packed_pages_never_waits(name: str) -> None:
    """Nor does it decode them: launches of a layer above those of the codec alone."""
    counts = {}
    for recipe in (both(name), Recipe("kivi", (both(name).stages[1],))):
        for layers in (4, 8):
            seen = []
            with simulated.machine() as gpu:
                model = gpu.put(zoo.model("llava", num_hidden_layers=layers).requires_grad_(False))
                with accelerated(model, recipe):
                    handle = model.register_forward_pre_hook(lambda *_, s=seen, g=gpu: s.append(g.counts.copy()))
                    model.generate(
                        **gpu.put(zoo.inputs("llava", "images")), max_new_tokens=4, min_new_tokens=4, do_sample=False
                    )
                    handle.remove()
            last = seen[-1].since(seen[-2])
            counts[recipe.name, layers] = sum(last.launches.values()), sum(last.waits.values())
    waits = {of: (counts[of, 4][1], counts[of, 8][1]) for of in ("both", "kivi")}
    assert waits["both"] == waits["kivi"] and waits["both"][0] == waits["both"][1]
    above = [counts["both", layers][0] - counts["kivi", layers][0] for layers in (4, 8)]
    assert (above[1] - above[0]) / 4 == ABOVE[name]


#: launches a layer above those of the codec
# checked by test_a_step_on_packed_pages_never_waits
ABOVE = {"quest": 5, "loki": 5, "squeezed-attention": 26}
