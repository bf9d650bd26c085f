"""Error responses: a status, and one sentence in OpenAI's format."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import MmaccelError
from ..model_lock import TimeLimitExceeded

#: characters of a sentence and of the name of a field, both of which may quote what a client sent
_SENTENCE, _NAME = 500, 200


class Refused(Exception):
    """A request that is refused with an HTTP ``status``, a ``code`` for programs, the ``parameter`` that is wrong,
    and further ``headers``. A ``sentence`` that quotes what a client sent is cut; what cannot be encoded is escaped."""

    def __init__(
        self,
        status: int,
        sentence: str,
        code: str | None = None,
        parameter: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(_line(sentence, _SENTENCE))
        self.status, self.code, self.headers = status, code, headers or {}
        self.parameter = None if parameter is None else _line(parameter, _NAME)

    def body(self) -> dict[str, Any]:
        """The body of the response, as OpenAI's clients read it."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {"error": {"message": str(self), "type": kind, "param": self.parameter, "code": self.code}}


def _line(text: str, most: int) -> str:
    return " ".join(text[:most].encode(errors="backslashreplace").decode().split())


def refusal(error: BaseException) -> Refused | None:
    """The refusal for an error that ended a request; None for an unexpected error."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, TimeLimitExceeded):
        return Refused(400, str(error), "time_limit")
    if isinstance(error, MmaccelError):
        return Refused(400, str(error))
    if isinstance(error, torch.OutOfMemoryError):
        return Refused(
            503, "The device ran out of memory; show fewer or smaller pictures, or ask for a smaller budget.", "memory"
        )
    return None
