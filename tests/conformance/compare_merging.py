"""Merging and temporal methods against the authors' programs; see comparators.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from comparators import Arrays, Params, close, everything, in_tower, kept_of, same_rows, same_set
from harness import NotOffered, make, whole
from torch import Tensor
from torch.nn.functional import normalize

from mmaccel.core.reduction import Reduction
from mmaccel.encoders.pitome import energy
from mmaccel.merging.aim import halvings
from mmaccel.merging.prunevid import scenes_of
from mmaccel.merging.segments import changing_segments, static_segments
from mmaccel.method import TokenBatch


def film_of(frames: Tensor, **signals: Tensor) -> TokenBatch:
    """One clip ``[T, n, D]`` as a unit whose frames are single rows of cells; signals are ``[layers, T, n]``."""
    length, places = frames.shape[:2]
    cells = torch.cartesian_prod(torch.arange(length), torch.arange(1), torch.arange(places))
    return TokenBatch(
        features=frames.flatten(0, 1)[None],
        valid=torch.ones(1, length * places, dtype=torch.bool),
        cells=cells[None],
        grid=torch.tensor([[length, 1, places]]),
        segment=torch.zeros(1, length * places, dtype=torch.long),
        signals={name: value.flatten(1)[None] for name, value in signals.items()},
    )


# --- PiToMe -----------------------------------------------------------------------------------------------------------
def pitome(text: bool) -> Callable[[Params, Arrays], None]:
    """Outputs are compared as rows together with their sizes; the program's order is by energy."""

    def compare(params: Params, arrays: Arrays) -> None:
        metric, x = arrays["metric"], arrays["x"]
        protected = int(params["class_token"])
        present = metric.shape[1] - protected
        remove = math.floor(present - present * params["ratio"])
        assert params.get("r", remove) == remove
        if params.get("alpha", 1.0) != 1.0:
            raise NotOffered("another alpha of ELU than 1")
        matching = "text" if text else "bsm" if params.get("use_bsm_pitome") else "energy"
        method = make("pitome", margin=params["margin"], matching=matching)
        target = method.match(in_tower(metric, protected=protected), remove)
        made = Reduction.merge(target, everything(metric))
        out, mass = made.apply(x), made.mass()
        for row in range(len(x)):
            size = mass[row][made.kept[row]][:, None]
            same_rows(torch.cat([out[row], size], 1), torch.cat([arrays["out"][row], arrays["size"][row]], 1))
        if protected:
            close(out[:, 0], arrays["out"][:, 0])
        if "energy_check" in arrays:
            close(energy(metric[:, protected:], params["margin"]), arrays["energy_check"])

    return compare


# --- EViT -------------------------------------------------------------------------------------------------------------
def evit(params: Params, arrays: Arrays) -> None:
    """Attentive tokens exactly; the fused one is last in the program's output, and the attentive are in their order."""
    x, scores, count = arrays["x_after_attn"], arrays["cls_attn"], params["left_tokens"]
    (rows, patches), fuse = scores.shape, params["fuse_token"]
    assert count == math.ceil(params["keep_rate"] * patches)
    whole = torch.cat([torch.ones(rows, 1), scores], 1)
    seen, method = replace(in_tower(x, protected=1), cls_attention=whole), make("evit", fuse=fuse)
    target = method.match(seen, patches - count - int(fuse))
    weight = method.weigh(seen, target)
    slot = torch.arange(1 + patches)
    for row in range(rows):
        stays = target[row] == slot
        fused = int(torch.bincount(target[row], minlength=1 + patches).argmax()) if fuse else 0
        attentive = stays & (slot != fused) if fuse else stays
        same_set(attentive.nonzero()[1:, 0] - 1, arrays["idx"][row])
        out = torch.zeros_like(x[row]).index_add(0, target[row], weight[row, :, None] * x[row])
        order = torch.cat([torch.tensor([0]), arrays["idx"][row].long() + 1, torch.tensor([fused] * fuse).long()])
        close(out[order], arrays["out"][row])


# --- AIM --------------------------------------------------------------------------------------------------------------
def aim_merge(params: Params, arrays: Arrays) -> None:
    """The program's calls, each output as rows of its frame (its order is by similarity)."""
    x = arrays["x"]
    clip, (frames, places) = film_of(x), x.shape[:2]

    def compare(removals: list[int], theirs: Tensor) -> None:
        left = places - sum(removals)
        assert halvings(places, left) == removals
        made = make("aim-merge").reduce(clip, torch.tensor([frames * left]))
        merged = made.substitute(clip.features)[0].unflatten(0, (frames, places))
        for mine, kept, row in zip(merged, made.kept[0].view(frames, places), theirs, strict=True):
            same_rows(mine[kept], row)

    sequence = params["r_sequence"]
    assert len(sequence) == 2
    compare(sequence[:1], arrays["after_half"])
    compare(sequence, arrays["after_quarter"])
    if "single_r_fifth" in arrays:
        compare([params["r_single"]], arrays["single_r_fifth"])


