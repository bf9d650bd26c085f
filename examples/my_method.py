"""A method of your own in one file: keep the visual tokens with the largest norm.

    python examples/my_method.py

registers it and tries it on a tiny model with random weights.
"""

from torch import Tensor

import mmaccel
from mmaccel.core.reduction import Reduction
from mmaccel.method import ProjectorMethod, TokenBatch


@mmaccel.register
class LargestNorm(ProjectorMethod):
    """Rank visual tokens by the ``order``-norm of their features; the ``count`` highest of every segment stay."""

    name = "largest-norm"
    summary = "tokens with the largest norm"

    order: float = 2.0  # an option: accelerate_vlm(model, "largest-norm", order=1.0)

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``count [N]`` -> the highest; ties go to the lower slot."""
        score = tokens.features.float().norm(p=self.order, dim=-1)
        return Reduction.top(score, tokens.valid, count)


if __name__ == "__main__":
    from mmaccel.cli.selfcheck import build

    model, inputs = build("llava")
    mmaccel.accelerate_vlm(model, "largest-norm", retain=0.25)
    model.generate(**inputs, max_new_tokens=4)
    stats = model.mmaccel.stats()
    print(f"kept {stats['visual_tokens_kept']} of {stats['visual_tokens']} visual tokens")
