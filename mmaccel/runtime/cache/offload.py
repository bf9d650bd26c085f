"""Keys and values in host memory: each layer is fetched while the layer before it computes, and parked when it has attended.
Layers of which a step reads few keys stay where they are."""

from __future__ import annotations

from torch import Tensor

from ...kv.cache import CacheState
from ...kv.head_groups import HeadStore, heads_at_once
from ..call.forward import Continuation, Forward
from ..call.runs import KeysToRead, LayerAttended, Run, TextInputs
from .eviction import CachePolicy
from .sparse_read import chosen_layers


class FetchKeys(Run):
    """Starts to copy each layer to its device while the layer before it computes; the first of all runs.

    by_heads : see :class:`mmaccel.kv.forward_info.ForwardInfo`.
    """

    by_piece = True

    def __init__(self, forward: Forward, state: CacheState) -> None:
        self.forward, self.state, self.by_heads = forward, state, False
        host = state.shared.host
        self.host = state.shared.host = host if isinstance(host, HeadStore) else HeadStore()

    def before_text(self, text: TextInputs) -> None:
        """Find the layers that are read where they are, and start with the first of the others."""
        plan, incoming = self.forward.plan, self.forward.incoming
        if plan.policy is not None and isinstance(self.forward, Continuation) and self.forward.length == 1:
            incoming.where_parked = chosen_layers(plan.policy.method, self.state.layers)
        incoming.by_heads = self.by_heads
        self.host.begin_forward()
        self.begin(0)

    def keys_to_read(self, layer: LayerAttended) -> KeysToRead | None:
        """Start with the layer that attends after this one; all keys are read."""
        self.host.moved.ahead += self.begin(layer.number + 1, attended=False)
        return None

    def begin(self, first: int, attended: bool = True) -> int:
        """Start with the next layer from ``first`` on, or with its first heads once the layer before it has ``attended``;
        returns how many bytes."""
        incoming = self.forward.incoming
        where = incoming.where_parked
        following = next((layer for layer in self.state.layers[first:] if layer.number not in where), None)
        if following is None:
            return 0
        heads = heads_at_once(following) if incoming.by_heads else None
        if heads is None:
            return self.host.begin(following)
        return self.host.begin_heads(following, heads) if attended else 0


class ParkKeys(Run):
    """Parks each layer when nothing is done with it any more; the last of all runs.

    expected_new_tokens : see :func:`mmaccel.kv.growable.append`.
    """

    by_piece = True

    def __init__(self, fetch: FetchKeys, policy: CachePolicy | None, expected_new_tokens: int | None) -> None:
        self.fetch, self.forward, self.state, self.host = fetch, fetch.forward, fetch.state, fetch.host
        self.policy, self.expected_new_tokens = policy, expected_new_tokens
        self._attended, self._left = 0, set[int]()

    def after_attention(self, layer: LayerAttended) -> None:
        """Park the layers that have attended and do not wait for others to be evicted from."""
        self._left.add(layer.number)
        self._attended += 1
        waiting = () if self.policy is None else self.policy.waiting
        for number in sorted(self._left.difference(waiting)):
            self._park(number)
        self._left.intersection_update(waiting)
        incoming = self.forward.incoming
        if incoming.by_heads:
            self.host.moved.ahead += self.fetch.begin(layer.number + 1)
        if layer.number in incoming.where_parked or (
            incoming.by_heads and heads_at_once(self.state.layers[layer.number])
        ):
            new = layer.query.shape[2]
            self.host.moved.written += _nbytes(layer.key[:, :, -new:], layer.value[:, :, -new:])
        if self._attended % len(self.forward.plan.family.attending) == 0:
            self.host.attended()

    def finish(self) -> None:
        """Park what the end of the forward has stored anew, and add the bytes that were moved to the statistics."""
        for layer in self.state.layers:
            self._park(layer.number)
        figures, moved = self.forward.stats.offload, self.host.moved
        for name, count in vars(moved).items():
            figures[name] = figures.get(name, 0) + count
        if isinstance(self.forward, Continuation):
            figures["in_steps"] = figures.get("in_steps", 0) + moved.total

    def _park(self, number: int) -> None:
        # of the piece at work, where the prompt is read in some
        following = self.state.shared.incoming.following if self.state.shared.incoming else 0
        expected = self.expected_new_tokens
        self.host.park(self.state.layers[number], expected if expected is None else expected + following, following)


def _nbytes(*tensors: Tensor) -> int:
    return sum(x.nbytes for x in tensors)
