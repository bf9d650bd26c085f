"""Sparse reads in a prompt that is read in pieces: each piece reads the best visual keys of those before it."""

from __future__ import annotations

from torch import Tensor

from ...kv.cache import CacheState
from ...kv.index import KeyIndex, to_device
from ...kv.sparse import Choices, LayerRead, SparseMemory
from ...method import ReadingPolicy
from ..call.forward import Forward
from ..call.plan import PlannedStage
from ..call.runs import KeysToRead, LayerAttended
from ..call.split_prefill import SplitPrefill
from .reading import ReadKeys
from .sparse_read import choose, first_layer, single_keys


class ReadByPiece(ReadKeys):
    """Every layer chooses the keys of earlier pieces that a piece reads, by the mean of its queries; all stay stored.

    The budget is that of the whole prompt, so that the first pieces read everything. A prompt of one piece reads everything.
    """

    by_piece = True

    def __init__(
        self, forward: Forward, stage: PlannedStage[ReadingPolicy], state: CacheState, split: SplitPrefill
    ) -> None:
        super().__init__(forward, stage, state)
        self.split = split
        #: what the piece at work chooses from, of layers that store the same keys
        self._choices: dict[tuple[int, int], Choices] = {}

    def keys_to_read(self, layer: LayerAttended) -> KeysToRead | None:
        """The keys that a layer reads in a piece of a prompt, or in a decode step."""
        piece, query, number = self.split.now, layer.query, layer.number
        if piece is None:
            return super().keys_to_read(layer)
        if not piece.begin or number < first_layer(self.reading, self.depth):
            return None
        with self.forward.measured("selection", query.device, [number]):
            choices = self._before(number, piece.begin, len(self.state.layers[number].index) - query.shape[2], query)
            if choices.everything:
                return None
            # padding asks for nothing
            real = to_device(piece.chosen >= 0, query.device)[:, None, :, None]
            mean = (query.float() * real).sum(2, keepdim=True) / real.sum(2, keepdim=True).clamp(min=1)
            asked = mean.to(query.dtype)
            chosen, _ = choose(self.reading, LayerRead(choices, {}, {}), None, asked, layer.key, layer.scaling)
        return KeysToRead(chosen)

    @property
    def pieces(self) -> int:
        """Number of pieces in which the prompt was read."""
        return max(1, len(self.split.pieces))

    def after_attention(self, layer: LayerAttended) -> None:
        """Note the keys of a prompt that was read to its end."""
        if self.split.now is None or self.split.now.last:
            super().after_attention(layer)

    def _before(self, number: int, begin: int, stored: int, query: Tensor) -> Choices:
        """What the piece that begins at slot ``begin`` of the prompt chooses from: the first ``stored`` slots of a layer."""
        index = self.state.layers[number].index
        if (begin, id(index)) not in self._choices:
            assert self.prompt is not None
            self._choices = {key: choices for key, choices in self._choices.items() if key[0] == begin}
            memory, tokens = self.state.shared.memory(SparseMemory), self.prompt.tokens
            count = tokens.of_layer(number, query.device).count
            if memory is not None:
                count = count + memory.count.to(count)
            visual = to_device(tokens.table[..., 0] >= 0, query.device)
            before = KeyIndex(index.index[..., :stored], index.padded, index.upto)
            self._choices[begin, id(index)] = single_keys(self.reading, before, visual, count)
        return self._choices[begin, id(index)]
