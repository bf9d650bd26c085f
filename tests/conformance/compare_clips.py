"""Methods for clips against the authors' programs; see comparators.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from comparators import Arrays, Params, close, kept_of, same_rows, same_set
from compare_merging import film_of
from harness import NotOffered, make
from torch import Tensor

from mmaccel.merging.streamdvc import take_up


# --- far from the centre ----------------------------------------------------------------------------------------------
def vidcom2(params: Params, arrays: Arrays) -> None:
    """At their number of tokens the same ones; that of every frame follows."""
    places, counts = params["frame_token_len"], arrays["keep_counts"]
    assert (params["channel_ratio"], params["alphas"]) == (0.5, [0.125, 0.25, 0.5, 1.0, 2.0])
    clip = film_of(arrays["features"].unflatten(0, (-1, places)))
    made = make("vidcom2", temperature=params["temp"]).reduce(clip, counts.sum()[None])
    theirs = arrays["kept"]
    if params["model"] == "llava_vid":
        # rows of 13 tokens end in a newline, and newlines stand behind the tokens of their frame
        side, width = 13, 14
        theirs = theirs[theirs % width < side]
        theirs = theirs // width * side + theirs % width
    same_set(kept_of(made), theirs)
    assert torch.equal(made.kept[0].view(-1, places).sum(1), counts)


def stc_pruner(params: Params, arrays: Arrays) -> None:
    """Chunks of the program's own lengths; a clip of several is read up to each of them."""
    lengths, places = params["frames_per_chunk"], params["tokens_per_frame"]
    assert params["channel_ratio"] == 0.5
    frames = torch.cat([arrays[f"chunk{i}"].unflatten(0, (-1, places)) for i in range(len(lengths))])
    ends = torch.tensor(lengths).cumsum(0)
    number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    given = {"chunks": lambda self, frame: torch.where(frame < 0, -1, number[frame.clamp(min=0)])}
    made = make("stc-pruner", given).reduce(film_of(frames), torch.tensor([params["keep_per_frame"] * len(frames)]))
    kept = kept_of(made)
    for i, (end, length) in enumerate(zip(ends.tolist(), lengths, strict=True)):
        first = (end - length) * places
        same_set(kept[(kept >= first) & (kept < end * places)] - first, arrays[f"kept{i}"])


# --- change and attention ---------------------------------------------------------------------------------------------
def everest(params: Params, arrays: Arrays) -> None:
    method = make("everest")
    for x, dropped in zip(arrays["embeddings"], arrays["dropped"], strict=True):
        clip = film_of(x.unflatten(0, (params["temporal"], params["tokens_per_frame"])))
        count = method.official_count(1 - params["mcm_ratio"], len(x))
        assert count == params["kept"]
        same_set(kept_of(method.reduce(clip, torch.tensor([count]))), (~dropped).nonzero()[:, 0])


def evad(params: Params, arrays: Arrays) -> None:
    """The program has the key frame in front; here frames are in order, and the last but one half begins with it."""
    if params["enhanced_weight"] != 1:
        raise NotOffered("queries of the key frame that count more than once")
    frames, places = params["frames"], params["height"] * params["width"]
    key, method = frames // 2, make("evad")
    # program order to ours: frames before the key frame, it, those after it
    order = torch.cat([torch.arange(places, (key + 1) * places), torch.arange(places)])
    order = torch.cat([order, torch.arange((key + 1) * places, frames * places)])
    for attention, theirs in zip(arrays["attention"], arrays["idx"], strict=True):
        received = attention.mean(0)[order]
        clip = film_of(torch.zeros(frames, places, 1), received_attention=received.view(1, frames, places))
        count = method.official_count(params["keep_rate"], frames * places)
        kept = order[kept_of(method.reduce(clip, torch.tensor([count])))]
        assert count == places + params["kept_nonkey"] and int((kept < places).sum()) == places
        same_set(kept[kept >= places] - places, theirs)


# --- memory -----------------------------------------------------------------------------------------------------------
def streamdvc_kmeans(params: Params, arrays: Arrays) -> None:
    """The memory after every frame is that of the clip up to it, place by place, and so are its weights."""
    size, places = params["memory_tokens"], params["tokens_per_frame"]
    if params.get("no_momentum_in_memory"):
        raise NotOffered("a memory whose tokens weigh one each")
    begun = size // places
    method = make("streamdvc", iterations=params["iterations"])
    x, weight = torch.cat([arrays[f"frame{f}"] for f in range(begun)]), torch.ones(size).long()
    for i in range(begun, params["frames"]):
        clip = film_of(torch.stack([arrays[f"frame{f}"] for f in range(i + 1)]))
        made = method.reduce(clip, torch.tensor([size]))
        close(made.apply(clip.features)[0], arrays[f"mem{i}"])
        x, weight, *_ = take_up(x, weight, arrays[f"frame{i}"], params["iterations"])
        assert torch.equal(weight, arrays[f"w{i}"].long())


