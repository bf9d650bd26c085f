"""Methods inside the language model against the authors' numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from comparators import Arrays, Params, close, kept_of, one_unit, same_set
from harness import beneath, fault, make, paid, whole
from torch import Tensor

from mmaccel.core.reduction import Reduction
from mmaccel.errors import MmaccelError
from mmaccel.layers.framefusion import merge_runs, sparsity_needed
from mmaccel.method import KeyBatch


def aim_pagerank(params: Params, arrays: Arrays) -> None:
    method = make("aim-pagerank", tau=params["tau_imp"], iterations=params["iters"], teleport=params["d"])
    importance = method.look(paid(arrays["logits"]))["importance"]
    close(importance, arrays["importance"])

    first, last, length = params["visual_start"], params["visual_end"], importance.shape[1]
    size = last - first
    # the program rounds the sum with the text down, which is an integer
    count = max(1, method.official_count(params["retain_rate"], size))
    text = torch.cat([torch.arange(first), torch.arange(last, length)])
    assert count + len(text) == params["keep_total"]
    for row, theirs in zip(importance, arrays["keep_idx_sorted"], strict=True):
        batch = one_unit(row[first:last, None], importance=row[first:last])
        ours = kept_of(method.reduce(batch, torch.tensor([count])))
        same_set(torch.cat([text, ours + first]), theirs)


def mustdrop_dual_filter(params: Params, arrays: Arrays) -> None:
    """As below for many thresholds, from the map of text rows and visual columns alone."""
    attention = arrays["in_attn_text_vis"]
    assert attention.shape[1] == params["img_seq"]
    batch = one_unit(attention.T, text_sum=attention.sum(0), text_max=attention.amax(0))
    found = {name: name.removeprefix("out_keep_g").split("_i") for name in arrays if name.startswith("out_keep_g")}
    assert found
    for name, (low, high) in found.items():
        method = make("mustdrop-filter", global_threshold=float(low), individual_threshold=float(high), adaptive=True)
        same_set(kept_of(method.reduce(batch, torch.tensor([attention.shape[1]]))), arrays[name])


def mustdrop_filter(params: Params, arrays: Arrays) -> None:
    first, size = params["v_token_start"], params["img_seq"]
    method = make(
        "mustdrop-filter",
        global_threshold=params["global_thr"],
        individual_threshold=params["individual_thr"],
        adaptive=True,
    )
    attention = arrays["attn"][:1]
    text = torch.ones(1, attention.shape[2], dtype=torch.bool)
    text[:, first : first + size] = False
    # the logarithm of a softmax is a row of logits
    seen = method.look(paid(attention.log().clamp(min=-1e9), text))
    span = {name: figures[0, first : first + size] for name, figures in seen.items()}
    batch = one_unit(torch.zeros(size, 1), **span)
    theirs = arrays["kept"]
    with fault(not len(theirs), "the filter of MustDrop may drop the whole picture; ours leaves one token"):
        same_set(kept_of(method.reduce(batch, torch.tensor([size]))), theirs)
    # the same set when the budget asks for as many
    exact = make(
        "mustdrop-filter", global_threshold=params["global_thr"], individual_threshold=params["individual_thr"]
    )
    same_set(kept_of(exact.reduce(batch, torch.tensor([len(theirs)]))), theirs)


def promptdistill(params: Params, arrays: Arrays) -> None:
    end, logits = params["prompt_end"], arrays["logits"]
    method = make("promptdistill", pooling=params["use_pooling"], kernel=params["kernel"])
    # our prompt ends where the vector's does; what is behind it always stays
    seen = method.look(paid(logits[:, None, None, : end + 1]))["prompt_logits"][0]
    batch = one_unit(seen[:end, None], prompt_logits=seen[:end])
    ours = kept_of(method.reduce(batch, torch.tensor([min(params["n_topk"], end)])))
    same_set(torch.cat([ours, torch.arange(end, logits.shape[1])]), arrays["kept_idx"])


def holitom_inner(params: Params, arrays: Arrays) -> None:
    first, size = params["image_start"], params["image_len"]
    hidden, attention = arrays["hidden"][0], arrays["attn_last_row"].mean(0)
    method, last = make("holitom-inner"), first + size
    count = max(1, method.official_count(1 - params["r"], size))
    batch = one_unit(hidden[first:last], prompt_attention=attention[first:last])
    ours = method.reduce(batch, torch.tensor([count]))
    places = torch.cat([torch.arange(first), kept_of(ours) + first, torch.arange(last, len(hidden))])
    same_set(places, arrays["keep_idx"])
    close(torch.cat([hidden[:first], ours.apply(batch.features)[0], hidden[last:]]), arrays["out"][0])


class Cascade:
    """FrameFusion over several layers, which the product does not do: it merges, or prunes, at one.

    hidden, kind, place : of the tokens that are left ``[n, D]``, ``[n]`` and ``[n]``, the patch (-1 for text) and the place.
    """

    def __init__(self, params: Params, arrays: Arrays) -> None:
        self.params = params
        self.hidden, self.kind = arrays["hidden0"][0], arrays["patch_type"][0]
        self.place = torch.arange(len(self.hidden))
        # what the program was told, or has found out, before the first step
        self.done = list(params.get("initial_sparsity_list") or [])
        self.merging = not self.done or self.done[-1] >= params["ratio_lower_bound"]
        self.pruning = True
        self.method = make("framefusion", similarity=params["similarity_lower_bound"])

    @property
    def needed(self) -> float:
        return sparsity_needed(self.params["cost"], self.params["num_layers"], self.done)

    def step(self, scores: Tensor | None) -> None:
        """One layer; ``scores [n]`` are the attention of the last prompt token."""
        visual, size = self.kind != -1, int((self.kind != -1).sum())
        kept, span = Reduction.identity(torch.ones(1, size, dtype=torch.bool)), self.hidden[visual]
        if self.merging:
            kept = self._merge(span, visual)
        elif self.pruning:
            assert scores is not None
            count = max(1, self.method.official_count(1 - self.needed, size))
            kept = self.method.reduce(one_unit(span, prompt_attention=scores[visual]), torch.tensor([count]))
            self.pruning = False
        stays = ~visual
        stays[visual.nonzero()[:, 0][kept.kept[0]]] = True
        self.hidden = self.hidden.clone()
        self.hidden[visual] = kept.substitute(span[None])[0]
        self.hidden, self.kind, self.place = self.hidden[stays], self.kind[stays], self.place[stays]

    def _merge(self, span: Tensor, visual: Tensor) -> Reduction:
        kind, size, needed = self.kind[visual], len(span), self.needed
        # the cells of a patch are told apart by their order in time
        cells = torch.stack([self.place[visual], kind.clamp(min=-1), torch.zeros(size, dtype=torch.long)], 1)
        cells[kind < 0] = -1
        valid, bound = torch.ones(1, size, dtype=torch.bool), self.params["similarity_lower_bound"]
        free = merge_runs(span[None], valid, cells[None], bound, torch.tensor([size]))
        share = (size - int(free.kept.sum())) / size
        if share < needed:
            self.done.append(share)
            self.merging = share >= self.params["ratio_lower_bound"]
            return free
        self.merging = self.pruning = False
        return merge_runs(span[None], valid, cells[None], bound, torch.tensor([int(needed * size)]))


@beneath("layers.framefusion.sparsity_needed")
def framefusion(params: Params, arrays: Arrays) -> None:
    cascade = Cascade(params, arrays)
    for number, step in enumerate(params["steps"], 1):
        # the program averages over whatever query rows it gets
        scores = arrays["attn_rows"].mean((0, 1)) if "attn_rows" in arrays else None
        cascade.step(scores)
        assert cascade.done == pytest.approx(step["sparsity_list"])
        assert cascade.merging != step.get("finish_merging", not cascade.merging)
        assert cascade.pruning != step.get("finish_pruning", not cascade.pruning)
        same_set(cascade.place, arrays[f"pos{number}"])
        close(cascade.hidden, arrays[f"out{number}"][0])


@beneath("layers.framefusion.sparsity_needed")
def framefusion_cascade(params: Params, arrays: Arrays) -> None:
    """Layer after layer; between them the tokens that are left change."""
    cascade = Cascade(params, arrays)
    for layer in range(params["calls"]):
        cascade.hidden = cascade.hidden + arrays["delta"][layer][cascade.place]
        if arrays["required"][layer] < 0:
            with pytest.raises(MmaccelError, match="is spent"):
                _ = cascade.needed
        elif cascade.merging or cascade.pruning:
            assert cascade.needed == pytest.approx(float(arrays["required"][layer]), abs=1e-5)
        cascade.step(arrays["attention"][layer][cascade.place])
        kept = arrays["kept"][layer]
        same_set(cascade.place, kept[kept >= 0])
        assert [not cascade.merging, not cascade.pruning] == arrays["flags"][layer].tolist()
    assert cascade.done == pytest.approx(arrays["sparsity_list"].tolist())
    close(cascade.hidden, arrays["out"][0])


def fastv(params: Params, arrays: Arrays) -> None:
    start, length = params["image_start"], params["image_len"]
    rows = arrays["attn_last_row"]
    # the logarithm of a softmax is a row of logits
    method, total = make("fastv"), rows.shape[-1]
    image = method.look(paid(rows.log()[None, :, None]))["prompt_attention"][0, start : start + length]
    # the program rounds half to even
    count = torch.tensor([round(length * (1 - params["r"]))])
    ours = kept_of(method.reduce(one_unit(image[:, None], prompt_attention=image), count))
    text = torch.cat([torch.arange(start), torch.arange(start + length, total)])
    same_set(torch.cat([text, ours + start]), arrays["keep_idx"])


def prunevid(params: Params, arrays: Arrays) -> None:
    """The tokens that go on, in the order of the windows; and the keys that a layer below then keeps."""
    first, size, seen = params["image_start"], params["image_tokens"], arrays["text_to_image"]
    total = arrays["hidden"].shape[1]
    rows = torch.full((*seen.shape[:3], total), -torch.inf)
    rows[..., first : first + size] = seen.log()
    # what text pays to text is somewhere
    rows[..., 0] = (1 - seen.sum(-1)).clamp(min=1e-9).log()
    method = make("prunevid-select")
    peak = method.look(paid(rows))["text_peak"][0, first : first + size]
    start, spans = 0, []
    for length, static, dynamic in zip(
        params["window_sizes"], params["static_sizes"], params["dynamic_sizes"], strict=True
    ):
        spans += [(start, start + length - 1)] * static
        spans += [(start + i * length // dynamic,) * 2 for i in range(dynamic)]
        start += length
    cells = torch.tensor([[t, 0, place] for place, (t, _) in enumerate(spans)])[None]
    batch = replace(
        one_unit(peak[:, None], text_peak=peak), cells=cells, until=torch.tensor([u for _, u in spans])[None]
    )
    text = torch.cat([torch.arange(first), torch.arange(first + size, total)])
    theirs = arrays["position_ids"][0]
    # the share is one of what is there; a budget is a whole number
    tries = [method.reduce(batch, torch.tensor([n])).kept[0] for n in whole(params["alpha"], size)]
    kept = next((one for one in tries if int(one.sum()) + len(text) == len(theirs)), tries[-1])
    same_set(torch.cat([text, kept.nonzero()[:, 0] + first]), theirs)

    survivors = torch.ones(1, total, dtype=torch.bool)
    survivors[0, first : first + size] = kept
    keys, every = arrays["key0"], torch.ones(1, total, dtype=torch.bool)
    stored = KeyBatch(keys, keys, keys[:, :, :0], every, every, torch.arange(total)[None], 1.0, survivors=survivors)
    stays = make("mustdrop-cache", layer=0).score(stored)[0] > -torch.inf
    close(keys[0][stays].view(arrays["key0_out"].shape), arrays["key0_out"])


_FASTV = "src/FastV/llava-hf/transformers/src/transformers/models/llama/modeling_llama.py"
_PRUNEVID = "models/pllava/elastic_cache.py:VTPWindowCache.prompt_prefill, process_attention"

COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    (
        "LaVi-Lab/AIM",
        "other_packages/transformers/src/transformers/models/qwen2/modeling_qwen2.py:get_importance",
    ): aim_pagerank,
    (
        "liuting20/MustDrop",
        "llava/model/language_model/modelling_sparse_llama.py:LlamaDynamicvitModel.dual_attention_filter",
    ): mustdrop_filter,
    ("liuting20/MustDrop", "LlamaDynamicvitModel.dual_attention_filter"): mustdrop_dual_filter,
    (
        "declare-lab/PromptDistill",
        "models/llama.py:SelectiveLlamaModel.forward (selection block)",
    ): promptdistill,
    (
        "cokeshao/HoliTom",
        "holitom/modeling_qwen2.py:Qwen2Model_holitom.forward (block at layer HOLITOM_k)",
    ): holitom_inner,
    ("thu-nics/FrameFusion", "framefusion/main.py:FrameFusion.forward"): framefusion,
    ("thu-nics/FrameFusion", "framefusion/main.py:FrameFusion.forward called once per layer"): framefusion_cascade,
    # one of the vectors bears the name of another repository
    **{(repository, _PRUNEVID): prunevid for repository in ("Visual-AI/PruneVid", "youweiliang/evit")},
    ("pkunlp-icler/FastV", f"{_FASTV}:LlamaModel.fastv_forward (block at layer K)"): fastv,
}
