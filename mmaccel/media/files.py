"""Load pictures and clips, and encode prompts about them as inputs of ``generate``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.Image import Image as PILImage

from ..errors import MmaccelError, UnsupportedError, first_line
from ..video import Clip, decode, spaced
from ..video.container import HEAD, KINDS, SUFFIXES, begins
from .picture import load_picture

#: of added tokens, those that stand for pixels or around them
_PIXELS = re.compile(r"[<\[].*(ima?ge?|video|vision|row_\d+_col_\d+)", re.IGNORECASE)


def load_media(paths: list[Path], frames: int, fps: float) -> tuple[list[Any], Clip | None]:
    """Load the pictures (PIL) and the clip among ``paths``; refuses several clips."""
    clips = [p for p in paths if moves(p)]
    if len(clips) > 1:
        raise MmaccelError(f"One video at a time, please; {clips[0]} and {clips[1]} are two.")
    pictures = [_picture(p) for p in paths if p not in clips]
    if not clips:
        return pictures, None
    return pictures, decode(clips[0], frames, folder_fps=fps)


def _picture(path: Path) -> PILImage:
    try:
        return load_picture(path)
    except MmaccelError:
        if path.is_file() and not is_media(path):
            raise MmaccelError(
                f"{str(path)!r} is neither a picture nor a video of a known format; convert it to png or mp4."
            ) from None
        raise


def moves(path: Path) -> bool:
    """Whether a path is a clip: a folder, a video, or an animated GIF.

    The first bytes of a file count, and its name only where those are of no known format.
    """
    if path.is_dir():
        return True
    kind = _begins(path)
    if kind == "gif":
        try:
            with Image.open(path) as picture:
                return bool(getattr(picture, "is_animated", False))
        except Exception:
            # a broken one; loading it as a picture says so
            return False
    return kind in KINDS or (kind is None and path.suffix.lower() in SUFFIXES)


def is_media(path: Path) -> bool:
    """Whether a path is a picture or a clip, by its first bytes or by its name."""
    return _begins(path) in ("gif", "picture") or moves(path) or path.suffix.lower() in Image.registered_extensions()


def _begins(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return begins(file.read(HEAD))
    except OSError:
        return None


@dataclasses.dataclass(frozen=True)
class Chat:
    """Messages as chat templates take them, ``{"role": ..., "content": [part, ...]}``, whose parts ``{"type": "image"}`` and
    ``{"type": "video"}`` are placeholders of the pictures and clips in their order; a picture is what
    :func:`~mmaccel.media.picture.load_picture` takes."""

    messages: tuple[dict[str, Any], ...]
    pictures: tuple[PILImage, ...] = ()
    clips: tuple[Clip, ...] = ()

    def words(self) -> Iterator[Any]:
        """The texts of all messages."""
        return (part["text"] for message in self.messages for part in message["content"] if part["type"] == "text")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One question about pictures or a clip, with ``earlier`` questions and answers about the same."""

    question: str
    pictures: tuple[PILImage, ...] = ()
    clip: Clip | None = None
    earlier: tuple[tuple[str, str], ...] = ()

    def chat(self) -> Chat:
        """The prompt as a chat, with pictures and clip before the first question."""
        shown = [{"type": "image"}] * len(self.pictures) + [{"type": "video"}] * (self.clip is not None)
        chat = []
        for question, answer in self.earlier:
            chat.append({"role": "user", "content": [*shown, {"type": "text", "text": question}]})
            chat.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
            shown = []
        chat.append({"role": "user", "content": [*shown, {"type": "text", "text": self.question}]})
        return Chat(tuple(chat), tuple(self.pictures), () if self.clip is None else (self.clip,))


