"""Named workloads as uint8 pixels, and inputs of a model from them.

:class:`ModelSubject` uses the processor of a model. A shape has none: :class:`ShapeSubject` resizes, normalises and cuts pixels
as a processor does, and writes as many placeholders as they make tokens.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ...errors import MmaccelError, UnsupportedError
from ...families import family_of
from ...families.tower import EncoderCall
from .shapes import END, IMAGE, START, VIDEO, WORDS, Shape

#: text tokens before and after pictures or clip
_BEFORE, _BEHIND = 16, 32
#: frames of a clip for each one that is shown, and frames a second
_FRAMES_EACH, _FPS = 4, 8
_TEXT = "the quick brown fox jumps over the lazy dog and reads what is written on a page of text".split()
#: ids that stand for text such as "Frame 3:" in front of a frame or a tile
_FRAME_TEXT, _TILE_TEXT = 64, 1024


@dataclass(frozen=True)
class Workload:
    """The media of one request.

    pictures : how many, square with ``side`` pixels on models as published; 0 for a clip.
    frames : how many are shown of a clip; 0 for pictures.
    tiled : whether the picture is as large as makes about 2,880 tokens, tiled where the model tiles.
    dots : an inch of a page of 8.5 by 11 inches, which is the picture; 0 if it is none.
    """

    pictures: int = 0
    frames: int = 0
    side: int = 336
    tiled: bool = False
    dots: int = 0


WORKLOADS: dict[str, Workload] = {
    "picture-336": Workload(pictures=1),
    "tiles-2880": Workload(pictures=1, tiled=True),
    "pictures-8": Workload(pictures=8),
    "video-32": Workload(frames=32),
    "video-128": Workload(frames=128),
    "video-512": Workload(frames=512),
}


def workload(name: str) -> Workload:
    """A workload by name; ``pictures-N`` may have any number of them, ``page-N`` any number of dots an inch. Raises
    MmaccelError if there is none; the message lists those that are."""
    if name not in WORKLOADS and (many := re.fullmatch(r"pictures-([1-9]\d{0,5})", name)):
        return Workload(pictures=int(many[1]))
    if dots := re.fullmatch(r"page-([1-9]\d{1,2})", name):
        return Workload(pictures=1, dots=int(dots[1]))
    if name not in WORKLOADS:
        raise MmaccelError(
            f"There is no workload {name!r}; known are {', '.join(WORKLOADS)}, and page-300 (dots an inch)."
        )
    return WORKLOADS[name]


class Subject(Protocol):
    """A model, and its inputs from pixels."""

    model: Any
    processor: Any
    #: whether there is a processor, which methods of site ``frames`` need
    prepares: bool

    def pixels(self, work: Workload) -> np.ndarray:
        """Pictures or frames ``[n, H, W, 3]`` uint8, as in files."""

    def inputs(self, work: Workload, pixels: Sequence[np.ndarray], processor: Any = None) -> dict[str, Tensor]:
        """Inputs of ``generate`` on the CPU for one request an array; ``processor`` may stand in for the model's own."""


