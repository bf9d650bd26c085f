"""Methods inside the language model against the authors' numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from comparators import Arrays, Fault, Params, close, one_unit, same_set
from torch import Tensor

from mmaccel.layers.aim import AimPageRank
from mmaccel.layers.framefusion import FrameFusion, merge_runs, sparsity_needed
from mmaccel.layers.holitom import HoliTomInner
from mmaccel.layers.mustdrop import MustDropFilter
from mmaccel.layers.promptdistill import PromptDistill
from mmaccel.method import LayerAttention
from mmaccel.reduction import Reduction


@dataclass(frozen=True)
class Given(LayerAttention):
    """A layer whose logits are those of a vector, ``[B, H, q, K]``; everything else is derived from them as always."""

    map: Tensor

    @staticmethod
    def of(logits: Tensor, text: Tensor | None = None) -> Given:
        batch, _, rows, keys = logits.shape
        text = torch.ones(batch, rows, dtype=torch.bool) if text is None else text
        # queries and keys are only asked for their shapes
        return Given(logits[..., :1], logits.new_zeros(batch, 1, keys, 1), None, 1.0, text, logits)

    def logits(self, start: int, stop: int) -> Tensor:
        rows = self.map[:, :, start:stop, : self.key.shape[2]]
        return rows.masked_fill(rows <= -1e8, -torch.inf)


def kept_of(reduction: Reduction) -> Tensor:
    return reduction.kept[0].nonzero()[:, 0]


def aim_pagerank(params: Params, arrays: Arrays) -> None:
    method = AimPageRank(tau=params["tau_imp"], iterations=params["iters"], teleport=params["d"])
    importance = method.look(Given.of(arrays["logits"]))["importance"]
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
        method = MustDropFilter(global_threshold=float(low), individual_threshold=float(high), adaptive=True)
        same_set(kept_of(method.reduce(batch, torch.tensor([attention.shape[1]]))), arrays[name])


def mustdrop_filter(params: Params, arrays: Arrays) -> None:
    first, size = params["v_token_start"], params["img_seq"]
    method = MustDropFilter(
        global_threshold=params["global_thr"], individual_threshold=params["individual_thr"], adaptive=True
    )
    attention = arrays["attn"][:1]
    text = torch.ones(1, attention.shape[2], dtype=torch.bool)
    text[:, first : first + size] = False
    # the logarithm of a softmax is a row of logits
    seen = method.look(Given.of(attention.log().clamp(min=-1e9), text))
    span = {name: figures[0, first : first + size] for name, figures in seen.items()}
    batch = one_unit(torch.zeros(size, 1), **span)
    theirs = arrays["kept"]
    if not len(theirs):
        raise Fault("the filter of MustDrop may drop the whole picture; ours leaves one token")
    ours = method.reduce(batch, torch.tensor([size]))
    same_set(kept_of(ours), theirs)
    # the same set when the budget asks for as many
    exact = MustDropFilter(global_threshold=params["global_thr"], individual_threshold=params["individual_thr"])
    same_set(kept_of(exact.reduce(batch, torch.tensor([len(theirs)]))), theirs)


def promptdistill(params: Params, arrays: Arrays) -> None:
    end, logits = params["prompt_end"], arrays["logits"]
    method = PromptDistill(pooling=params["use_pooling"], kernel=params["kernel"])
    # our prompt ends where the vector's does; what is behind it always stays
    seen = method.look(Given.of(logits[:, None, None, : end + 1]))["prompt_logits"][0]
    batch = one_unit(seen[:end, None], prompt_logits=seen[:end])
    ours = kept_of(method.reduce(batch, torch.tensor([min(params["n_topk"], end)])))
    same_set(torch.cat([ours, torch.arange(end, logits.shape[1])]), arrays["kept_idx"])


def holitom_inner(params: Params, arrays: Arrays) -> None:
    first, size = params["image_start"], params["image_len"]
    hidden, attention = arrays["hidden"][0], arrays["attn_last_row"].mean(0)
    method, last = HoliTomInner(), first + size
    count = max(1, method.official_count(1 - params["r"], size))
    batch = one_unit(hidden[first:last], prompt_attention=attention[first:last])
    ours = method.reduce(batch, torch.tensor([count]))
    places = torch.cat([torch.arange(first), kept_of(ours) + first, torch.arange(last, len(hidden))])
    same_set(places, arrays["keep_idx"])
    close(torch.cat([hidden[:first], ours.apply(batch.features)[0], hidden[last:]]), arrays["out"][0])


def framefusion(params: Params, arrays: Arrays) -> None:
    hidden, kind = arrays["hidden0"][0], arrays["patch_type"][0]
    place = torch.arange(len(hidden))
    done = list(params["initial_sparsity_list"] or [])
    # what the program was told, or has found out, before the first step
    merging = not done or done[-1] >= params["ratio_lower_bound"]
    pruning = True
    for number, step in enumerate(params["steps"], 1):
        visual = kind != -1
        size = int(visual.sum())
        needed = sparsity_needed(params["cost"], params["num_layers"], done)
        span, inside = hidden[visual], torch.zeros(size, dtype=torch.bool)
        kept = Reduction.identity(torch.ones(1, size, dtype=torch.bool))
        if not merging and pruning:
            # the program averages over whatever query rows it gets
            scores = arrays["attn_rows"].mean((0, 1))[visual]
            batch = one_unit(span, prompt_attention=scores)
            method = FrameFusion(similarity=params["similarity_lower_bound"])
            kept = method.reduce(batch, torch.tensor([max(1, method.official_count(1 - needed, size))]))
            pruning = False
        elif merging:
            # the cells of a patch are told apart by their order in time
            cells = torch.stack([place[visual], kind[visual].clamp(min=-1), torch.zeros(size, dtype=torch.long)], 1)
            cells[kind[visual] < 0] = -1
            valid, bound = torch.ones(1, size, dtype=torch.bool), params["similarity_lower_bound"]
            free = merge_runs(span[None], valid, cells[None], bound, torch.tensor([size]))
            share = (size - int(free.kept.sum())) / size
            if share < needed:
                kept = free
                done.append(share)
                merging = share >= params["ratio_lower_bound"]
            else:
                kept = merge_runs(span[None], valid, cells[None], bound, torch.tensor([int(needed * size)]))
                merging = pruning = False
        assert done == pytest.approx(step["sparsity_list"])
        assert merging != step.get("finish_merging", not merging)
        assert pruning != step.get("finish_pruning", not pruning)
        stays = ~visual
        inside = kept.kept[0]
        stays[visual.nonzero()[:, 0][inside]] = True
        hidden = hidden.clone()
        hidden[visual] = kept.substitute(span[None])[0]
        hidden, kind, place = hidden[stays], kind[stays], place[stays]
        same_set(place, arrays[f"pos{number}"])
        close(hidden, arrays[f"out{number}"][0])


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
}