def streamdvc_adjacent(params: Params, arrays: Arrays) -> None:
    """Tokens of the memory that weigh more are made of copies: two that stand side by side merge before all others."""
    if not params["weighted"]:
        raise NotOffered("neighbours that merge without weights")
    tokens, weights = arrays["buffer"], arrays["weights"].tolist()
    size = len(tokens)
    # behind a token that weighs more stands its copy, and the one that was to be there comes when they have merged
    begin = [0] + [k if weights[k] > 1 else k + 1 for k in range(size - 1)]
    for k, weight in enumerate(weights):
        begin += [k] * (weight - 2) + [k + 1] if weight > 1 and k < size - 1 else [k] * (weight - 1)
    clip = film_of(torch.cat([tokens[begin], arrays["new"]])[:, None])
    made = make("streamdvc", neighbours=True).reduce(clip, torch.tensor([size]))
    close(made.apply(clip.features)[0], arrays["out"])
    assert made.links is not None and torch.equal(made.links.slot.bincount(), arrays["out_weights"].long())


# --- paths ------------------------------------------------------------------------------------------------------------
def free_video_llm(params: Params, arrays: Arrays) -> None:
    """One path at a time; of what flows together the program shows the larger value of each channel."""
    frames, places = arrays["features"].shape[:2]
    high, wide = params["roi_grid_hw"][0] * 2, params["roi_grid_hw"][1]
    cells = torch.cartesian_prod(torch.arange(frames), torch.arange(high), torch.arange(wide))
    clip = replace(
        film_of(arrays["features"]),
        grid=torch.tensor([[frames, high, wide]]),
        cells=cells[None],
        question=arrays["text"][None],
        question_valid=torch.ones(1, 1, dtype=torch.bool),
        signals={"patches": arrays["patch_embeds"][:, 1:].flatten(0, 1)[None]},
    )

    def shown(count: int, roi: float = 1.0, **options: object) -> tuple[list[int], Tensor]:
        method = make("free-video-llm", fast=0.0, roi=roi, clip="theirs", **options)
        links = method.reduce(clip, torch.tensor([count])).links
        kept, sizes = links.slot.unique_consecutive(return_counts=True)
        most = torch.segment_reduce(clip.features[0, links.source], "max", lengths=sizes)
        return (kept // places).unique().tolist(), most

    for name, options in (
        ("top3_frames", {"slow": params["num_textguided"], "middle": 0}),
        ("change_frames", {"slow": 0, "middle": params["num_change"], "change": True}),
    ):
        assert shown(len(arrays[name]) * places // 2, **options)[0] == arrays[name].tolist()
    close(shown(frames * places // 2, slow=frames)[1], arrays["pooled"][0])
    crop = arrays["roi_crop"][0]
    close(shown(len(crop), params["roi_ratio"], slow=frames)[1], crop)


# --- clips that join --------------------------------------------------------------------------------------------------
def tempme(params: Params, arrays: Arrays) -> None:
    """The step in which clips join: nothing has been merged within frames, and tokens stand for several already."""
    frames, (x, size) = params["cls_num"], (arrays["x"], arrays["size_in"][..., 0])
    # a class token of every frame stands in front, and takes no part
    x, size = x[:, frames:], size[:, frames:]
    places = x.shape[1]
    clip, frame = film_of(x), torch.arange(places) * frames // places
    cells = torch.stack([frame, torch.zeros_like(frame), torch.arange(places)], 1)[None]
    clip = replace(clip, grid=torch.tensor([[frames, 1, places]]), cells=cells)
    given = {"sizes": lambda self, tokens: size, "keeps": lambda self, lengths, left: lengths}
    made = make("tempme", given, joins=(frames,)).reduce(clip, torch.tensor([places - params["r"]]))
    ours = torch.cat([made.substitute(x), made.mass(size)[..., None]], 2)[made.kept]
    same_rows(ours, torch.cat([arrays["out"], arrays["size"]], 2)[0, frames:])


# --- segments ---------------------------------------------------------------------------------------------------------
def longvlm(params: Params, arrays: Arrays) -> None:
    """The program is told what to remove in each round, at most half; here it is given so."""
    x, removals = arrays["x"], []
    left = size = params["clips"] * x.shape[1]
    for wanted in params["r_merge_list"]:
        removals.append(min(wanted, left // 2))
        left -= removals[-1]
    method = make("longvlm", {"rounds": lambda *_: removals}, frames=params["clips"], heads=params["heads"])
    clip, segments = film_of(x), x.shape[0] // params["clips"]
    made = method.reduce(clip, torch.tensor([left * segments]))
    out, kept = made.substitute(clip.features)[0], made.kept[0]
    for i, theirs in enumerate(arrays["out"].unflatten(0, (segments, left))):
        mine = slice(i * size, (i + 1) * size)
        same_rows(out[mine][kept[mine]], theirs)


# --- cells ------------------------------------------------------------------------------------------------------------
def sttm(params: Params, arrays: Arrays) -> None:
    """Tokens in the order of their first places, the number of patches of each, and what becomes of rotary tables."""
    if params.get("pos_emb_weighted_avg"):
        raise NotOffered("rotary tables weighted by patches where features are not")
    video = arrays["video"].movedim(1, -1)
    frames, high, wide, width = video.shape
    clip = replace(film_of(video.flatten(1, 2)), grid=torch.tensor([[frames, high, wide]]))
    cells = [torch.arange(frames), torch.arange(high), torch.arange(wide)]
    clip = replace(clip, cells=torch.cartesian_prod(*cells)[None])
    method = make(
        "sttm",
        spatial=params["threshold"],
        # below zero it is off
        temporal=params["temporal_thresh"] if params["temporal_thresh"] >= 0 else 2.0,
        root=params["root_level"],
        weighted=params["weighted_avg"],
        heads=width // (params.get("head_dim") or width),
        single=params.get("slow_ver", False),
    )
    made = method.reduce(clip, torch.tensor([frames * high * wide]))
    box = arrays["tyxyx"].long()
    assert torch.equal(kept_of(made), (box[:, 0] * high + box[:, 1]) * wide + box[:, 2])
    assert torch.equal(made.mass()[made.kept].long(), arrays["num_patches"].long())
    close(made.apply(clip.features)[0], arrays["out"])
    for table in {"cos", "sin"} if "pos_cos" in arrays else ():
        close(made.apply(arrays[f"pos_{table}"].movedim(1, -1).flatten(0, 2)[None])[0], arrays[f"out_{table}"])


_VIDCOM2 = "token_compressor/vidcom2/vidcom2.py:vidcom2_compression"
_STC = "model/prune.py:STC_Pruner.compress, called chunk after chunk on one object"
_DVC = "scenic/projects/streaming_dvc/modeling/streaming_utils.py"
_EVAD = "projects/evad/models/vit_model.py:KTPAttention.forward"

# some vectors name the repository that their maker had open last
COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    ("xuyang-liu16/VidCom2", _VIDCOM2): vidcom2,
    ("Danielement321/HiPrune", _VIDCOM2): vidcom2,
    ("lern-to-write/STC", _STC): stc_pruner,
    ("youweiliang/evit", _STC): stc_pruner,
    ("sunilhoho/EVEREST", "modeling_finetune.py:mcm_step"): everest,
    ("youweiliang/evit", "modeling_finetune.py:mcm_step"): everest,
    ("MCG-NJU/EVAD", _EVAD): evad,
    ("youweiliang/evit", _EVAD): evad,
    (
        "google-research/scenic",
        f"{_DVC}:kmeans, called per frame on [memory; frame] with carried weights",
    ): streamdvc_kmeans,
    ("google-research/scenic", f"{_DVC}:adjacent_merge"): streamdvc_adjacent,
    (
        "contrastive/FreeVideoLLM",
        "free_video_llm/llava/model/llava_arch.py:{text_guided_frames,top_change_frames,"
        "temporal_aggregation(spatial_1d_max_pool),roi_crop}",
    ): free_video_llm,
    ("LunarShen/TempMe", "tvr/models/module_tome_merge.py:bipartite_soft_matching + merge_wavg"): tempme,
    ("ziplab/LongVLM", "longvlm/model/merge.py:merge_tokens"): longvlm,
    ("HYUNJS/STTM", "token_merging_utils/quadtree_builder.py:quadtree_build_video"): sttm,
}
