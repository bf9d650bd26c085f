"""A model that the caller has loaded, as the value of an option."""

from __future__ import annotations

from typing import Any


class Loaded:
    """``model`` as the value of an option: it stays the caller's, is never copied with a recipe, and has no JSON.

    Examples
    --------
    >>> Loaded(model)
    <LlavaForConditionalGeneration>
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    @staticmethod
    def of(value: Any) -> Any:
        """``value``, inside one of these if it is a model."""
        # recipes are made without torch
        return Loaded(value) if hasattr(value, "named_parameters") else value

    def __repr__(self) -> str:
        return f"<{type(self.model).__name__}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Loaded) and other.model is self.model

    def __hash__(self) -> int:
        return id(self.model)

    def __deepcopy__(self, memo: Any) -> Loaded:
        return self
