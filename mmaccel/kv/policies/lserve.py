"""LServe: pages are read by the best bound of their parts, and a choice serves several steps."""

import torch
from mmaccel_kernels.quest import page_bounds
from torch import Tensor
from torch.nn.functional import pad

from ...core.masks import suffix_sums
from ...method import KeyUnits, Picked, ReadStep, register
from ...method.sparse_read import best, keep_for
from .quest import Quest


@register
class LServe(Quest):
    """Pages of visual keys are read whose best part may hold the largest logits; a choice stays for several steps.

    *LServe: Efficient Long-sequence LLM Serving with Unified Sparse Attention*, MLSys 2025, arXiv 2502.14866.

    A page is rated by the largest of Quest's bounds (``quest``) of its ``parts``, so that pages may be large while bounds stay
    tight. The newest page is always read, and with it the best others within the budget. Every ``refresh`` steps a row chooses
    anew. In the program half of the heads read only the beginning and the newest keys at every step, which is found with
    weights of its own; here all heads choose pages.

    Parameters
    ----------
    page : consecutive visual keys that are read together. 64 as in the program.
    parts : of a page that have a bound each; 4 as in the program.
    refresh : steps that a choice serves; 4 as in the program. 1 chooses in every step.
    least : pages that are read whatever the budget is, the newest among them; 3 as in the program.
    layer : layers before this one read everything.
    reduce : how the query heads of a KV head agree on its pages: by the ``max`` of their bounds, or by the ``mean``.
    """

    name = "lserve"
    summary = "pages of visual keys with the largest bound of any of their parts; a choice serves several steps"
    paper = "arXiv 2502.14866"
    limits = {"parts": "[1, inf)", "refresh": "[1, inf)"}

    page: int = 64
    layer: float = 0
    parts: int = 4
    refresh: int = 4

    def summarise(self, units: KeyUnits) -> dict[str, Tensor]:
        """``bounds [B, Hkv, P parts, 2 D]``, see :class:`.quest.Quest`; and ``absent [B, 1 or Hkv, P, parts]`` uint8, 1 for
        parts without any key."""
        size = -(-self.page // self.parts)
        behind = size * self.parts - self.page
        there = pad(units.there, (0, behind), value=False).unflatten(3, (self.parts, size)).flatten(2, 3)
        keys = pad(units.keys, (0, 0, 0, behind)).unflatten(3, (self.parts, size)).flatten(2, 3)
        bounds = super().summarise(KeyUnits(keys, there, units.scaling))
        return {**bounds, "absent": (~there.any(3)).unflatten(2, (-1, self.parts)).byte()}

    def rate(self, step: ReadStep) -> Tensor:
        """``[B, Hkv, P]`` float32: the largest bound of any part; the newest page is rated highest."""
        bounds = page_bounds(step.query, step.summary["bounds"], self.reduce).unflatten(2, (-1, self.parts))
        ratings = bounds.masked_fill(step.summary["absent"].bool(), torch.finfo(bounds.dtype).min).amax(3)
        there = ~step.gone
        return ratings.masked_fill((suffix_sums(there.long()) == 1) & there, torch.inf)

    def pick(self, step: ReadStep) -> tuple[Picked, dict[str, Tensor]]:
        """The best pages, every ``refresh`` steps."""
        return keep_for(best(self.rate(step), step), step, self.refresh)


@register
class LeoAM(LServe):
    """Chunks of visual keys are read by the bounds of the parts below them, as a tree of two levels.

    *Breaking the Boundaries of Long-Context LLM Inference: Adaptive KV Management on a Single Commodity GPU* (LeoAM), arXiv
    2506.20187.

    A chunk is moved as a whole and found by abstracts of its parts, the smallest and the largest keys channel by channel, which
    stay on the device: with ``offload="host"`` a step reads abstracts there, and from the host the chunks that it chose. This
    is ``lserve`` whose choice is made in every step. The authors give layers chunks of different sizes, by how even their
    attention is, keep a third level on disk and compress what is moved; here all layers have chunks of one size.

    Parameters
    ----------
    page : consecutive visual keys that are read together.
    parts : of a chunk that have an abstract each.
    refresh : steps that a choice serves.
    least : chunks that are read whatever the budget is, the newest among them.
    layer : layers before this one read everything.
    reduce : how the query heads of a KV head agree on its chunks: by the ``max`` of their bounds, or by the ``mean``.
    """

    name = "leoam"
    summary = "chunks of visual keys in a tree of two levels, found by the bounds of their parts"
    paper = "arXiv 2506.20187"

    refresh: int = 1
