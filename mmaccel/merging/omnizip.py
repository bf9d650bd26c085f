"""OmniZip: salient sounds stay, and the more of a chunk's sounds stay, the more of its frames do."""

from collections.abc import Sequence
from fractions import Fraction

import torch
from mmaccel_kernels.copies import first_copies, of_first
from torch import Tensor
from torch.nn.functional import normalize

from ..core.budget import apportion
from ..core.reduction import Links, Reduction, top_mask
from ..errors import UnsupportedError
from ..method import ModelFacts, ProjectorMethod, TokenBatch, register

#: a chunk whose sounds all go discards the first share of its tokens, and by the second less if they all stay
_MOST, _GUIDED = 0.75, 0.40
#: the least share that a chunk with sounds discards
_LEAST = 0.35
#: neighbours by which the density of a token is measured
_NEAR = 5


@register
class OmniZip(ProjectorMethod):
    """Prune the sounds of a prompt, and its frames by what stays of the sounds beside them.

    *OmniZip: Audio-Guided Dynamic Token Compression for Fast Omnimodal Large Language Models*, arXiv 2511.14582.

    1. A sound token scores the attention that it receives in the last layer of the sound tower (mean over heads and queries).
       The ``sounds`` share with the highest scores stays. Of the rest, ``anchors`` of all sound tokens stay at equal steps.
       Each other token belongs to the anchor of highest cosine; an anchor becomes the mean of itself and of the softmax mean of
       the ``members`` of its group that are most like any visual token (like the anchor, in a prompt without any).
    2. A chunk is a run of visual tokens, between which sounds or text stand; the first run of sounds guides the first chunk,
       and so on. A guided chunk of whose sounds the share ``p`` stays discards the share ``0.75 - 0.40 p``, between 0.35 and
       0.75, and any other ``1 - retain``.
    3. Even frames of a chunk keep density peaks: ``rho = exp(-mean of the 5 smallest d)``, ``d = 1 - cos``, times the distance
       to the nearest denser token. Odd frames keep the tokens that are least like those of the frame before at the same place.

    Pictures are chunks of one frame. Sounds have a budget of their own: ``retain`` counts visual tokens, and of these as many
    stay as it says; chunks share them in proportion to what step 2 leaves of each.

    ``variant="official"``: chunks keep what step 2 leaves. Only with more than two guided ones the shares of all but the lowest
    and the highest are scaled towards ``retain`` within their bounds, so that it can be missed; frames round down.

    Parameters
    ----------
    sounds : float from 0 to 1, default 0.7 as in the authors' evaluation (0.6 in their demo, 0.5 in their function).
    anchors : float from 0 to 1, default 0.05 as in their function.
    members : int, at least 0, default 3 as in their function; 0 for no anchors.

    Paper and program: an older file of the program groups four frames with 50 sounds; the newer one is followed. The share of
    frames is 0.4 in the evaluation (``default_retain``) and 0.3 in the demo.
    """

    name = "omnizip"
    summary = "Qwen-Omni: sounds by the attention they receive, and frames by what stays of the sounds beside them"
    paper = "arXiv 2511.14582"
    budget = "adaptive"
    unit = "row"
    needs_sounds = True
    default_retain = 0.4
    limits = {"sounds": "[0, 1]", "anchors": "[0, 1]", "members": "[0, inf)"}

    sounds: float = 0.7
    anchors: float = 0.05
    members: int = 3

    def check(self, family: ModelFacts) -> None:
        """Refuse models that hear nothing."""
        if not family.hears:
            raise UnsupportedError(
                f"{self.name} is guided by sounds, and {family.name} models hear none; use 'dycoke-ttm' or another method for "
                "clips."
            )

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``sound_attention [N, n]``, ``count [N]`` -> the sounds and visual tokens that stay."""
        return Reduction.stacked(
            [self._row(tokens.select(slice(i, i + 1)), int(k)) for i, k in enumerate(count.tolist())]
        )

    def _row(self, tokens: TokenBatch, count: int) -> Reduction:
        heard = tokens.valid & tokens.signals["sound_attention"].isfinite()
        sounds, chunks = (_runs(tokens.segment[0], of[0]) for of in (heard, tokens.celled & ~heard))
        kept, links = self._sounds(tokens, heard[0].nonzero()[:, 0], torch.cat([tokens.segment.new_zeros(0), *chunks]))
        shares = [float(kept[0, sound].float().mean()) for sound in sounds]
        left = self._left(count, [len(chunk) for chunk in chunks], shares)
        for chunk, share in zip(chunks, left, strict=True):
            kept[0, chunk[self._frames(tokens, chunk, share)]] = True
        return Reduction(kept, tokens.valid, links)

    # --- sounds -----------------------------------------------------------------------------------------------------
    def _sounds(self, tokens: TokenBatch, heard: Tensor, seen: Tensor) -> tuple[Tensor, Links | None]:
        """``[1, n]`` bool, which of the slots ``heard [a]`` stay, and what flows into the anchors among them; ``seen [v]`` are
        those of visual tokens."""
        kept = torch.zeros_like(tokens.valid)
        size = len(heard)
        if not size:
            return kept, None
        best = self._whole(self.sounds, size)
        of_sounds = torch.zeros_like(kept).index_fill(1, heard, True)
        kept = top_mask(tokens.signals["sound_attention"], of_sounds, kept.new_tensor([best], dtype=torch.long))
        rest = heard[~kept[0, heard]]
        number = self._whole(self.anchors, size) if self.members else 0
        if not number or not len(rest):
            return kept, None
        step = max(1, len(rest) // number)
        place = torch.arange(len(rest), device=rest.device)
        is_anchor = (place % step == 0) & (place // step < number)
        anchors, others = rest[is_anchor], rest[~is_anchor]
        kept = kept.index_fill(1, anchors, True)
        return kept, self._joined(tokens, anchors, others, seen)

    def _whole(self, share: float, size: int) -> int:
        """The share of ``size`` sound tokens as a whole number."""
        exact = Fraction(str(float(share))) * size
        return round(exact) if self.official else int(exact + Fraction(1, 2))

    def _joined(self, tokens: TokenBatch, anchors: Tensor, others: Tensor, seen: Tensor) -> Links | None:
        """The members of each group that flow into its anchor."""
        x = normalize(tokens.features[0].float(), dim=-1)
        like = x[others] @ x[anchors].T
        near, own = like.max(1) if len(others) else (like.new_zeros(0), others)
        value = (x[others] @ x[seen].T).amax(1) if len(seen) else near
        slots, sources, weights = [], [], []
        for group, anchor in enumerate(anchors):
            mine = (own == group).nonzero()[:, 0]
            if not len(mine):
                continue
            mine = mine[value[mine].argsort(descending=True, stable=True)[: self.members]]
            share = value[mine].softmax(0)
            slots.append(anchor.expand(len(mine) + 1))
            sources.append(torch.cat([anchor[None], others[mine]]))
            weights.append(torch.cat([share.new_full((1,), 0.5), share / 2]))
        if not slots:
            return None
        slot, source, weight = torch.cat(slots), torch.cat(sources), torch.cat(weights)
        return Links(torch.zeros_like(slot), slot, source, weight).sorted(tokens.valid.shape[1])

    # --- frames -----------------------------------------------------------------------------------------------------
    def _left(self, count: int, sizes: Sequence[int], kept: Sequence[float]) -> list[int | float]:
        """Tokens that stay of each chunk of so many, of ``count`` in all; in the authors' variant as a share of every frame.
        ``kept`` are the shares that stay of each run of sounds."""
        total, guided = sum(sizes), min(len(sizes), len(kept))
        away = 1 - count / total if total else 0.0
        shares = [min(max(_MOST - _GUIDED * one, _LEAST), _MOST) for one in kept[:guided]]
        if self.official:
            # of the unguided ones the discarded share is the budget's
            known = away * (total - sum(sizes[guided:]))
            shares = _towards(known, sizes[:guided], shares) if guided > 2 else shares
            return [1 - share for share in [*shares, *[away] * (len(sizes) - guided)]]
        weights = [size * (1 - share) for size, share in zip(sizes, [*shares, *[away] * len(sizes)], strict=False)]
        # of every chunk one stays
        more = apportion(max(0, count - len(sizes)), [size - 1 for size in sizes], weights)
        return [1 + one for one in more]

    def _frames(self, tokens: TokenBatch, chunk: Tensor, left: int | float) -> Tensor:
        """The tokens of ``chunk [m]`` that stay, ``[k]`` long, counted within it."""
        cells = tokens.cells[0, chunk]
        frame = cells[:, 0] - cells[:, 0].min()
        height, width = tokens.grid[0, 1:].tolist()
        shape = int(frame.max()) + 1, height * width
        at = frame * shape[1] + cells[:, 1] * width + cells[:, 2]
        x = normalize(tokens.features[0, chunk].float(), dim=-1)
        placed = x.new_zeros(shape[0] * shape[1], x.shape[1]).index_copy(0, at, x).view(*shape, -1)
        present = (
            torch.zeros(shape[0] * shape[1], dtype=torch.bool, device=x.device).index_fill(0, at, True).view(shape)
        )
        sizes = present.sum(1).tolist()
        if isinstance(left, float):
            counts = [int(round(size * left, 6)) for size in sizes]
            if not any(counts):
                counts[sizes.index(max(sizes))] = 1
        else:
            counts = apportion(left, sizes)
        score = torch.empty(shape, device=x.device)
        score[::2] = _peaks(placed[::2], present[::2])
        alike = (placed[1:] * placed[:-1]).sum(-1).masked_fill(~present[:-1], -1.0)
        # copies of a token are as much like the frame before, whatever rounding does
        score[1::2] = -alike[::2]
        chosen = top_mask(score, present, torch.tensor(counts, device=x.device))
        return chosen.flatten()[at].nonzero()[:, 0]


def _runs(run: Tensor, among: Tensor) -> list[Tensor]:
    """The slots of every ``run [n]``, of those ``among [n]`` bool, in ascending order."""
    return [((run == number) & among).nonzero()[:, 0] for number in run[among].unique().tolist()]


def _towards(target: float, sizes: Sequence[int], shares: Sequence[float]) -> list[float]:
    """Shares of chunks that discard ``target`` tokens in all, or nearly: the lowest and the highest stay, the others are
    scaled, and what is still missing is spread over their tokens, both within the bounds."""
    low, high = shares.index(min(shares)), shares.index(max(shares))
    free = [i for i in range(len(shares)) if i not in (low, high)]
    out = list(shares)

    def discarded() -> float:
        return sum(out[i] * sizes[i] for i in free)

    rest = target - sum(out[i] * sizes[i] for i in {low, high})
    if not free:
        return out
    if now := discarded():
        for i in free:
            out[i] = min(max(out[i] * rest / now, _LEAST), _MOST)
    more = (rest - discarded()) / sum(sizes[i] for i in free)
    for i in free:
        out[i] = min(max(out[i] + more, _LEAST), _MOST)
    return out


def _peaks(x: Tensor, valid: Tensor) -> Tensor:
    """How far every token of ``x [F, m, D]``, of length one, is a density peak of its frame, ``[F, m]``; ``valid [F, m]``."""
    first = first_copies(x, valid)
    place = torch.arange(x.shape[1], device=x.device)
    name = place.expand_as(valid) if first is None else first
    away = 1 - x @ x.mT
    # rounding must not make a distance depend on its direction, or a copy differ from its token
    away = torch.minimum(away, away.mT).masked_fill(name[:, :, None] == name[:, None], 0.0)
    both = valid[:, :, None] & valid[:, None]
    near = min(_NEAR, max(1, x.shape[1] - 1))
    others = away.masked_fill(~both | (place[:, None] == place), torch.inf)
    nearest = others.topk(near, dim=2, largest=False).values
    held = nearest.isfinite()
    mean = nearest.masked_fill(~held, 0.0).sum(2) / held.sum(2).clamp(min=1)
    rho = of_first((-mean).exp(), first)
    denser = (rho[:, None] > rho[:, :, None]) & valid[:, None]
    furthest = away.masked_fill(~both, 0.0).amax(2)
    delta = away.masked_fill(~denser, torch.inf).amin(2)
    return of_first(torch.where(delta.isfinite(), delta, furthest) * rho, first)
