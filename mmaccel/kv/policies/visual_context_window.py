"""Visual context window extension: slow frequencies of RoPE are interpolated, for more visual tokens than in training."""

import math

import torch
from torch import Tensor

from ...errors import MmaccelError, UnsupportedError
from ...method import KeyBatch, ModelFacts, Policy, register


@register
class VisualContextWindow(Policy):
    """All keys stay, and positions are scaled as if the model had been trained for more visual tokens.

    *Visual Context Window Extension: A New Perspective for Long Video Understanding*, arXiv 2409.20018; its positions. (Its
    pooling is ``progressive-pool``.)

    The window of visual tokens that a model knows is shorter than that of text. With ``s = factor``, a frequency of RoPE that
    turns ``r`` times in ``window`` positions is multiplied by ``g + (1 - g) / s``, where ``g`` rises from 0 at ``slow`` turns
    to 1 at ``fast`` ones, and queries and keys by ``0.1 ln(s) + 1``, as in YaRN (arXiv 2309.00071). Rows of which more than
    ``window`` visual tokens, or more tokens than the model has positions, reach the language model in the first prompt of a
    conversation are read so, text included, and all that follows; all others as by the bare model. Prompts may have ``factor``
    times as many positions as the model.

    It composes with recipes that reduce tokens before or inside the language model. Nothing is evicted, so it needs no budget.
    The paper leaves open which positions of text are scaled; a program was not published.

    Parameters
    ----------
    factor : the number of visual tokens that are wanted over ``window``; 4 is our choice, and 1 changes nothing.
    window : the visual tokens of a prompt in training, 6272 as of LLaVA-OneVision (32 frames of 196 tokens).
    slow, fast : turns, 1 and 32 as in YaRN.
    """

    name = "visual-context-window"
    summary = "more visual tokens than in training: slow frequencies of RoPE are interpolated; evicts nothing"
    paper = "arXiv 2409.20018"
    budget = "none"
    default_retain = None
    shared = True
    excludes = {
        "cache": "a recipe has at most one method at site 'cache'",
        "codec": "keys are stored at scaled positions, which codecs do not know",
    }
    limits = {"factor": "[1, inf)", "window": "[1, inf)", "slow": "(0, inf)", "fast": "(0, inf)"}

    factor: float = 4.0
    window: int = 6272
    slow: float = 1.0
    fast: float = 32.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scheduled:
            raise MmaccelError(f"{self.name} evicts nothing; leave out every, cap and age.")
        if self.fast <= self.slow:
            raise MmaccelError(f"`fast` of {self.name} must be greater than slow={self.slow:g}, got {self.fast:g}.")

    @property
    def stretch(self) -> float:  # type: ignore[override]
        """``factor``."""
        return self.factor

    @property
    def needs_whole_prompt(self) -> str | None:
        """None: every chunk is read at the same positions."""
        return None

    def check(self, family: ModelFacts) -> None:
        """Raise :class:`UnsupportedError` where RoPE has no frequencies, or several sets, or changes them itself."""
        super().check(family)
        if getattr(family, "model", None) is None:
            return
        text = getattr(family, "text", None)
        kind = (family.model.config.get_text_config().rope_parameters or {}).get("rope_type", "default")
        if not isinstance(getattr(getattr(text, "rotary_emb", None), "inv_freq", None), Tensor) or kind in (
            "dynamic",
            "longrope",
        ):
            raise UnsupportedError(
                f"{self.name} scales the frequencies of RoPE, and this {family.name} model has no single fixed set of them; "
                "leave it out, and show fewer pictures or frames."
            )

    def scaled(self, frequencies: Tensor) -> Tensor:
        """The ``frequencies [n]`` of RoPE, in radians a position, as scaled."""
        turns = self.window * frequencies / (2 * math.pi)
        stay = ((turns - self.slow) / (self.fast - self.slow)).clamp(0, 1)
        return frequencies * (stay + (1 - stay) / self.factor)

    @property
    def temperature(self) -> float:
        """The factor of queries and keys."""
        return 0.1 * math.log(self.factor) + 1

    def score(self, keys: KeyBatch) -> Tensor:
        """Zero for all keys: everything stays."""
        return torch.zeros(keys.keys.shape[:3], device=keys.keys.device)