def encode(processor: Any, prompts: Sequence[Prompt | Chat]) -> Any:
    """Encode a batch of prompts with equally many pictures and clips as inputs of ``generate``, padded on the left.

    Raises
    ------
    MmaccelError
        If a text is none, or holds a placeholder of pixels of this model, or a picture or clip is none, or the
        model's chat template does not take the messages, or its processor the sizes.
    UnsupportedError
        If there is a clip and the processor takes none, or rows must be padded and the tokenizer cannot.
    """
    chats = [prompt.chat() if isinstance(prompt, Prompt) else prompt for prompt in prompts]
    check_words(processor, [words for chat in chats for words in chat.words()])
    clips = [clip for chat in chats for clip in chat.clips]
    for clip in clips:
        if not isinstance(clip, Clip):
            raise MmaccelError(
                f"clip= takes a mmaccel.media.files.Clip, not {type(clip).__name__}; pictures go to pictures=."
            )
    if clips and getattr(processor, "video_processor", None) is None:
        raise UnsupportedError("This model takes no video; give it single frames as pictures.")
    texts = [_text(processor, chat) for chat in chats]
    bos = getattr(processor.tokenizer, "bos_token", None)
    options: dict[str, Any] = {}
    if bos and texts[0].startswith(bos):
        options["add_special_tokens"] = False
    if len(chats) > 1:
        if processor.tokenizer.pad_token is None:
            raise UnsupportedError(
                "The tokenizer has no padding token, so questions cannot be batched; ask one at a time."
            )
        options |= {"padding": True, "padding_side": "left"}
    given: dict[str, Any] = {"text_kwargs": options} if options else {}
    shown = [[load_picture(picture) for picture in chat.pictures] for chat in chats]
    if shown[0]:
        # GOT-OCR2 takes lists in a list for the pages of one prompt
        alone = type(processor).__name__ == "GotOcr2Processor" and all(len(pictures) == 1 for pictures in shown)
        given["images"] = [pictures[0] if alone else pictures for pictures in shown]
    if clips:
        given["videos"] = [[clip.frames for clip in chat.clips] for chat in chats]
        given["videos_kwargs"] = {"do_sample_frames": False, "video_metadata": [clip.metadata() for clip in clips]}
    try:
        return processor(text=texts, return_tensors="pt", **given)
    except MmaccelError:
        raise
    except (ValueError, ZeroDivisionError, RuntimeError) as error:
        # mostly of sizes that a processor does not take
        sizes = [picture.size for pictures in shown for picture in pictures]
        sizes += [(clip.frames.shape[2], clip.frames.shape[1]) for clip in clips]
        pixels = ", ".join(f"{width} x {height}" for width, height in dict.fromkeys(sizes))
        raise MmaccelError(
            f"The processor of this model does not take what is shown{f' ({pixels} pixels)' if pixels else ''}: "
            f"{first_line(error)[:300].rstrip('.')}."
        ) from error


def check_words(processor: Any, texts: Sequence[Any]) -> None:
    """Validate that ``texts`` are text without placeholders of pixels."""
    added = (token for token in processor.tokenizer.get_added_vocab() if _PIXELS.match(token))
    named = (getattr(processor, name, None) for name in ("image_token", "video_token"))
    pixels = sorted({token for token in (*added, *named) if token})
    for words in texts:
        if not isinstance(words, str):
            raise MmaccelError(f"A question is text, not {type(words).__name__}.")
        try:
            words.encode()
        except UnicodeEncodeError as error:
            raise MmaccelError(
                f"{error.object[error.start]!a} in the question is half a character; write the text in UTF-8."
            ) from None
        holder = next((token for token in pixels if token in words), None)
        if holder is not None:
            raise MmaccelError(
                f"The question holds {holder!r}, which is a placeholder of pixels for this model; write it in another way."
            )


def _text(processor: Any, chat: Chat) -> str:
    if getattr(processor, "chat_template", None) or getattr(processor.tokenizer, "chat_template", None):
        from jinja2 import TemplateError

        try:
            text: str = processor.apply_chat_template(list(chat.messages), add_generation_prompt=True, tokenize=False)
        except (TemplateError, TypeError) as error:
            raise MmaccelError(f"The chat template of this model does not take these messages: {error}") from None
        return text
    holders = {"image": "image_token", "video": "video_token"}
    names = {"user": "USER: ", "assistant": "ASSISTANT: "}
    # trained on tasks without turns, such as "caption en" or "answer en where is the cat"
    plain = type(processor).__name__ == "PaliGemmaProcessor"
    turns: list[str] = []
    for number, message in enumerate(chat.messages):
        shown = [getattr(processor, holders[part["type"]]) for part in message["content"] if part["type"] in holders]
        words = "".join(part["text"] for part in message["content"] if part["type"] == "text")
        if plain:
            turns.append("".join(shown) + words)
            continue
        lead = f"{' '.join(shown)}\n" if shown or (number == 0 and message["role"] == "user") else ""
        turns.append(f"{names.get(message['role'], '')}{lead}{words}")
    if plain:
        return "\n".join(turns)
    return " ".join([*turns, "ASSISTANT:"])


__all__ = ["Chat", "Clip", "Prompt", "encode", "is_media", "load_media", "moves", "spaced"]
