"""Methods inside the language model against the authors' numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from comparators import Arrays, Params, close, kept_of, one_unit, rotate, same_rows, same_set
from harness import NotOffered, fault, make, paid, whole
from torch import Tensor

from mmaccel.core.chunks import Chunks, Span
from mmaccel.layers.framefusion import LEAST, sparsity_needed
from mmaccel.method import KeyBatch, LayerAttention


def aim_pagerank(params: Params, arrays: Arrays) -> None:
    method = make("aim-pagerank", tau=params["tau_imp"], iterations=params["iters"], teleport=params["d"])
    importance = method.observe(paid(arrays["logits"]))["importance"]
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
    seen = method.observe(paid(attention.log().clamp(min=-1e9), text))
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
    seen = method.observe(paid(logits[:, None, None, : end + 1]))["prompt_logits"][0]
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
    """Layers of a model at which FrameFusion works, one after the other; between them tokens change.

    hidden, kind, place : of the tokens that are left ``[n, D]``, ``[n]`` and ``[n]``, the patch (-1 for text) and the place.
    left : how many visual tokens there were before each step and are now. The program is told shares, which need not be those
        of whole tokens.
    """

    def __init__(self, params: Params, arrays: Arrays) -> None:
        self.params = params
        self.hidden, self.kind = arrays["hidden0"][0], arrays["patch_type"][0]
        self.place = torch.arange(len(self.hidden))
        done = params.get("initial_sparsity_list") or []
        # what the program was told before the first step
        self.left = [float((self.kind != -1).sum())]
        for share in reversed(done):
            self.left.insert(0, self.left[0] / (1 - share))
        self.method = make(
            "framefusion-step", similarity=params["similarity_lower_bound"], layer=0, through=params["num_layers"] - 1
        )
        assert params["ratio_lower_bound"] == LEAST

    @property
    def asked(self) -> tuple[Tensor, Tensor]:
        """The counts and the budget as a method is told them."""
        return torch.tensor([self.left]), torch.tensor([self.params["cost"] * self.left[0]], dtype=torch.double)

    @property
    def done(self) -> list[float]:
        """The shares that merging has taken so far."""
        return [1 - after / before for before, after in itertools.pairwise(self.left)]

    def step(self, scores: Tensor | None) -> None:
        """One layer; ``scores [n]`` are the attention of the last prompt token."""
        visual = self.kind != -1
        kind, span, (left, count) = self.kind[visual], self.hidden[visual], self.asked
        # the cells of a patch are told apart by their order in time
        cells = torch.stack([self.place[visual], kind.clamp(min=-1), torch.zeros(len(kind), dtype=torch.long)], 1)
        cells[kind < 0] = -1
        given = {} if scores is None else {"prompt_attention": scores[visual]}
        kept = self.method.reduce(replace(one_unit(span, **given), cells=cells[None], left=left), count)
        stays = ~visual
        stays[visual.nonzero()[:, 0][kept.kept[0]]] = True
        self.hidden = self.hidden.clone()
        self.hidden[visual] = kept.substitute(span[None])[0]
        self.hidden, self.kind, self.place = self.hidden[stays], self.kind[stays], self.place[stays]
        self.left.append(float(kept.kept.sum()))


def framefusion(params: Params, arrays: Arrays) -> None:
    cascade = Cascade(params, arrays)
    for number, step in enumerate(params["steps"], 1):
        # the program averages over whatever query rows it gets, of this step or of all
        rows = arrays.get(f"attn_rows{number}", arrays.get("attn_rows"))
        scores = None if rows is None else rows.mean((0, 1))
        if scores is not None and len(scores) != len(cascade.place):
            scores = scores[cascade.place]
        cascade.step(scores)
        pruned = len(cascade.done) > len(step["sparsity_list"])
        assert cascade.done[: len(step["sparsity_list"])] == pytest.approx(step["sparsity_list"])
        assert pruned == cascade.method.is_done(*cascade.asked)
        assert rows is not None or not pruned
        same_set(cascade.place, arrays[f"pos{number}"])
        close(cascade.hidden, arrays[f"out{number}"][0])


def framefusion_cascade(params: Params, arrays: Arrays) -> None:
    cascade, recorded = Cascade(params, arrays), arrays["sparsity_list"].tolist()
    for layer in range(params["calls"]):
        cascade.hidden = cascade.hidden + arrays["delta"][layer][cascade.place]
        if cascade.method.is_done(*cascade.asked):
            assert arrays["flags"][layer].all()
        else:
            needed = sparsity_needed(params["cost"], params["num_layers"], cascade.done)
            assert needed == pytest.approx(float(arrays["required"][layer]), abs=1e-5)
        cascade.step(arrays["attention"][layer][cascade.place])
        kept = arrays["kept"][layer]
        same_set(cascade.place, kept[kept >= 0])
        assert cascade.method.is_done(*cascade.asked) == arrays["flags"][layer].all()
    assert cascade.done[: len(recorded)] == pytest.approx(recorded)
    close(cascade.hidden, arrays["out"][0])


def fastv(params: Params, arrays: Arrays) -> None:
    start, length = params["image_start"], params["image_len"]
    rows = arrays["attn_last_row"]
    # the logarithm of a softmax is a row of logits
    method, total = make("fastv"), rows.shape[-1]
    image = method.observe(paid(rows.log()[None, :, None]))["prompt_attention"][0, start : start + length]
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
    peak = method.observe(paid(rows))["text_peak"][0, first : first + size]
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


def sparsevlm(params: Params, arrays: Arrays) -> None:
    first, size, hidden = params["v_start"], params["v_num"], arrays["hidden"]
    visual = torch.zeros(hidden.shape[:2], dtype=torch.bool)
    visual[:, first : first + size] = True
    method = make("sparsevlm-step", layer=params["layer"] + 1, recycle=params["recycle_fraction"])
    prepared = method.prepare(hidden, ~visual, visual)
    same_set(prepared["rater"][0].nonzero()[:, 0] - params["text_start"], arrays["raters"])

    attention = replace(paid(arrays["attn"].log(), ~visual), prepared=prepared)
    score = method.observe(attention)["rater_attention"][0, first : first + size]
    close(score, arrays["score"][0])
    kept = arrays["mask"][0].nonzero()[:, 0]
    span = hidden[0, first : first + size]
    made = method.reduce(one_unit(span, rater_attention=score), torch.tensor([len(kept) + params["cluster_num"]]))
    stays = torch.zeros(size, dtype=torch.bool)
    stays[kept] = True
    links = made.full_links()
    same_set(links.source[~stays[links.source]], arrays["recycled_idx"])
    assert made.kept[0][kept].all()
    clusters = (made.kept[0] & ~stays).nonzero()[:, 0]
    same_rows(made.substitute(span[None])[0, clusters], arrays["merged"][0])


def pyramiddrop(params: Params, arrays: Arrays) -> None:
    """From hidden states and projections, which stand for the layer that is about to run."""
    heads = params["heads"]
    for row, (x, first, size) in enumerate(
        zip(arrays["features"], params["image_start"], params["current_image_tokens"], strict=True)
    ):
        x = x[arrays["attention_mask"][row]]
        x = (x * (x.square().mean(-1, keepdim=True) + params["rms_eps"]).rsqrt())[None]
        query, key = (
            rotate((x @ arrays[name].T).unflatten(-1, (heads, -1)).transpose(1, 2), 0, params["rope_base"])
            for name in ("wq", "wk")
        )
        text = torch.ones(x.shape[:2], dtype=torch.bool)
        method = make("pyramiddrop-step")
        seen = method.observe(LayerAttention(query, key, None, query.shape[-1] ** -0.5, text))["prompt_attention"][0]
        ratio, entered = params["ratios"][params["stage"] + 1], params["original_image_tokens"][row]
        count = method.official_count(ratio, entered)
        assert count == params["kept_image_tokens"][row]
        image = seen[first : first + size]
        ours = kept_of(method.reduce(one_unit(image[:, None], prompt_attention=image), torch.tensor([count])))
        places = torch.cat([torch.arange(first), ours + first, torch.arange(first + size, x.shape[1])])
        theirs = arrays["kept"][row]
        same_set(places, theirs[theirs >= 0])


def gemfilter(params: Params, arrays: Arrays) -> None:
    """The vector ranks text and all; so here every place stands for a visual token."""
    query, key = arrays["query"][None], arrays["keys"][None]
    method, size = make("gemfilter", kernel=params["pool_kernel"]), key.shape[2]
    text = torch.ones(1, 1, dtype=torch.bool)
    match = method.observe(LayerAttention(query, key, None, 1.0, text))["prompt_match"][0]
    batch = one_unit(match[:, None], prompt_match=match)
    same_set(kept_of(method.reduce(batch, torch.tensor([min(params["topk"], size)]))), arrays["idx_sorted"])
    # where all are asked for, their order tells
    for count in (1, len(arrays["idx"]) // 4, len(arrays["idx"]) // 2):
        same_set(kept_of(method.reduce(batch, torch.tensor([count]))), arrays["idx"][:count])


def flexselect(params: Params, arrays: Arrays) -> None:
    first, size, hidden = params["vision_start"], params["vision_len"], arrays["hidden"]
    query, key = (
        (hidden @ arrays[name]).unflatten(-1, (heads, -1)).transpose(0, 1)[None]
        for name, heads in (("Wq", params["num_heads"]), ("Wk", params["kv_heads"]))
    )
    text = torch.ones(1, len(hidden), dtype=torch.bool)
    text[:, first : first + size] = False
    method = make("flexselect")
    seen = method.observe(LayerAttention(query, key, None, params["head_dim"] ** -0.5, text))["text_peak"]
    score = seen[0, first : first + size]
    close(score, arrays["score"])
    made = method.reduce(one_unit(score[:, None], text_peak=score), torch.tensor([params["tkn_number"]]))
    same_set(kept_of(made), arrays["selected"].nonzero()[:, 0])


def flexselect_mean(params: Params, arrays: Arrays) -> None:
    raise NotOffered("the mean over heads and words; flexselect takes the largest")


def sparsevlm_plus(params: Params, arrays: Arrays) -> None:
    raise NotOffered("attention divided by products of position codes, which change its sign")


def homer(params: Params, arrays: Arrays) -> None:
    before, lengths, behind = params["prefix"], params["context"], params["suffix"]
    size = before + sum(lengths) + behind
    method = make("homer", bias=tuple(map(tuple, arrays["bias"].tolist())))
    if lengths[0] < lengths[1]:
        # ours fill a chunk before the next one; the program's are given as they are
        chunks = _cut(before, lengths, behind)
    else:
        span = Span(before, size - behind, lengths[0])
        assert span.length <= params["eff_chunk_len"] and span.chunks == len(lengths) == 2
        chunks = Chunks.cut([torch.arange(size)], [span])
    stays, slots = chunks.shared.clone(), chunks.places.shape[1]

    def both(name: str, dim: int = 1) -> Tensor:
        """Of both chunks, with padding in front of the shorter one."""
        parts = [arrays[f"{name}{side}"].movedim(dim, 1) for side in "LR"]
        return torch.cat([torch.cat([x.new_zeros(1, slots - x.shape[1], *x.shape[2:]), x], 1) for x in parts])

    for number, (side, length) in enumerate(zip("LR", lengths, strict=True)):
        mine = arrays[f"attn{side}"].shape[-1]
        middle = slice(before, before + length)
        # the logarithm of a softmax is a row of logits
        seen = paid(arrays[f"attn{side}"].log()[:, :, None].expand(-1, -1, mine, -1))
        found = method.observe(seen, arrays[f"pos{side}"], 0)["significance"][0, middle]
        close(found, arrays[f"significance{side}"][0, middle])
        batch = one_unit(arrays[f"hidden{side}"][0, middle], significance=found)
        made = method.reduce(batch, torch.tensor([length - params["reduce"][number]]))
        stays[number, slots - mine + before + kept_of(made)] = True
        assert torch.equal(stays[number, slots - mine :], arrays[f"keep{side}"])
    _, how = chunks.join(stays, chunks.pairs(torch.tensor([True])))
    close(how.apply(both("hidden")), arrays["hidden"])
    close(how.apply(both("key", 2)).transpose(1, 2), arrays["key"])
    assert torch.equal(how.pick(both("pos")), arrays["pos"])


def _cut(before: int, lengths: list[int], behind: int) -> Chunks:
    """The chunks of one prompt, of ``lengths`` that need not be equal."""
    ends = [before, *(before + sum(lengths[: i + 1]) for i in range(len(lengths)))]
    slots, size = before + max(lengths) + behind, ends[-1] + behind
    places = torch.full((len(lengths), slots), -1)
    for row, (first, last) in enumerate(itertools.pairwise(ends)):
        mine = torch.cat([torch.arange(before), torch.arange(first, last), torch.arange(size - behind, size)])
        places[row, slots - len(mine) :] = mine
    shared = (places >= 0) & ((places < before) | (places >= size - behind))
    return Chunks(torch.zeros(len(lengths), dtype=torch.long), places, shared)


_FASTV = "src/FastV/llava-hf/transformers/src/transformers/models/llama/modeling_llama.py"
_GEMFILTER = "my_baseline/GemFilter/gem_filter_utils.py"
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
    (
        "Gumpest/SparseVLMs",
        "llava/model/language_model/score.py:attn_postprocess_topk + utils.py:cluster_and_merge",
    ): sparsevlm,
    (
        "Gumpest/SparseVLMs",
        "llava/model/language_model/modelling_sparse_llama.py (V2 branch: bias division) + "
        "score.py:select_attn_head_by_sum, attn_postprocess_topk",
    ): sparsevlm_plus,
    (
        "alinlab/HOMER",
        "src/homer/patch_llama.py:_merge_power_max_last_calibrated; src/homer/chunk.py:Chunk.make_chunks, prune, merge",
    ): homer,
    ("Cooperx521/PyramidDrop", "llava/model/modeling_llama_pdrop.py:pdrop_rank_drop"): pyramiddrop,
    **{
        ("SalesforceAIResearch/GemFilter", f"{_GEMFILTER}:{name}"): gemfilter
        for name in ("standard_dis_index", "find_context")
    },
    (
        "yunzhuzhang0918/flexselect",
        "eval/llava/model/token_selector/qwen_selector.py:token_selection",
    ): flexselect,
    (
        "yunzhuzhang0918/flexselect",
        "eval/llava/model/token_selector/qwen_selector.py:token_selection_mean",
    ): flexselect_mean,
    ("thu-nics/FrameFusion", "framefusion/main.py:FrameFusion.forward"): framefusion,
    ("thu-nics/FrameFusion", "framefusion/main.py:FrameFusion.forward called once per layer"): framefusion_cascade,
    # one of the vectors bears the name of another repository
    **{(repository, _PRUNEVID): prunevid for repository in ("Visual-AI/PruneVid", "youweiliang/evit")},
    ("pkunlp-icler/FastV", f"{_FASTV}:LlamaModel.fastv_forward (block at layer K)"): fastv,
}