def noise(count: int, height: int, width: int, clip: bool) -> np.ndarray:
    """Textures ``[count, H, W, 3]`` uint8; those of a clip wander, with a cut every 16 frames."""
    rng = np.random.default_rng(0)

    def texture() -> np.ndarray:
        coarse = rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
        return coarse.repeat(8, 0).repeat(8, 1)[:height, :width]

    if not clip:
        return np.stack([texture() for _ in range(count)])
    scenes = [texture() for _ in range(0, count, 16)]
    return np.stack([np.roll(scenes[at // 16], (at, 2 * at), (0, 1)) for at in range(count)])


def page(dots: int) -> np.ndarray:
    """A page ``[1, H, W, 3]`` uint8 of 8.5 by 11 inches at ``dots`` an inch: 12-point text, and an inch of white around."""
    from PIL import Image, ImageDraw, ImageFont

    height, width = 11 * dots, 17 * dots // 2
    made = Image.new("RGB", (width, height), "white")
    draw, random = ImageDraw.Draw(made), np.random.default_rng(0)
    font = ImageFont.load_default(dots / 6)
    inside = width - 2 * dots
    for top in range(dots, height - dots - dots // 4 + 1, max(1, dots // 4)):
        line = " ".join(random.choice(_TEXT, 20))
        while draw.textlength(line, font) > inside:
            line = line[: line.rindex(" ")]
        draw.text((dots, top), line, "black", font)
    return np.array(made)[None]


class ClipFile:
    """A clip in a temporary file; without PyAV there is none."""

    def __init__(self, frames: np.ndarray) -> None:
        self.count, self.path = len(frames), None
        try:
            import av
        except ImportError:
            return
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / "clip.mp4"
        with av.open(str(path), "w") as out:
            stream = out.add_stream("libx264", rate=_FPS, options={"preset": "ultrafast"})
            stream.height, stream.width = frames.shape[1:3]
            stream.pix_fmt = "yuv420p"
            for frame in frames.repeat(_FRAMES_EACH, 0):
                out.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            out.mux(stream.encode())
        self.path = path

    def decode(self) -> tuple[np.ndarray, float]:
        """The frames ``[T, H, W, 3]`` and the seconds it took."""
        from ...video import decode

        assert self.path is not None
        begin = time.perf_counter()
        frames = decode(self.path, self.count).frames
        return frames, time.perf_counter() - begin


# --- a model from the hub or a folder ---------------------------------------------------------------------------------
class ModelSubject:
    """A model with its processor."""

    prepares = True

    def __init__(self, model: Any, processor: Any) -> None:
        self.model, self.processor = model, processor

    def pixels(self, work: Workload) -> np.ndarray:
        """Pictures or frames; a tiled picture is 672 pixels wide."""
        if work.dots:
            return page(work.dots)
        side = 2 * work.side if work.tiled else work.side
        return noise(work.frames or work.pictures, side, side, bool(work.frames))

    def inputs(self, work: Workload, pixels: Sequence[np.ndarray], processor: Any = None) -> dict[str, Tensor]:
        """Inputs made by the processor. Raises UnsupportedError if the processor takes no video."""
        from PIL import Image

        from ...media.files import Prompt, encode
        from ...video import Clip

        prompts = []
        for given in pixels:
            if work.frames:
                clip = Clip(given, list(range(len(given))), len(given), _FPS / _FRAMES_EACH)
                prompts.append(Prompt("What happens here, and what changes?", clip=clip))
            else:
                prompts.append(Prompt("What do these show?", tuple(Image.fromarray(picture) for picture in given)))
        return dict(encode(processor or self.processor, prompts))


# --- a shape ----------------------------------------------------------------------------------------------------------
class Words:
    """The tokenizer of a shape, with a few ids for the text that introduces frames and tiles, by which some families group
    them."""

    all_special_ids = (0, 1, 2, IMAGE, VIDEO, START, END)

    def __init__(self, frame: str, tile: str) -> None:
        self.frame, self.tile = frame, tile

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        return "".join(
            self.tile.format(i - _TILE_TEXT + 1)
            if i >= _TILE_TEXT
            else self.frame.format(i - _FRAME_TEXT + 1)
            if i >= _FRAME_TEXT
            else "word "
            for i in ids
        )


@dataclass(frozen=True)
class Shown:
    """One request: ``runs`` of placeholders, each with the text token before it or None; the ``token`` of the placeholders; and
    ``tensors`` as of a processor, which a batch joins along the first axis."""

    runs: list[tuple[int | None, int]]
    token: int
    tensors: dict[str, Tensor]


class ShapeSubject:
    """A model of a known architecture with random weights."""

    prepares = False

    def __init__(self, model: Any, shape: Shape) -> None:
        self.model, self.shape = model, shape
        self.kind = family_of(model).name
        #: whether the tower packs patches of grids, which the model reads for positions
        self.packed = self.kind.startswith(("glm", "qwen"))
        self.processor: Any = None
        if self.kind == "internvl":
            self.processor = Words("Frame{}: <img>", "<img>")
        if self.kind in _SPLIT:
            self.processor = Words("Frame from 00:{:02d}:<fake_token_around_image><global-img>", "<row_1_col_{}>")
        self._show: Callable[[Workload, Tensor], Shown] = {
            "llava": self._square,
            "llava_next": self._anyres,
            "llava_onevision": self._anyres,
            "qwen2_vl": self._patches,
            "qwen2_5_vl": self._patches,
            "qwen3_vl": self._patches,
            "qwen3_vl_moe": self._patches,
            "glm4v": self._patches,
            "internvl": self._tiles,
            "smolvlm": self._tiles,
            "idefics3": self._tiles,
            "mistral3": self._rows,
            "pixtral": self._rows,
            "hunyuan_vl": self._raster,
        }[self.kind]

    def pixels(self, work: Workload) -> np.ndarray:
        """Pictures of the size of the workload, scaled for the small shapes; tiled pictures and frames of the model's size;
        pages as they are."""
        if work.dots:
            return page(work.dots)
        side = round(work.side * self.shape.scale)
        height, width = side, side
        if work.tiled and self.shape.cell:
            height, width = (side * self.shape.cell for side in _CELLS.get(self.kind, (48, 60)))
        elif work.tiled:
            height, width = _TILED.get(self.kind, (1, 1))
            height, width = height * (self.shape.tile or 0), width * (self.shape.tile or 0)
        elif work.frames:
            height = width = self.shape.frame or self.shape.tile or side
        count = 5 if work.tiled and self.kind == "llava" else work.frames or work.pictures
        return noise(count, height, width, bool(work.frames))

    def inputs(self, work: Workload, pixels: Sequence[np.ndarray], processor: Any = None) -> dict[str, Tensor]:
        """As a processor makes them. Raises UnsupportedError if it is a clip and the model takes none."""
        shown = [self._show(work, torch.from_numpy(given)) for given in pixels]
        ids = torch.tensor([self._prompt(one) for one in shown])
        inputs = {name: torch.cat([one.tensors[name] for one in shown]) for name in shown[0].tensors}
        inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.packed:
            inputs["mm_token_type_ids"] = ((ids == IMAGE) | (ids == VIDEO)).long() * (1 + ("video_grid_thw" in inputs))
        return inputs

    def _prompt(self, one: Shown) -> list[int]:
        ids = [1, *range(WORDS, WORDS + _BEFORE)]
        for text, count in one.runs:
            ids += [] if text is None else [text]
            run = [one.token] * count
            ids += [START, *run, END] if self.packed else run
        return ids + list(range(WORDS, WORDS + _BEHIND))

    def _tokens(self, modality: str, tensors: dict[str, Tensor]) -> list[int]:
        """The number of placeholders of each picture or clip, from the adapter of the family."""
        family = family_of(self.model)
        pictures = family.pictures(modality, EncoderCall(tensors), torch.empty(1, 0))  # type: ignore[arg-type]
        return [sum(len(tile) for tile in picture) for picture in pictures]

    def _whole_cells(self, raw: Tensor) -> tuple[int, int]:
        """The height and width nearest to those of pictures that are whole cells."""
        height, width = (max(1, round(side / self.shape.cell)) * self.shape.cell for side in raw.shape[1:3])
        return height, width

    # --- one way a kind of model ------------------------------------------------------------------------------
    def _square(self, work: Workload, raw: Tensor) -> Shown:
        """LLaVA 1.5: every picture is one square."""
        if work.frames:
            raise UnsupportedError("LLaVA 1.5 takes no video")
        side = self.shape.tile
        assert side is not None
        tokens = (side // self.model.config.vision_config.patch_size) ** 2
        return Shown([(None, tokens)] * len(raw), IMAGE, {"pixel_values": resized(raw, side, side)})

    def _anyres(self, work: Workload, raw: Tensor) -> Shown:
        """LLaVA-NeXT and LLaVA-OneVision: a base image and tiles; several pictures and frames are squares."""
        side = self.shape.tile
        assert side is not None
        if work.frames:
            if self.kind == "llava_next":
                raise UnsupportedError("LLaVA-NeXT takes no video")
            video = {"pixel_values_videos": resized(raw, side, side)[None]}
            return Shown([(None, n) for n in self._tokens("video", video)], VIDEO, video)
        from transformers.image_processing_utils import select_best_resolution

        height, width = raw.shape[1:3]
        plain = self.kind == "llava_onevision" and len(raw) > 1
        tiles = resized(raw, side, side)[:, None]
        if not plain:
            best = select_best_resolution((height, width), self.model.config.image_grid_pinpoints)
            inside = min(best[0] / height, best[1] / width)
            fit = resized(raw, round(height * inside), round(width * inside))
            rest = best[0] - fit.shape[2], best[1] - fit.shape[3]
            fit = functional.pad(fit, (rest[1] // 2, rest[1] - rest[1] // 2, rest[0] // 2, rest[0] - rest[0] // 2))
            cut = fit.unfold(2, side, side).unfold(3, side, side).permute(0, 2, 3, 1, 4, 5).flatten(1, 2)
            tiles = torch.cat([tiles, cut], 1)
        tensors = {"pixel_values": tiles, "image_sizes": torch.tensor([[height, width]] * len(raw))}
        if self.kind == "llava_onevision":
            tensors["batch_num_images"] = torch.tensor([len(raw)])
        return Shown([(None, n) for n in self._tokens("image", tensors)], IMAGE, tensors)

    def _rows(self, work: Workload, raw: Tensor) -> Shown:
        """Pixtral and Mistral 3: sides are whole cells, and a mark stands behind every row."""
        if work.frames:
            raise UnsupportedError(f"{self.kind} takes no video")
        size = self._whole_cells(raw)
        rows, columns = (side // self.shape.cell for side in size)
        picture = [(None, columns), *[(START, columns)] * (rows - 1), (END, 0)]
        tensors = {"pixel_values": resized(raw, *size), "image_sizes": torch.tensor([size] * len(raw))}
        return Shown(picture * len(raw), IMAGE, tensors)

    def _raster(self, work: Workload, raw: Tensor) -> Shown:
        """HunyuanOCR: sides are whole cells, patches stand row by row, and marks around a picture and behind its rows are
        visual tokens."""
        if work.frames:
            raise UnsupportedError(f"{self.kind} takes no video")
        height, width = self._whole_cells(raw)
        patch = self.model.config.vision_config.patch_size
        cut = resized(raw, height, width).unfold(2, patch, patch).unfold(3, patch, patch)
        flat = cut.permute(0, 2, 3, 1, 4, 5).reshape(-1, 3 * patch * patch)
        grid = torch.tensor([[1, height // patch, width // patch]] * len(raw))
        tensors = {"pixel_values": flat, "image_grid_thw": grid}
        return Shown([(None, n) for n in self._tokens("image", tensors)], IMAGE, tensors)

    def _patches(self, work: Workload, raw: Tensor) -> Shown:
        """Qwen: sides are whole cells; a picture is two equal frames, and two frames share their tokens."""
        height, width = self._whole_cells(raw)
        patch = self.model.config.vision_config.patch_size
        frames = resized(raw, height, width)
        h, w = height // patch, width // patch
        groups = frames[:, None].repeat(1, 2, 1, 1, 1) if work.pictures else frames.unflatten(0, (-1, 2))
        # [groups, 2 frames, RGB, h / 2, 2, patch, w / 2, 2, patch]: the four patches of a token stand together
        cut = groups.view(len(groups), 2, 3, h // 2, 2, patch, w // 2, 2, patch)
        flat = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3 * 2 * patch * patch)
        tokens = h * w // 4
        if work.pictures:
            grid = torch.tensor([[1, h, w]] * len(raw))
            return Shown([(None, tokens)] * len(raw), IMAGE, {"pixel_values": flat, "image_grid_thw": grid})
        grid = torch.tensor([[len(groups), h, w]])
        runs: list[tuple[int | None, int]] = [(None, len(groups) * tokens)]
        if self.kind.startswith(("glm", "qwen3_vl")):
            # a time stamp stands in front of every two frames, or behind them
            runs = [(_FRAME_TEXT, tokens)] * len(groups)
        return Shown(
            runs, IMAGE if self.kind.startswith("glm") else VIDEO, {"pixel_values_videos": flat, "video_grid_thw": grid}
        )

    def _tiles(self, work: Workload, raw: Tensor) -> Shown:
        """InternVL, Idefics3 and SmolVLM: equal tiles, a smaller view behind them, and frames as pictures with text between."""
        if work.frames and self.kind == "idefics3":
            raise UnsupportedError("Idefics3 takes no video")
        if work.dots:
            raise UnsupportedError(f"{self.kind} reads a page in tiles; the workload tiles-2880 has them")
        side = self.shape.tile
        assert side is not None
        config = self.model.config
        factor = config.scale_factor if self.kind in _SPLIT else round(1 / config.downsample_ratio)
        patch = config.vision_config.patch_size
        tokens = (side // (patch if isinstance(patch, int) else patch[0]) // factor) ** 2
        tiles, texts = resized(raw, side, side), list[int | None]([None] * len(raw))
        if work.tiled:
            whole = resized(raw, *raw.shape[1:3])
            cut = whole.unfold(2, side, side).unfold(3, side, side).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
            tiles = torch.cat([cut, tiles])
            texts = [_TILE_TEXT + i for i in range(len(tiles))]
        if work.frames:
            texts = [_FRAME_TEXT + i for i in range(len(tiles))]
        runs = [(text, tokens) for text in texts]
        if self.kind == "internvl" and work.tiled:
            runs = [(_TILE_TEXT, tokens * len(tiles))]
        return Shown(runs, IMAGE, {"pixel_values": tiles[None] if self.kind in _SPLIT else tiles})


#: rows and columns of tokens that come nearest to 2,880, where a side may not have 60
_CELLS = {"mistral3": (53, 54)}
#: rows and columns of tiles that come nearest to 2,880 tokens
_TILED = {"llava_next": (2, 2), "llava_onevision": (1, 3), "internvl": (2, 5), "smolvlm": (5, 7), "idefics3": (4, 4)}
#: those that name row and column of every tile, and take pixels by row of the batch
_SPLIT = ("smolvlm", "idefics3")


def resized(raw: Tensor, height: int, width: int) -> Tensor:
    """``[n, H, W, 3]`` uint8 -> ``[n, 3, height, width]`` float32 between -1 and 1."""
    pixels = raw.permute(0, 3, 1, 2).float()
    if pixels.shape[2:] != (height, width):
        pixels = functional.interpolate(pixels, (height, width), mode="bilinear", antialias=True)
    return pixels.div_(127.5).sub_(1.0)
