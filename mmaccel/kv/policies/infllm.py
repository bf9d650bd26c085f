"""InfLLM: frames are represented by the keys that were attended to most, and a question recalls those that answer it."""

from torch import Tensor

from ...method import RecallPolicy, register


@register
class InfLLM(RecallPolicy):
    """Frames beyond the window of a stream are parked, and a question recalls those with the most similar representatives.

    *InfLLM: Training-Free Long-Context Extrapolation for LLMs with an Efficient Context Memory*, NeurIPS 2024, arXiv
    2402.04617.

    Every query head has a vector of each frame: the mean of the ``representatives`` keys of the frame to which it paid most
    attention while the frame was read, without RoPE. The rating of a frame in a layer is ``<mean_q q, v>``, all query heads
    side by side, where queries stand at the far edge of the window, ``local - 1`` positions away. Every layer reads the best
    frames. ``rekv`` and ``em-llm`` grew from this.

    Parameters
    ----------
    frames : the program has 16 blocks of 128 tokens.
    representatives : keys of a frame that represent it, for every query head; 4 as in the program.
    local : the window, in positions; 4096 as in the program.
    while_reading : every stretch of new frames recalls earlier ones, as in the program.

    Paper and program: blocks have one size, here they are frames; attention counts while a key is in the window, here while its
    stretch is read. Recalled keys all stand at one position, here behind each other, as with ``rekv``. In a call without a
    session frames are rated by the attention of its last queries, with RoPE.
    """

    name = "infllm"
    summary = "frames whose most attended keys have the largest product with the question"
    paper = "arXiv 2402.04617"
    default_retain = 0.25
    weighs = True
    limits = {"representatives": "[1, inf)", "local": "[1, inf)"}

    frames: int = 16
    representatives: int = 4
    local: int = 4096
    while_reading: bool = True

    @property
    def distance(self) -> int:
        return self.local - 1

    def summarise(self, keys: Tensor, frame: Tensor, count: int, received: Tensor | None = None) -> Tensor:
        """``[count, Hkv, E]``: the vectors of the query heads of every KV head, side by side; 0 where a frame has no key."""
        assert received is not None
        heads, group = len(received), len(received) // len(keys)
        vectors = keys.new_zeros(count, heads, keys.shape[2])
        for number in range(count):
            at = (frame == number).nonzero()[:, 0]
            if len(at):
                paid = received[:, at].argsort(dim=1, descending=True, stable=True)[:, : self.representatives]
                mine = keys[:, at].repeat_interleave(group, dim=0)
                vectors[number] = mine.gather(1, paid[..., None].expand(-1, -1, mine.shape[2])).mean(1)
        return vectors.view(count, len(keys), -1)

    def rate(self, query: Tensor, frames: Tensor) -> Tensor:
        return frames.flatten(1) @ query.mean(1).flatten()
