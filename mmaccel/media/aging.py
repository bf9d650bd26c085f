"""Old pictures of a conversation: a list of messages in which they are left out, for engines without budgets by age."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..core.budget import check_age, shares_by_age
from ..errors import MmaccelError

#: types of parts with a picture or clip, as OpenAI, Anthropic and transformers spell them
_SHOWN = frozenset(("image", "image_url", "input_image", "video", "video_url", "input_video"))


def age_pictures(
    messages: Sequence[Mapping[str, Any]],
    age: Sequence[float] = (1.0, 1.0, 0.0),
    *,
    age_step: int = 1,
    note: str | None = "[an earlier picture was removed]",
    shrink: Callable[[Mapping[str, Any], float], Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Leave old pictures and clips out of messages, by the same schedule as the option ``age`` of cache policies.

    Parameters
    ----------
    messages : of a chat; contents are texts or lists of parts, which may hold lists themselves, as results of tools do. They
        are not changed.
    age : the share of its tokens that a picture keeps, by its age: two or more numbers from 0 to 1 that never rise. The age is
        the number of newer pictures. 0 leaves a picture out; with other shares it stays, or ``shrink`` replaces it.
    age_step : pictures are counted in groups of this many, at least 1, and have the age of their group. What an engine has
        cached of a conversation is read again only when a new group begins.
    note : the text in place of a picture that is left out; None for nothing.
    shrink : gets the part with a picture and its share, if that is between 0 and 1; returns the part that replaces it, such as
        one with fewer pixels.

    Returns
    -------
    New messages.

    Raises
    ------
    MmaccelError
        If ``age`` or ``age_step`` is not allowed, or a message is not a mapping.

    Examples
    --------
    >>> shot = {"type": "image_url", "image_url": {"url": "data:..."}}
    >>> chat = [{"role": "user", "content": [shot]}, {"role": "user", "content": [shot]}]
    >>> [one["content"][0]["type"] for one in age_pictures(chat, (1.0, 0.0))]
    ['text', 'image_url']
    """
    shares = check_age(age)
    if not isinstance(age_step, int) or isinstance(age_step, bool) or age_step < 1:
        raise MmaccelError(f"`age_step` must be a whole number of at least 1, got {age_step!r:.40}.")
    for message in messages:
        if not isinstance(message, Mapping):
            raise MmaccelError(f"A message must be a mapping with a role and a content, got {type(message).__name__}.")
    left = iter(shares_by_age(sum(map(_count, messages)), shares, age_step))

    def aged(part: Any) -> Iterator[Any]:
        if not isinstance(part, Mapping):
            yield part
        elif part.get("type") in _SHOWN:
            share = next(left)
            if share:
                yield part if share == 1 or shrink is None else shrink(part, share)
            elif note is not None:
                yield {"type": "text", "text": note}
        elif isinstance(part.get("content"), list):
            yield {**part, "content": [one for inner in part["content"] for one in aged(inner)]}
        else:
            yield {**part}

    return [one for message in messages for one in aged(message)]


def _count(part: Any) -> int:
    """Pictures and clips in a message or a part."""
    if not isinstance(part, Mapping):
        return 0
    inner = part.get("content")
    return 1 if part.get("type") in _SHOWN else sum(map(_count, inner)) if isinstance(inner, list) else 0
