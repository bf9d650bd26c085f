"""The schema of a request: fields of OpenAI's chat completions, and ``mmaccel``, the budget and fallback of the request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeVar

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
#: frames of one request of a live stream
FRAMES = 64
#: stop sequences, and characters of one
STOPS, STOP = 4, 200
#: fields of an object
_FIELDS = 64
#: fields that change no answer, whatever they hold
_IGNORED = (
    *("metadata", "moderation", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_options"),
    *("prompt_cache_retention", "reasoning_effort", "safety_identifier", "service_tier", "store", "user", "verbosity"),
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


class _Strict(BaseModel):
    """Refuses unknown fields; null is the same as no field."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    ignored: ClassVar[tuple[str, ...]] = ()
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _fields(cls, given: Any) -> Any:
        """The fields that are left to be validated."""
        if not isinstance(given, Mapping):
            raise PydanticCustomError("no_object", "must be an object")
        if len(given) > _FIELDS:
            raise PydanticCustomError(
                "sentence_part",
                "has {count} fields, more than are known; leave out unknown ones",
                {"count": len(given)},
            )
        for name, values in cls.neutral.items():
            if (value := given.get(name)) is not None and value not in values:
                raise PydanticCustomError("not_neutral", "not supported", {"name": name, "value": value})
        unused = {*cls.ignored, *cls.neutral}
        return {k: v for k, v in given.items() if v is not None and k not in unused}


def _restored(text: str, info: ValidationInfo) -> str:
    """The string that a name in the body replaces, or the text itself."""
    addresses: Mapping[str, str] = info.context or {}
    return addresses.get(text, text)


_String = Annotated[str, AfterValidator(_restored)]
#: of prompt caches, which this server does not have
_CACHES = ("cache_control", "prompt_cache_breakpoint", "uuid")


class _Text(_Strict):
    ignored = _CACHES
    type: Literal["text"]
    text: _String


class _Address(_Strict):
    #: the server reads these from the file
    ignored = ("format", "mime_type")
    url: _String
    #: of OpenAI's own models; the processor and the recipe decide here
    detail: Literal["auto", "low", "high", "original"] = "auto"


_Url = Annotated[_Address, BeforeValidator(lambda given: {"url": given} if isinstance(given, str) else given)]


class _Medium(_Strict):
    ignored = _CACHES
    kind: ClassVar[str]

    @property
    def url(self) -> str:
        address: _Address = getattr(self, f"{self.kind}_url")
        return address.url


class Picture(_Medium):
    """A picture in a message."""

    kind = "image"
    type: Literal["image_url"]
    image_url: _Url


class Video(_Medium):
    """A clip in a message."""

    kind = "video"
    type: Literal["video_url"]
    video_url: _Url


def _too_long(count: int, most: int, what: str) -> PydanticCustomError:
    return PydanticCustomError(
        "sentence_part", "has {count} {what}; at most {most} are taken", {"count": count, "most": most, "what": what}
    )


def _at_most(most: int) -> BeforeValidator:
    """Refuses a longer list before its items are validated."""

    def check(given: Any) -> Any:
        if isinstance(given, list) and len(given) > most:
            raise _too_long(len(given), most, "items")
        return given

    return BeforeValidator(check)


def _few_parts(messages: Any) -> Any:
    """Refuses too many parts before they are validated, since every invalid one makes an error."""
    given = messages if isinstance(messages, list) else []
    contents = [one.get("content") for one in given if isinstance(one, dict)]
    count = sum(len(content) for content in contents if isinstance(content, list))
    if count > PARTS:
        raise _too_long(count, PARTS, "parts")
    return messages


class _Message(_Strict):
    ignored = (*_CACHES, "annotations", "provider_specific_fields")
    #: of answers, which clients send back as they came
    neutral = {"audio": (), "function_call": (), "refusal": ("",), "tool_calls": ([],)}
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[Annotated[_Text | Picture | Video, Discriminator("type")]],
        Field(min_length=1),
        BeforeValidator(lambda given: [{"type": "text", "text": given}] if isinstance(given, str) else given),
    ]
    name: str | None = None


def _answerable(messages: list[_Message]) -> list[_Message]:
    if messages[-1].role == "assistant":
        raise PydanticCustomError("sentence", "The last message is the assistant's; end with one of the user.")
    for kind, most, what in ((Picture, PICTURES, "pictures"), (Video, CLIPS, "clips")):
        count = sum(isinstance(part, kind) for message in messages for part in message.content)
        if count > most:
            raise PydanticCustomError(
                "sentence",
                "The request has {count} {what}; at most {most} are taken.",
                {"count": count, "what": what, "most": most},
            )
    return messages