# --- HoliTom ----------------------------------------------------------------------------------------------------------
def holitom(params: Params, arrays: Arrays) -> None:
    """Segments exactly, every segment's output as rows; in a grid, the newline behind every row with tokens too."""
    x, attention = arrays["tokens"], arrays["attn"]
    frames, places = attention.shape
    method = make(
        "holitom-merge",
        tau=params["tau"],
        contextual=params["D"],
        # the variable is tested against "0", which leaves beta in use
        beta=params["Beta"] if params["NO_BETA"] == "0" else None,
        neighbours=params["K"],
        longest=params["max_window_size"],
    )
    similar = torch.cosine_similarity(x[:-1], x[1:], dim=-1) > params["tau"]
    segments, saved = static_segments(similar, params["max_window_size"])
    assert segments == [tuple(pair) for pair in arrays["segments"].tolist()]
    assert saved == params["total_reduced"]

    clip = film_of(x, received_attention=attention[None])
    tries = [method.reduce(clip, torch.tensor([n])) for n in whole(params["retain_ratio"], frames * places)]
    size, start = int((arrays["out"] != arrays["newline"]).any(1).sum()), 0
    made = min(tries, key=lambda one: abs(int(one.kept.sum()) - size))
    out, slot = made.substitute(clip.features)[0], kept_of(made)
    for (first, last), length in zip(segments, arrays["segment_out_len"].tolist(), strict=True):
        kept = slot[(slot >= first * places) & (slot < (last + 1) * places)]
        ours = out[kept]
        theirs = arrays["out"][start : start + length]
        if params["mm_newline_position"] == "grid":
            newline = (theirs == arrays["newline"]).all(1)
            side = math.isqrt(places)
            assert int(newline.sum()) == (kept // side).unique().numel()
            # in a grid both are in the order of their places
            close(ours, theirs[~newline])
        same_rows(ours, theirs[(theirs != arrays["newline"]).any(1)])
        start += length
    assert start == len(arrays["out"])


# --- DyCoke -----------------------------------------------------------------------------------------------------------
def dycoke(params: Params, arrays: Arrays) -> None:
    length, places = params["num_frames"], params["num_tokens_per_frame"]
    if length <= 4:
        raise NotOffered("four frames or fewer, which the program refuses")
    keep = int((1 - params["merging_ratio"]) * places)
    assert keep == params["kept_per_pruned_frame"]
    clip = film_of(arrays["tokens"].unflatten(0, (length, places)))
    theirs = arrays["out_src_idx"]
    retain = (1 + 3 * (1 - params["merging_ratio"])) / 4
    assert make("dycoke-ttm").official_count(retain, length * places, (length, 1, places)) == len(theirs)
    made = make("dycoke-ttm").reduce(clip, torch.tensor([len(theirs)]))
    ours = made.kept[0].nonzero()[:, 0]
    same_set(ours, theirs)
    # theirs come out frame by frame, in ascending similarity
    close(made.apply(clip.features)[0], arrays["out"][theirs.argsort()])


# --- CenterCLIP -------------------------------------------------------------------------------------------------------
def centerclip(params: Params, arrays: Arrays) -> None:
    """Clusters exactly. Members of a cluster of two tie; here the lower slot wins, so their medoids come in front.

    ``torch.cdist`` takes a token for up to ``sqrt(4 eps) |x|`` away from itself, and in the program that decides between
    members whose sums of distances are closer: such a medoid may be another.
    """
    x = arrays["X"]
    if params["pre_norm"]:
        x = normalize(x, p=params["norm_p"], dim=-1)
    assert params["id_sort"]
    method = make("centerclip", frames=1, distance=params["distance"], iterations=params["iter_limit"])
    for tokens, medoids, cluster in zip(x, arrays["medoids"], arrays["assign"], strict=True):
        order = torch.ones(len(tokens)).index_fill(0, medoids, 0.0).argsort(stable=True)
        made = method.reduce(film_of(tokens[order][None]), torch.tensor([params["K"]]))
        mine = order[kept_of(made)]
        rounding = (4 * torch.finfo(torch.float32).eps) ** 0.5 * float(tokens.norm(dim=-1).max())
        exact = torch.cdist(tokens.double(), tokens.double(), compute_mode="donot_use_mm_for_euclid_dist")
        assert len(mine) == params["K"] == cluster[mine].unique().numel(), "a cluster has two medoids"
        for one in mine.tolist():
            their, members = int(medoids[cluster[one]]), cluster == cluster[one]
            apart = float(exact[one, members].sum() - exact[their, members].sum())
            assert one == their or abs(apart) <= rounding, f"medoid {one} in place of {their}, {apart} apart"
        # every token is nearest to the medoid of its cluster
        assert torch.equal(cluster[mine][exact[:, mine].argmin(1)], cluster)


# --- MovieChat --------------------------------------------------------------------------------------------------------
def moviechat(params: Params, arrays: Arrays) -> None:
    """Of every fragment the newest frames fill the short memory, which is consolidated when the fragment ends."""
    names = sorted((name for name in arrays if name.startswith("fragment")), key=lambda name: int(name[8:]))
    method, ours = make("moviechat"), []
    for name in names:
        frames = arrays[name][: params["n_frame"]][-params["short_memory_length"] :]
        clip = film_of(frames)
        made = method.reduce(clip, torch.tensor([params["short_memory_merge"] * frames.shape[1]]))
        ours.append(made.apply(clip.features)[0].unflatten(0, (-1, frames.shape[1])))
    close(torch.cat(ours), arrays["long_memory"])


def moviechat_memory(params: Params, arrays: Arrays) -> None:
    """Fragments, then the current frame; the positions that are added to every frame are the vector's."""
    names = sorted((name for name in arrays if name.startswith("frag")), key=lambda name: int(name[4:]))
    # of every fragment the newest of at most so many frames
    fragments = [arrays[name][: params["n_frame"]][-params["short_memory_length"] :] for name in names]
    long = len(fragments[0])
    if any(len(one) != long for one in fragments[:-1]) or len(fragments[-1]) > long:
        raise NotOffered("fragments of unequal lengths before the last; moviechat-memory cuts a clip into equal ones")
    frames = torch.cat([*fragments, arrays["current"]])
    slots, places = len(arrays["positions"]), frames.shape[1]
    clip = film_of(frames)
    method = make("moviechat-memory", short=long, merge=params["short_memory_merge"])
    ours = method.reduce(clip, torch.tensor([slots * places])).apply(clip.features)[0].unflatten(0, (-1, places))
    close(ours[: len(arrays["long_memory"])], arrays["long_memory"])
    close((ours + arrays["positions"][:, None]).flatten(0, 1), arrays["out"][0])


# --- FastVID ----------------------------------------------------------------------------------------------------------
def fastvid(params: Params, arrays: Arrays) -> None:
    length, places, first = params["frames"], params["tokens_per_frame"], params["video_start"]
    hidden, last = arrays["hidden"][0], first + length * places
    # the features of the tower's pooling head, which the models here do without
    method = make(
        "fastvid",
        {"frames": lambda self, x, there: arrays["frame_global"]},
        segments=params["DySeg_c"],
        tau=params["DySeg_tau"],
        merged=params["STPrune_d"],
        stride=params["DTM_p"],
        beta=params["DTM_beta"],
        query="all",
    )
    segments = changing_segments(arrays["frame_global"], params["DySeg_c"] - 1, params["DySeg_tau"])
    assert [end - start + 1 for start, end in segments] == arrays["segment_sizes"].tolist()
    clip = film_of(hidden[first:last].unflatten(0, (length, places)), received_attention=arrays["frame_attn"][None])
    count = method.official_count(params["retention_ratio"], length * places, (length, 1, places))
    made = method.reduce(clip, torch.tensor([count]))
    kept = torch.cat([torch.arange(first), first + kept_of(made), torch.arange(last, len(hidden))])
    same_set(kept, arrays["keep_idx"])
    close(torch.cat([hidden[:first], made.apply(clip.features)[0], hidden[last:]]), arrays["out"][0])


# --- PruneVid ---------------------------------------------------------------------------------------------------------
def prunevid(params: Params, arrays: Arrays) -> None:
    x = arrays["frames"]
    assert params["k_frames"] == params["k_spatial"]
    method = make(
        "prunevid-merge", tau=params["tau"], scenes=params["temporal_segment_ratio"], neighbours=params["k_frames"]
    )
    # clusters of frames alike, whatever their numbers
    ours = method._clusters(x.mean(1), max(1, int(len(x) * params["temporal_segment_ratio"])))
    theirs = arrays["frame_cluster"][0]
    assert torch.equal(ours[:, None] == ours, theirs[:, None] == theirs)
    scenes = scenes_of(ours.tolist())
    assert [last - first + 1 for first, last in scenes] == arrays["window_sizes"].tolist()
    clip, places, start = film_of(x), x.shape[1], 0
    tries = [method.reduce(clip, torch.tensor([n])) for n in whole(params["cluster_ratio"], len(x) * places)]
    made = min(tries, key=lambda one: abs(int(one.kept.sum()) - arrays["out"].shape[1]))
    merged, owner = made.substitute(clip.features)[0], made.owner()[0]
    for (first, last), static, dynamic in zip(
        scenes, arrays["static_sizes"].tolist(), arrays["dynamic_sizes"].tolist(), strict=True
    ):
        scene = slice(first * places, (last + 1) * places)
        found, times = owner[scene].unique(return_counts=True)
        # a cluster of static tokens has members in every frame of the scene
        frames = torch.stack(
            [(owner[first * places :][: (last + 1 - first) * places] == i).view(-1, places).any(1) for i in found]
        )
        still = frames.all(1) & (times % (last + 1 - first) == 0) & (last > first)
        assert int(still.sum()) == static and len(found) == static + dynamic
        if static:
            same_rows(merged[found[still]], arrays["out"][0, start : start + static])
        same_rows(merged[found[~still]], arrays["out"][0, start + static : start + static + dynamic])
        start += static + dynamic
    assert start == arrays["out"].shape[1]


# --- MustDrop ---------------------------------------------------------------------------------------------------------
def mustdrop_merge(params: Params, arrays: Arrays) -> None:
    hidden, theirs = arrays["hidden"], arrays["out"]
    side, (window, other) = math.isqrt(hidden.shape[1] - 1), params["window"]
    assert window == other and side % window == 0
    method = make("mustdrop-merge", threshold=params["threshold"], window=window)
    x = hidden[:, 1:]
    cells = torch.cartesian_prod(torch.arange(1), torch.arange(side), torch.arange(side))
    tokens = TokenBatch(
        features=x,
        valid=everything(x),
        cells=cells.expand(len(x), -1, -1),
        grid=torch.tensor([[1, side, side]]).expand(len(x), -1),
        segment=torch.zeros(x.shape[:2], dtype=torch.long),
        signals={"features": x[:, None]},
    )
    ceiling = torch.tensor([side**2]).expand(len(x))
    # all pictures of a batch merge as many windows as the one with fewest
    left = method.reduce(tokens, ceiling).kept.sum(1).amax().expand(len(x))
    ours = make("mustdrop-merge", threshold=2.0, window=window).reduce(tokens, left)
    if len(hidden) == 1:
        assert torch.equal(ours.owner(), method.reduce(tokens, ceiling).owner())
    mass = ours.mass()
    for row, merged in enumerate(ours.apply(x)):
        close(hidden[row, 0], theirs[row, 0])
        mine = torch.cat([merged, mass[row][ours.kept[row]][:, None]], 1)
        same_rows(mine, torch.cat([theirs[row, 1:], arrays["size"][row, 1:]], 1))
    # which tokens make which
    source = arrays["source"].reshape(len(hidden), theirs.shape[1], -1)[:, 1:, 1:]
    for row in range(len(hidden)):
        groups = {tuple(line.nonzero()[:, 0].tolist()) for line in source[row]}
        owner = ours.owner()[row]
        assert groups == {tuple((owner == slot).nonzero()[:, 0].tolist()) for slot in owner.unique().tolist()}


_AIM = "llava/model/token_merge.py:bipartite_soft_matching_merge (called as in llava_arch.py:get_2dPool)"
_EVIT = "evit.py:Attention.forward + Block.forward (mlp stubbed to 0, norms identity)"
_FASTVID = "fastvid_llavaonevision/LLaVA-NeXT/llava/model/language_model/modeling_qwen2.py"
_HOLITOM = "holitom/llava_arch.py:LlavaMetaForCausalLM_holitom"

COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    ("youweiliang/evit", _EVIT): evit,
    ("hchautran/PiToMe", "algo/pitome/merge.py:pitome_vision + merge_wavg"): pitome(text=False),
    ("hchautran/PiToMe", "algo/pitome/merge.py:pitome_text + merge_wavg"): pitome(text=True),
    ("LaVi-Lab/AIM", _AIM): aim_merge,
    ("cokeshao/HoliTom", f"{_HOLITOM}.{{select_static_windows,get_static_dynamic_features,holitom}}"): holitom,
    ("KD-TAO/DyCoke", "llava/model/llava_arch.py:dycole_ttm"): dycoke,
    ("mzhaoshuai/CenterCLIP", "modules/cluster/fast_kmeans.py:batch_fast_kmedoids_with_split"): centerclip,
    ("LunarShen/FastVID", f"{_FASTVID}:Qwen2Model.forward (FastVID block)"): fastvid,
    ("Visual-AI/PruneVid", "models/pllava/modeling_pllava.py:merge_frames_dynamic"): prunevid,
    (
        "liuting20/MustDrop",
        "llava/model/multimodal_encoder/local_merge.py:conditional_pooling + merge_wavg",
    ): mustdrop_merge,
    ("rese1f/MovieChat", "MovieChat/models/moviechat.py:MovieChat.encode_short_memory_frame"): moviechat,
    (
        "rese1f/MovieChat",
        "MovieChat/models/moviechat.py:encode_short_memory_frame, encode_long_video",
    ): moviechat_memory,
}
