"""StreamingTOM's causal reduction: every frame keeps equally many tokens, shared by what changed and what did not."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..core.reduction import Reduction
from ..method import ProjectorMethod, Tap, TokenBatch, register
from ..method.density_peaks import centres, density_peaks, nearest_centre
from .film import Clip, Film, Flat, by_clip, joined, share, spare_newlines, themselves


@register
class StreamingTOMReduction(ProjectorMethod):
    """Keep the most salient of the tokens that changed since the last frame, and cluster centres of the others.

    *StreamingTOM: Streaming Token Compression for Efficient Video Understanding*, arXiv 2510.18269; its causal temporal
    reduction, which looks at one earlier frame. The memory of a stream behind it is ``VideoSession(recall="streamingtom")``.

    A token is static where its cosine with the same place of the frame before is above ``similar``; in the first frame none
    is. Of a frame's budget ``G``, ``int(G static / all)`` are for the static tokens and the rest for the others, as far as
    there are so many. Of the others those with the highest attention in the vision tower stay as they are. The static ones are
    clustered around density peaks (see ``prunevid-merge``), and a peak becomes
    ``blend peak + (1 - blend) mean of the others in its cluster``. The budget of a clip is shared by its frames by size; if it
    has less than a token a frame, neighbouring frames are one. Newlines are dropped.

    Parameters
    ----------
    similar, neighbours, blend : threshold, neighbours of the density, and the weight of a peak, as in the paper's settings.

    Paper and program: the saliency is that of the authors' tower; here the attention received in the layer whose output the
    language model reads. The program adds noise to the density; here the lower slot of equally dense tokens counts as denser.

    ``variant="official"``: peaks are far from any token that is *less* dense, by a comparison the wrong way round.
    """

    name = "streamingtom-ctr"
    summary = "of every frame the salient tokens that changed, and cluster centres of the others"
    paper = "arXiv 2510.18269"
    unit = "picture"
    default_retain = 0.25
    limits = {"similar": "[-1, 1]", "neighbours": "[1, inf)", "blend": "[0, 1]"}

    similar: float = 0.9
    neighbours: int = 5
    blend: float = 0.7

    def taps(self) -> tuple[Tap, ...]:
        return (Tap("received_attention"),)

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``received_attention [N, 1, n]``, ``count [N]`` -> links of every clip."""
        salient = tokens.signals["received_attention"].float().sum(1)
        before = Film.of(tokens).same_cell(tokens.cells[..., 0] - 1)
        unit = normalize(tokens.features.float(), dim=-1)
        cosine = (unit * unit.gather(1, before.clamp(min=0)[..., None].expand_as(unit))).sum(-1)
        static = (before >= 0) & (cosine > self.similar)

        def links(clip: Clip) -> Flat:
            frame = torch.arange(len(clip.valid), device=clip.valid.device)[:, None].expand_as(clip.valid)
            part, kept = share(frame.masked_fill(~clip.valid, -1).reshape(1, -1), torch.tensor([clip.count]))
            at, still = clip.slots.flatten(), static[clip.row, clip.slots].flatten()
            return joined(
                self._frame(
                    cells, still[cells], tokens.features[clip.row, at[cells]], salient[clip.row, at[cells]], budget
                )
                for number, budget in enumerate(kept[0].tolist())
                if len(cells := (part[0] == number).nonzero()[:, 0]) and budget
            )

        return by_clip(tokens, count, links).keeping(spare_newlines(tokens, count))

    def _frame(self, cells: Tensor, static: Tensor, x: Tensor, salient: Tensor, budget: int) -> Flat:
        """The links of one frame: ``cells [m]``, of which ``static [m]`` did not change, features ``x [m, D]``, and saliency
        ``salient [m]``."""
        number, size = int(static.sum()), len(cells)
        still = max(budget - (size - number), min(number, budget * number // size))
        moving = cells[~static]
        best = salient[~static].argsort(descending=True, stable=True)[: budget - still]
        parts = [themselves(moving[best])]
        if still:
            own, seen = cells[static], x[static][None]
            every = torch.ones_like(own, dtype=torch.bool)[None]
            peaks = centres(density_peaks(seen, every, self.neighbours, sparser=self.official), still)
            home = nearest_centre(seen, peaks)[0]
            others = torch.bincount(home, minlength=still) - 1
            peak = torch.zeros_like(own, dtype=torch.bool).index_fill(0, peaks[0], True)
            weight = torch.where(peak, self.blend, (1 - self.blend) / others[home].clamp(min=1))
            weight = torch.where(others[home] == 0, 1.0, weight)
            parts.append((own[peaks[0]][home], own, weight))
        return joined(parts)
