"""Tensors that grow by a few tokens at a time: room behind them, so that a step does not copy what is there."""

import torch
from torch import Tensor

#: room is made for one token in 32 that are stored, so that a step copies 33 on average, but for so many at least
SHARE, LEAST = 32, 8
#: the name by which a tensor knows the room that it is at the start of
ROOM = "mmaccel_room"


def append(stored: Tensor, new: Tensor, dim: int, expected_new_tokens: int | None = None, following: int = 0) -> Tensor:
    """``torch.cat([stored, new], dim)``, written behind ``stored`` where there is room; else copied, with room behind it for
    the tokens ``following`` and some more, ``expected_new_tokens`` together at most where that is known.

    Returns a view of a larger tensor, the only one that may be appended to in place: nothing that ``stored`` or another view
    shows changes. Appending to ``stored`` once more copies, and so does appending with gradients.
    """
    dim %= new.dim()
    if torch.is_grad_enabled() or not _same_but_length(stored, new, dim):
        return torch.cat([stored, new], dim=dim)
    length, more = stored.shape[dim], new.shape[dim]
    # not by :func:`claimed`: a step is here twice a layer
    room = stored.__dict__.pop(ROOM, None)
    if room is None or room.shape[dim] < length + more or _is_frozen(room):
        spare = spare_room(length + more, expected_new_tokens, following)
        room = new.new_empty([n + length + spare if axis == dim else n for axis, n in enumerate(new.shape)])
        grown = torch.cat([stored, new], dim=dim, out=room.narrow(dim, 0, length + more))
    else:
        room.narrow(dim, length, more).copy_(new)
        grown = room.narrow(dim, 0, length + more)
    grown.__dict__[ROOM] = room
    return grown


def claimed(stored: Tensor, dim: int, length: int) -> Tensor | None:
    """The room that ``stored`` is at the start of, if it has ``length`` places and can be written to. It goes from one owner to
    the next: ``stored`` has none any more."""
    room: Tensor | None = vars(stored).pop(ROOM, None)
    return None if room is None or room.shape[dim] < length or _is_frozen(room) else room


def spare_room(length: int, expected_new_tokens: int | None, following: int = 0) -> int:
    """Places of room behind ``length`` tokens: for the tokens ``following``, which come for certain, and for some more, at most
    ``expected_new_tokens`` together where that is known."""
    spare = following + max(LEAST, (length + following) // SHARE)
    return spare if expected_new_tokens is None else min(spare, expected_new_tokens)


def room_of(x: Tensor) -> Tensor:
    """The room that a tensor is at the start of; the tensor itself where it has none."""
    room: Tensor = vars(x).get(ROOM, x)
    return room


def _is_frozen(x: Tensor) -> bool:
    """Whether a tensor was made in inference mode, and cannot be written to now."""
    return x.is_inference() and not torch.is_inference_mode_enabled()


def _same_but_length(stored: Tensor, new: Tensor, dim: int) -> bool:
    """Whether two tensors differ in nothing but their length; for others ``torch.cat`` raises the error."""
    a, b = stored.shape, new.shape
    same = stored.dtype == new.dtype and stored.device == new.device
    return same and a[:dim] == b[:dim] and a[dim + 1 :] == b[dim + 1 :]


def trimmed(x: Tensor) -> Tensor:
    """``x`` without the room behind it; copied where some is left."""
    room = vars(x).pop(ROOM, None)
    return x if room is None or room.shape == x.shape else x.clone(memory_format=torch.contiguous_format)


def put(stored: Tensor, dim: int, width: int) -> Tensor:
    """A tensor of ``width`` along ``dim`` that begins with ``stored``, the one it is in already where that is as wide; what is
    behind it is finite."""
    dim %= stored.dim()
    length, room = stored.shape[dim], vars(stored).pop(ROOM, None)
    if room is None or room.shape[dim] != width or _is_frozen(room):
        room = stored.new_zeros([width if axis == dim else n for axis, n in enumerate(stored.shape)])
        room.narrow(dim, 0, length).copy_(stored)
    else:
        room.narrow(dim, length, width - length).zero_()
    return room


def shown(room: Tensor, dim: int, length: int) -> Tensor:
    """The first ``length`` along ``dim``; the rest is room behind them."""
    view = room.narrow(dim, 0, length)
    vars(view)[ROOM] = room
    return view
