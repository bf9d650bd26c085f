"""Pictures and clips from files, and prompts about them as inputs of ``generate``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.Image import Image as PILImage

from ..errors import MmaccelError, UnsupportedError
from ..video import Clip, decode, spaced
from .prepare import load_picture

#: of added tokens, those that stand for pixels or around them
_PIXELS = re.compile(r"[<\[].*(ima?ge?|video|vision|row_\d+_col_\d+)", re.IGNORECASE)
VIDEO_SUFFIXES = tuple(".mp4 .mov .mkv .webm .avi .m4v .mpg .mpeg .wmv .flv .ts .m2ts .ogv".split())


def load_media(paths: list[Path], frames: int, fps: float) -> tuple[list[Any], Clip | None]:
    """The pictures (PIL) and the clip among ``paths``.

    Raises
    ------
    MmaccelError
        If something is missing or broken, or there are several clips.
    """
    clips = [p for p in paths if _moves(p)]
    if len(clips) > 1:
        raise MmaccelError(f"One video at a time, please; {clips[0]} and {clips[1]} are two.")
    pictures = [load_picture(p) for p in paths if p not in clips]
    if not clips:
        return pictures, None
    return pictures, decode(clips[0], frames, folder_fps=fps)


def _moves(path: Path) -> bool:
    """Whether a path is a clip: a folder, a video by its name, or an animated GIF."""
    if path.suffix.lower() != ".gif":
        return path.is_dir() or path.suffix.lower() in VIDEO_SUFFIXES
    try:
        with Image.open(path) as picture:
            return bool(getattr(picture, "is_animated", False))
    except OSError:
        return False


def read_folder(folder: Path, count: int, fps: float) -> Clip:
    """At most ``count`` evenly spaced pictures of a folder as a clip; ``frame10`` comes after ``frame9``."""
    return decode(folder, count, folder_fps=fps)


def read_video(path: Path, count: int) -> Clip:
    """At most ``count`` evenly spaced frames of a video file; see :func:`mmaccel.video.decode`."""
    return decode(path, count)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One question about pictures or a clip, after the questions and answers of ``earlier`` turns about the same."""

    question: str
    pictures: tuple[PILImage, ...] = ()
    clip: Clip | None = None
    earlier: tuple[tuple[str, str], ...] = ()

    def messages(self) -> list[dict[str, Any]]:
        """As a chat; pictures and clip stand before the first question."""
        shown = [{"type": "image"}] * len(self.pictures) + [{"type": "video"}] * (self.clip is not None)
        chat = []
        for question, answer in self.earlier:
            chat.append({"role": "user", "content": [*shown, {"type": "text", "text": question}]})
            chat.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
            shown = []
        return [*chat, {"role": "user", "content": [*shown, {"type": "text", "text": self.question}]}]


def encode(processor: Any, prompts: Sequence[Prompt]) -> Any:
    """Inputs of ``generate`` for a batch of prompts with equally many pictures and clips, padded on the left.

    Raises
    ------
    MmaccelError
        If a question is no text, or holds what stands for pixels in prompts of this model, or a clip is none.
    UnsupportedError
        If there is a clip and the processor takes none, or rows must be padded and the tokenizer cannot.
    """
    for prompt in prompts:
        for words in (prompt.question, *(part for turn in prompt.earlier for part in turn)):
            check_words(processor, words)
        if not isinstance(prompt.clip, Clip | None):
            raise MmaccelError(
                f"clip= takes a mmaccel.media.files.Clip, not {type(prompt.clip).__name__}; pictures go to pictures=."
            )
    if any(p.clip is not None for p in prompts) and getattr(processor, "video_processor", None) is None:
        raise UnsupportedError("This model takes no video; give it single frames as pictures.")
    texts = [_text(processor, prompt) for prompt in prompts]
    bos = getattr(processor.tokenizer, "bos_token", None)
    options: dict[str, Any] = {}
    if bos and texts[0].startswith(bos):
        options["add_special_tokens"] = False
    if len(prompts) > 1:
        if processor.tokenizer.pad_token is None:
            raise UnsupportedError(
                "The tokenizer has no padding token, so questions cannot be batched; ask one at a time."
            )
        options |= {"padding": True, "padding_side": "left"}
    given: dict[str, Any] = {"text_kwargs": options} if options else {}
    if prompts[0].pictures:
        given["images"] = [list(prompt.pictures) for prompt in prompts]
    clips = [prompt.clip for prompt in prompts if prompt.clip is not None]
    if clips:
        given["videos"] = [[clip.frames] for clip in clips]
        given["videos_kwargs"] = {"do_sample_frames": False, "video_metadata": [clip.metadata() for clip in clips]}
    return processor(text=texts, return_tensors="pt", **given)


def check_words(processor: Any, words: Any) -> None:
    """See that ``words`` of a question are text which the processor does not take for pixels.

    Raises
    ------
    MmaccelError
        If they are not.
    """
    if not isinstance(words, str):
        raise MmaccelError(f"A question is text, not {type(words).__name__}.")
    try:
        words.encode()
    except UnicodeEncodeError as error:
        raise MmaccelError(
            f"{error.object[error.start]!a} in the question is half a character; write the text in UTF-8."
        ) from None
    added = (token for token in processor.tokenizer.get_added_vocab() if _PIXELS.match(token))
    named = (getattr(processor, name, None) for name in ("image_token", "video_token"))
    found = sorted({token for token in (*added, *named) if token and token in words})
    if found:
        raise MmaccelError(
            f"The question holds {found[0]!r}, which stands for pixels in prompts of this model; write it in another way."
        )


def _text(processor: Any, prompt: Prompt) -> str:
    if getattr(processor, "chat_template", None) or getattr(processor.tokenizer, "chat_template", None):
        text: str = processor.apply_chat_template(prompt.messages(), add_generation_prompt=True, tokenize=False)
        return text
    holders = [processor.image_token] * len(prompt.pictures) + ([processor.video_token] if prompt.clip else [])
    before = [f"USER: {question} ASSISTANT: {answer}" for question, answer in prompt.earlier]
    turns = [*before, f"USER: {prompt.question} ASSISTANT:"]
    return " ".join([f"USER: {' '.join(holders)}\n{turns[0].removeprefix('USER: ')}", *turns[1:]])


__all__ = ["VIDEO_SUFFIXES", "Clip", "Prompt", "encode", "load_media", "read_folder", "read_video", "spaced"]
