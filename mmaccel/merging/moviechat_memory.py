"""MovieChat's two memories: fragments consolidated into a long memory, the newest frames as they are in a short one."""

import torch
from torch import Tensor

from ..core.reduction import Links, Reduction
from ..errors import MmaccelError
from ..method import TokenBatch, register
from .film import Film
from .moviechat import MovieChat, consolidate


@register
class MovieChatMemory(MovieChat):
    """A question about the last frame of a clip: its long memory, its short memory and that frame.

    *MovieChat: From Dense Token to Sparse Memory for Long Video Understanding*, CVPR 2024, arXiv 2307.16449; its breakpoint
    mode.

    The frames before the last are cut into fragments of ``short`` frames, the last of which may be shorter. Each is
    consolidated to ``merge`` frames as in :class:`MovieChat`, and these are the long memory. The short memory is the frames of
    the last fragment as they were before that, so that they flow into two memories. Of ``count // P`` frames of ``P`` tokens
    one is the current frame; where that is not enough, first the oldest frames of the short memory go, then the oldest of the
    long one.

    A merged frame is in the place of its first frame, or of the first in its fragment that the short memory does not need, of
    which it leaves ``merge``. A budget below one frame, and pictures, are as in :class:`MovieChat`.

    ``variant="official"``: neighbours are compared by the mean of the dot products of all pairs of cells instead of cosines.

    Parameters
    ----------
    short : frames of a fragment, 18 as in the program.
    merge : frames that each leaves, 2 as in the program.

    Paper and program: the program adds a learned position to every frame of the memories and reads them by a Q-Former, neither
    of which the models here have; here kept tokens have positions of the language model.
    """

    name = "moviechat-memory"
    summary = "fragments of a clip merged to two frames each, then its newest frames and the last"
    conserves_mass = False

    short: int = 18
    merge: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.short < 1 or not 1 <= self.merge <= self.short:
            raise MmaccelError(
                f"moviechat-memory needs fragments of 1 frame or more that leave 1 to all of them, not {self.short} and "
                f"{self.merge}."
            )

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``cells [N, n, 3]``, ``count [N]`` -> both memories and the last frame of every clip."""
        film, consolidated = Film.of(tokens), super().reduce(tokens, count)
        kept, others = consolidated.kept.clone(), torch.ones_like(consolidated.kept[:, 0])
        parts = []
        for row, wanted in enumerate(count.tolist()):
            slots = film.slots[row, : int(tokens.grid[row, 0])]
            slots = slots[(slots >= 0).any(1)]
            frames = wanted // max(1, int((slots >= 0).any(0).sum()))
            if len(slots) < 2 or frames < 1 or wanted >= int(tokens.valid[row].sum()):
                continue
            x = tokens.features[row, slots.clamp(min=0)] * (slots >= 0)[..., None]
            flows, home, weight = (
                torch.tensor(part, device=slots.device) for part in zip(*self._flows(x, frames), strict=True)
            )
            onto, source = slots[home], slots[flows]
            held = (onto >= 0) & (source >= 0)
            others[row], kept[row] = False, False
            kept[row, onto[held]] = True
            batch = torch.full_like(onto[held], row)
            parts.append((batch, onto[held], source[held], weight[:, None].expand_as(held)[held]))
        links = consolidated.full_links()
        mine = others[links.batch]
        parts.append((links.batch[mine], links.slot[mine], links.source[mine], links.weight[mine].float()))
        batch, onto, source, weight = (torch.cat(part) for part in zip(*parts, strict=True))
        return Reduction(kept, tokens.valid, Links(batch, onto, source, weight).sorted(kept.shape[1]))

    def _flows(self, x: Tensor, frames: int) -> list[tuple[int, int, float]]:
        """Which frame of a clip ``x [T, P, D]`` flows into the place of which, and with what weight, if ``frames`` may stay."""
        last, room = len(x) - 1, frames - 1
        fragments = [range(start, min(start + self.short, last)) for start in range(0, last, self.short)]
        merged: list[list[tuple[int, float]]] = []
        for fragment in fragments:
            run, weight = consolidate(x[fragment.start : fragment.stop], min(self.merge, len(fragment)), self.official)
            groups: list[list[tuple[int, float]]] = [[] for _ in range(int(run.max()) + 1)]
            for frame, share, at in zip(fragment, weight.tolist(), run.tolist(), strict=True):
                groups[at].append((frame, share))
            merged += groups
        newest = fragments[-1]
        free = min(self.merge, len(newest))
        short = max(0, min(len(newest) - free, room - len(merged)))
        homes = [group[0][0] for group in merged]
        homes[-free:] = range(newest.start, newest.start + free) if short else homes[-free:]
        stays = list(zip(merged, homes, strict=True))[max(0, len(merged) - room) :] if room else []
        out = [(frame, home, weight) for group, home in stays for frame, weight in group]
        return [*out, *((frame, frame, 1.0) for frame in newest[len(newest) - short :]), (last, last, 1.0)]
