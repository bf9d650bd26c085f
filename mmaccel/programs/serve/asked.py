"""One request, checked: what of OpenAI's chat completions is taken here, and ``mmaccel``, the budget of this request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, ValidationError, model_validator

from ...errors import no_json, short_int
from .errors import Refused

#: pictures and clips of one request
PICTURES, CLIPS = 32, 8
#: stop sequences, and characters of one
STOPS, STOP = 4, 200


class _Given(BaseModel):
    """Fields without a meaning here are refused, and null is taken for not given."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {k: v for k, v in given.items() if v is not None} if isinstance(given, Mapping) else given


class _Words(_Given):
    type: Literal["text"]
    text: str


class _Address(_Given):
    url: str
    #: of OpenAI's own models; the processor and the recipe decide here
    detail: Literal["auto", "low", "high"] = "auto"


class _Picture(_Given):
    type: Literal["image_url"]
    image_url: _Address


class _Clip(_Given):
    type: Literal["video_url"]
    video_url: _Address


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class _Message(_Given):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[Annotated[_Words | _Picture | _Clip, Discriminator("type")]], Field(min_length=1), BeforeValidator(_parts)
    ]
    name: str | None = None


class _Streaming(_Given):
    include_usage: bool = False


def _several(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


class Body(_Given):
    """The fields of a request; those with one possible value are there because clients send them."""

    model: str
    messages: Annotated[list[_Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=STOP)]],
        Field(max_length=STOPS),
        BeforeValidator(_several),
    ] = []
    stream: bool = False
    stream_options: _Streaming = _Streaming()
    n: Literal[1] = 1
    frequency_penalty: Literal[0] = 0
    presence_penalty: Literal[0] = 0
    logprobs: Literal[False] = False
    user: str | None = None
    mmaccel: Any = None


@dataclass(frozen=True)
class Medium:
    """A picture (``image``) or clip (``video``) that a message shows, by its address."""

    kind: Literal["image", "video"]
    url: str


@dataclass(frozen=True)
class Asked:
    """A request.

    messages, media : the chat as templates take it, and what its parts ``image`` and ``video`` stand for, in their order.
    longest, temperature, top_p : None where the request leaves them to the model.
    budget : for ``generate(..., mmaccel=)``.
    usage : whether a stream ends with what was used.
    """

    model: str
    messages: tuple[dict[str, Any], ...]
    media: tuple[Medium, ...]
    longest: int | None
    temperature: float | None
    top_p: float | None
    seed: int | None
    stops: tuple[str, ...]
    stream: bool
    usage: bool
    budget: bool | Mapping[str, Any] | None


def read(text: bytes) -> Asked:
    """The request in the body of a call.

    Raises
    ------
    Refused
        If it is none, or asks for what is not to be had here.
    """
    try:
        body = Body.model_validate(json.loads(text, parse_int=short_int))
    except ValidationError as error:
        raise _refused(error) from None
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"The request is no valid JSON ({no_json(error)}).") from None
    media: list[Medium] = []
    messages = tuple(
        {
            "role": "system" if message.role == "developer" else message.role,
            "content": [_plain(part, media) for part in message.content],
        }
        for message in body.messages
    )
    if body.messages[-1].role == "assistant":
        raise Refused(
            400, "The last message is the assistant's; end with one of the user, which is answered.", None, "messages"
        )
    for kind, most, what in (("image", PICTURES, "pictures"), ("video", CLIPS, "clips")):
        if (count := sum(one.kind == kind for one in media)) > most:
            raise Refused(400, f"The request has {count} {what}; at most {most} are taken.", None, "messages")
    longest = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return Asked(
        body.model,
        messages,
        tuple(media),
        longest,
        body.temperature,
        body.top_p,
        body.seed,
        tuple(body.stop),
        body.stream,
        body.stream_options.include_usage,
        _budget(body.mmaccel),
    )


def _plain(part: _Words | _Picture | _Clip, media: list[Medium]) -> dict[str, Any]:
    """A part as chat templates take it; what it shows goes to ``media``."""
    if isinstance(part, _Words):
        return {"type": "text", "text": part.text}
    medium = Medium("image", part.image_url.url) if isinstance(part, _Picture) else Medium("video", part.video_url.url)
    media.append(medium)
    return {"type": medium.kind}


def _budget(given: Any) -> bool | Mapping[str, Any] | None:
    if given is None or isinstance(given, bool) or (isinstance(given, dict) and set(given) == {"retain"}):
        return given
    raise Refused(
        400,
        'mmaccel takes the budget of this request, such as {"retain": 0.1}, or false for the bare model.',
        None,
        "mmaccel",
    )


def _refused(error: ValidationError) -> Refused:
    """Its first complaint, without what was sent."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(map(str, first["loc"])) or "request"
    sentence = {
        "extra_forbidden": f"{where} is not known here; leave it out.",
        "missing": f"{where} is missing.",
    }.get(first["type"], f"{where}: {first['msg'][:1].lower()}{first['msg'][1:].rstrip('.')}.")
    return Refused(400, " ".join(sentence.split())[:500], None, where)