class _Streaming(_Strict):
    ignored = ("include_obfuscation",)
    include_usage: bool = False


def _budget(given: Any) -> Any:
    if isinstance(given, bool) or (isinstance(given, dict) and given and set(given) <= {"retain", "fallback"}):
        if isinstance(given, bool) or isinstance(given.get("fallback", False), (bool, int, float)):
            return given
        raise PydanticCustomError(
            "sentence",
            "mmaccel.fallback must be a threshold such as 0.9, true or false; the server has further settings.",
        )
    raise PydanticCustomError(
        "sentence",
        "mmaccel takes the budget of this request and its fallback, such as {example}, or false for the bare model.",
        {"example": '{"retain": 0.1, "fallback": 0.9}'},
    )


class ChatRequest(_Strict):
    """A validated request. ``mmaccel`` is what ``generate(..., mmaccel=)`` takes."""

    ignored = _IGNORED
    neutral = _NEUTRAL
    model: str
    messages: Annotated[
        list[_Message],
        Field(min_length=1),
        BeforeValidator(_few_parts),
        _at_most(MESSAGES),
        AfterValidator(_answerable),
    ]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=STOP)]],
        _at_most(STOPS),
        BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
    ] = []
    stream: bool = False
    stream_options: _Streaming = _Streaming()
    mmaccel: Annotated[Any, AfterValidator(_budget)] = None

    @property
    def longest(self) -> int | None:
        """Tokens of the answer at most; None leaves it to the server."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @cached_property
    def media(self) -> tuple[Picture | Video, ...]:
        """The pictures and clips of all messages, in their order."""
        return tuple(part for message in self.messages for part in message.content if not isinstance(part, _Text))

    @cached_property
    def chat(self) -> tuple[dict[str, Any], ...]:
        """The messages as chat templates take them."""
        return tuple(
            {
                "role": "system" if message.role == "developer" else message.role,
                "content": [
                    {"type": "text", "text": part.text} if isinstance(part, _Text) else {"type": part.kind}
                    for part in message.content
                ],
            }
            for message in self.messages
        )


class OpenStream(_Strict):
    """Opening a live stream, see :class:`~mmaccel.VideoSession`."""

    recall: _String = "rekv"
    cap_tokens: int = 4096
    fps: Annotated[float, Field(strict=False)] = 1.0
    chunk: int = 8


class PushFrames(_Strict):
    """Frames of a stream: addresses of pictures."""

    frames: Annotated[list[_String], Field(min_length=1, max_length=FRAMES)]


class AskStream(_Strict):
    """A question about a stream. ``stream``: the answer comes as an event stream."""

    question: _String
    max_tokens: int | None = None
    stream: bool = False


R = TypeVar("R", ChatRequest, OpenStream, PushFrames, AskStream)


def read(text: bytes) -> ChatRequest:
    """The request in the body of a call. Raises Refused if it is not valid, or asks for what this server does not have."""
    return read_as(text, ChatRequest)


def read_as(text: bytes, kind: type[R]) -> R:
    """The same of another kind of request."""
    given, addresses = parse(text)
    try:
        return kind.model_validate(given, context=addresses)
    except ValidationError as error:
        raise _refused(error) from None


def _refused(error: ValidationError) -> Refused:
    """The first error, without what was sent."""
    first = error.errors(include_url=False, include_input=False)[0]
    path, about, kind = list(first["loc"]), first.get("ctx", {}), first["type"]
    if path[2:3] == ["content"] and len(path) > 4:
        # pydantic names the kind of a part after its number
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
        "not_neutral": f"{where} {_allowed(about.get('name', ''))}; leave it out.",
        "sentence_part": f"{where} {first['msg']}.",
        "sentence": first["msg"],
    }.get(kind, f"{where}: {first['msg'][:1].lower()}{first['msg'][1:].rstrip('.')}.")
    return Refused(400, sentence, None, where)


def _allowed(name: str) -> str:
    values = {**_NEUTRAL, **_Message.neutral}.get(name, ())
    return (
        f"must be {' or '.join(map(json.dumps, values))} on this server"
        if values
        else "is not supported by this server"
    )
