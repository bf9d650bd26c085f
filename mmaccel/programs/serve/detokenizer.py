"""Tokens to text while an answer is generated: no half characters, no stop sequence, no blanks around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: what half a character is decoded to
_HALF = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Turns tokens into pieces of text, which together are the text of all tokens, stripped, up to the first of ``stops``.

    Tokens are decoded together with those before, since some tokenizers drop the blank of a token at the beginning of a text.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self.ids: list[int] = []
        #: whether a stop sequence came
        self.stopped = False
        self._text = ""
        self._shown = 0
        #: tokens from ``_before`` to ``_read`` are in the text and are decoded again with those behind
        self._before = self._read = 0

    def add(self, ids: Sequence[int]) -> str:
        """Take the next tokens; returns the text that is certain now and was not before."""
        self.ids += ids
        text = self._decode(self._before, None)
        if text.endswith(_HALF):
            return ""
        self._take(text)
        return self._visible(self._held())

    def end(self) -> str:
        """The rest of the text after the last token."""
        if self._read < len(self.ids):
            self._take(self._decode(self._before, None))
        return self._visible(0)

    @property
    def whole(self) -> str:
        """The text so far, stripped."""
        return self._text.strip()

    def _take(self, text: str) -> None:
        self._text += text[len(self._decode(self._before, self._read)) :]
        self._before, self._read = self._read, len(self.ids)
        stops = [at for at in map(self._text.find, self._stops) if at >= 0]
        if stops:
            self.stopped, self._text = True, self._text[: min(stops)]

    def _decode(self, begin: int, end: int | None) -> str:
        text: str = self._tokenizer.decode(self.ids[begin:end], skip_special_tokens=True)
        return text

    def _held(self) -> int:
        """How many characters at the end may be the beginning of a stop sequence."""
        if self.stopped:
            return 0
        return max((n for stop in self._stops for n in range(1, len(stop)) if self._text.endswith(stop[:n])), default=0)

    def _visible(self, held: int) -> str:
        whole = self._text[: len(self._text) - held].strip()
        piece, self._shown = whole[self._shown :], max(self._shown, len(whole))
        return piece
