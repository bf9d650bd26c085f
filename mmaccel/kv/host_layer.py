"""A cache layer whose keys and values may be in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..core.transformers_api import DynamicLayer
from .head_groups import heads_at_once
from .index import KeyIndex
from .packed_keys import PackedKeys
from .ragged import Ragged
from .shared import Shared
from .shared_prefix import SharedPrefix


class HostLayer(DynamicLayer):
    """One layer's keys and values, ``[B, Hkv, K, D]``, and before them those of heads that store different counts, or that rows
    share; on the device, or parked in host memory."""

    keys: Any
    values: Any
    #: whether it stores a latent and a part with RoPE of every token, in place of its keys and values
    latent = False
    packed: PackedKeys
    #: channels of the key that an indexer has of every token, which stands behind its value; 0 without one
    indexer = 0

    def __init__(self, shared: Shared, number: int) -> None:
        super().__init__()
        self.shared, self.number = shared, number
        self.ragged: Ragged | None = None
        self.prefix: SharedPrefix | None = None

    @property
    def index(self) -> KeyIndex:
        """Index of the stored keys."""
        raise NotImplementedError

    def stored(self) -> tuple[Tensor, Tensor]:
        """All keys and values as ``[B, Hkv, K, D]``."""
        raise NotImplementedError

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """As :meth:`stored`; of latents, what absorbed queries read: both parts as keys, and the latents as values."""
        return self.stored()

    def fetch(self) -> None:
        """Have keys and values on the device, if they are in host memory and this forward reads all of them."""
        host, incoming = self.shared.host, self.shared.incoming
        if host is None or (incoming is not None and self.number in incoming.where_parked):
            return
        if self.heads_at_once is None:
            host.fetch(self)

    def room_on_device(self, new: int, expected_new_tokens: int | None, following: int) -> int:
        """Have keys and values of a cache in host memory where ``new`` tokens are stored behind them; returns for how many of
        those ``following`` they need room there: the buffers of the host have it."""
        assert self.shared.host is not None
        self.fetch()
        if self.heads_at_once is not None:
            self.shared.host.make_room(self, new, expected_new_tokens, following)
        return 0

    @property
    def heads_at_once(self) -> int | None:
        """Number of heads that this forward reads together from host memory; None where it reads the whole layer."""
        incoming = self.shared.incoming
        return heads_at_once(self) if incoming is not None and incoming.by_heads else None

    def move(self, moved: Callable[[Tensor, int], Tensor]) -> None:
        """Replace every tensor of keys and values by what ``moved(x, dim)`` returns, which shows the same; ``x`` grows along
        its axis ``dim``. An index of heads, which is nearly one of this layer alone, is among them."""
        if not self.is_initialized:
            return
        self.keys, self.values = moved(self.keys, -2), moved(self.values, -2)
        if self.ragged is not None:
            self.ragged = self.ragged.moved(moved)
        if self.prefix is not None:
            self.prefix = self.prefix.moved(moved)
        if self.index.of_heads:
            self.index.move(moved)

    def _park(self) -> None:
        """Park what was stored anew, unless layers are attending, which park it then."""
        if (host := self.shared.host) is not None and not host.busy:
            host.park(self)
