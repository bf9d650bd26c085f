"""One request, checked: what of OpenAI's chat completions is taken here, and ``mmaccel``, the budget of this request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from .body import parse
from .errors import Refused

#: pictures and clips of one request
PICTURES, CLIPS = 32, 8
#: messages of one request, and parts of all of them
MESSAGES, PARTS = 1024, 1024
#: stop sequences, and characters of one
STOPS, STOP = 4, 200
#: fields of an object that are looked at
_FIELDS = 64
#: fields that change no answer, whatever they hold
_IGNORED = (
    "metadata",
    "moderation",
    "parallel_tool_calls",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "reasoning_effort",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
    "verbosity",
)
#: fields that would change an answer, and the values with which they do not
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "web_search_options": (),
}


class _Given(BaseModel):
    """Fields without a meaning here are refused, and null is taken for not given."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    ignored: ClassVar[tuple[str, ...]] = ()
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _of_use(cls, given: Any) -> Any:
        """The fields that are left to be checked."""
        if not isinstance(given, Mapping):
            raise PydanticCustomError("no_object", "must be an object")
        if len(given) > _FIELDS:
            raise PydanticCustomError(
                "many_fields",
                "has {count} fields, more than there are; leave out those that are not known",
                {"count": len(given)},
            )
        for name, values in cls.neutral.items():
            if (value := given.get(name)) is not None and value not in values:
                raise PydanticCustomError("not_neutral", "not supported", {"name": name, "value": value})
        useless = {*cls.ignored, *cls.neutral}
        return {k: v for k, v in given.items() if v is not None and k not in useless}


def _restored(text: str, info: ValidationInfo) -> str:
    """A string that was cut out of the body."""
    found: str = (info.context or {}).get(text, text)
    return found


_String = Annotated[str, AfterValidator(_restored)]
#: of prompt caches, which are others' business
_CACHES = ("cache_control", "prompt_cache_breakpoint", "uuid")


class _Words(_Given):
    ignored = _CACHES
    type: Literal["text"]
    text: _String


class _Address(_Given):
    #: what the server sees by itself
    ignored = ("format", "mime_type")
    url: _String
    #: of OpenAI's own models; the processor and the recipe decide here
    detail: Literal["auto", "low", "high", "original"] = "auto"


def _address(given: Any) -> Any:
    return {"url": given} if isinstance(given, str) else given


class _Picture(_Given):
    ignored = _CACHES
    type: Literal["image_url"]
    image_url: Annotated[_Address, BeforeValidator(_address)]


class _Clip(_Given):
    ignored = _CACHES
    type: Literal["video_url"]
    video_url: Annotated[_Address, BeforeValidator(_address)]


def _at_most(most: int) -> BeforeValidator:
    """Refuses a longer list before any of its items is looked at."""

    def check(given: Any) -> Any:
        if isinstance(given, list) and len(given) > most:
            raise PydanticCustomError(
                "too_long", "has {count} items; at most {most} are taken", {"count": len(given), "most": most}
            )
        return given

    return BeforeValidator(check)


def _few_parts(messages: Any) -> Any:
    """Before any part is looked at: of many errors one is told, and all are made."""
    given = messages if isinstance(messages, list) else []
    contents = [one.get("content") for one in given if isinstance(one, dict)]
    count = sum(len(content) for content in contents if isinstance(content, list))
    if count > PARTS:
        raise PydanticCustomError(
            "too_long", "has {count} parts; at most {most} are taken", {"count": count, "most": PARTS}
        )
    return messages


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class _Message(_Given):
    ignored = (*_CACHES, "annotations", "provider_specific_fields")
    #: of answers, which clients send back as they came
    neutral = {"audio": (), "function_call": (), "refusal": ("",), "tool_calls": ([],)}
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[Annotated[_Words | _Picture | _Clip, Discriminator("type")]],
        Field(min_length=1),
        BeforeValidator(_parts),
    ]
    name: str | None = None


class _Streaming(_Given):
    ignored = ("include_obfuscation",)
    include_usage: bool = False


def _several(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


class Body(_Given):
    """The fields of a request."""

    ignored = _IGNORED
    neutral = _NEUTRAL
    model: str
    messages: Annotated[list[_Message], Field(min_length=1), BeforeValidator(_few_parts), _at_most(MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=STOP)]],
        _at_most(STOPS),
        BeforeValidator(_several),
    ] = []
    stream: bool = False
    stream_options: _Streaming = _Streaming()
    mmaccel: Any = None


@dataclass(frozen=True)
class Medium:
    """A picture (``image``) or clip (``video``) that a message shows, by its address."""

    kind: Literal["image", "video"]
    url: str


@dataclass(frozen=True)
class ChatRequest:
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


def read(text: bytes) -> ChatRequest:
    """The request in the body of a call.

    Raises
    ------
    Refused
        If it is none, or asks for what is not to be had here.
    """
    given, addresses = parse(text)
    try:
        body = Body.model_validate(given, context=addresses)
    except ValidationError as error:
        raise _refused(error) from None
    del given
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
    for count, most, what in (
        (sum(one.kind == "image" for one in media), PICTURES, "pictures"),
        (sum(one.kind == "video" for one in media), CLIPS, "clips"),
    ):
        if count > most:
            raise Refused(400, f"The request has {count} {what}; at most {most} are taken.", None, "messages")
    longest = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return ChatRequest(
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
    first = error.errors(include_url=False, include_input=False)[0]
    path, about, kind = list(first["loc"]), first.get("ctx", {}), first["type"]
    if path[2:3] == ["content"] and len(path) > 4:
        # behind the number of a part pydantic names the kind of it
        del path[4]
    if kind == "not_neutral":
        path.append(about["name"])
    where = ".".join(map(str, path)) or "The request"
    sentence = {
        "extra_forbidden": f"{where} is not known here; leave it out.",
        "missing": f"{where} is missing.",
        "union_tag_not_found": f"{where}.type is missing; it must be 'text', 'image_url' or 'video_url'.",
        "union_tag_invalid": f"{where}.type must be 'text', 'image_url' or 'video_url', not {about.get('tag', '')[:80]!r}.",
        "no_object": f"{where} must be an object.",
        "not_neutral": _unsupported(where, about),
        "too_long": f"{where} {first['msg']}.",
        "many_fields": f"{where} {first['msg']}.",
    }.get(kind, f"{where}: {first['msg'][:1].lower()}{first['msg'][1:].rstrip('.')}.")
    return Refused(400, sentence, None, where)


def _unsupported(where: str, about: Mapping[str, Any]) -> str:
    values = {**_NEUTRAL, **_Message.neutral}.get(about.get("name", ""), ())
    if not values:
        return f"{where} is not supported by this server; leave it out."
    return f"{where} must be {' or '.join(map(json.dumps, values))} on this server; leave it out."
