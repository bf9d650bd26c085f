"""Layout of a prompt: which places hold text, and which belong to which picture, segment and grid cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import UnsupportedError
from .masks import leftmost

Modality = Literal["image", "video"]
#: which tokens are reduced together: an image (its stitched tiles as one), a clip, or one frame of a clip whose frames the
#: prompt separates; the same with stitched tiles one by one; the whole image or clip; all pictures, clips and sounds of a row
Unit = Literal["segment", "tile", "picture", "row"]


@dataclass(frozen=True)
class Tile:
    """Tokens of one segment, before its place in the prompt is known.

    grid : (t, h, w) in tokens.
    cells : ``[n, 3]`` long, (t, row, column) of each token; -1 for tokens without a cell (newlines).
    source : ``[n]`` long, the index of each token in what the vision tower's taps deliver for this modality; -1 without one.
    part : ``[n]`` long, for stitched tiles: the tile a token belongs to, in the order of the tower (a newline belongs to the
        last tile of its row); None for a single tile.
    parts : how many tiles are stitched together, including tiles of which only padding was in the picture.
    """

    grid: tuple[int, int, int]
    cells: Tensor
    source: Tensor
    part: Tensor | None = None
    parts: int = 1

    def __len__(self) -> int:
        return len(self.source)

    @staticmethod
    def raster(t: int, h: int, w: int, offset: int, newline: bool = False, frame: int = 0) -> Tile:
        """``t * h * w`` tokens in raster order whose sources start at ``offset``; with ``newline``, a newline token last."""
        cells = torch.cartesian_prod(torch.arange(frame, frame + t), torch.arange(h), torch.arange(w)).view(-1, 3)
        source = torch.arange(offset, offset + len(cells))
        if newline:
            cells = torch.cat([cells, torch.full((1, 3), -1)])
            source = torch.cat([source, torch.tensor([-1])])
        return Tile((t, h, w), cells, source)


@dataclass(frozen=True)
class Segment:
    """One image, one tile of a tiled image, one clip, or one frame of a clip whose frames the prompt separates.

    row : of the batch. picture : the number of its picture or clip. places : ``[n]`` long, where its tokens are in the row.
    """

    row: int
    modality: Modality
    picture: int
    tile: Tile
    places: Tensor


Picture = list[Tile]


@dataclass(frozen=True)
class Sound:
    """Consecutive tokens of a sound, or of a piece of one between frames.

    row : of the batch. places : ``[n]`` long, where its tokens are in the row.
    source : ``[n]`` long, the index of each token among those of all sounds that were encoded.
    """

    row: int
    places: Tensor
    source: Tensor


@dataclass(frozen=True)
class Layout:
    """Places of text, pictures, sounds and padding in a prompt. All tensors are on the CPU.

    valid : ``[B, S]`` bool, False for padding.
    segments : ordered by modality, row and place.
    sounds : ordered by row and place.
    """

    valid: Tensor
    segments: list[Segment]
    sounds: Sequence[Sound] = ()

    @cached_property
    def visual(self) -> Tensor:
        """``[B, S]`` bool: places of visual tokens, including newlines."""
        mask = torch.zeros_like(self.valid)
        for segment in self.segments:
            mask[segment.row, segment.places] = True
        return mask

    @cached_property
    def heard(self) -> Tensor:
        """``[B, S]`` bool: places of tokens of sounds."""
        if not self.sounds:
            return _nowhere(self.valid)
        mask = torch.zeros_like(self.valid)
        for sound in self.sounds:
            mask[sound.row, sound.places] = True
        return mask

    @staticmethod
    def walk(
        ids: Tensor, valid: Tensor, modalities: Sequence[tuple[Modality, int, list[Picture]]], family: str
    ) -> Layout:
        """Assign pictures to the placeholder tokens of ``ids [B, S]``, in the order of their features.

        Parameters
        ----------
        modalities : per modality its name, placeholder id and pictures. Pictures fill the placeholders row by row. When
            ``generate`` has repeated every row m times after the pictures were encoded, the m copies share them.

        Raises
        ------
        UnsupportedError
            If the placeholders do not match the pictures.
        """
        segments: list[Segment] = []
        picture = 0
        for modality, token, pictures in modalities:
            rows = [((ids[b] == token) & valid[b]).nonzero()[:, 0] for b in range(len(ids))]
            given, known = sum(map(len, rows)), sum(len(t) for p in pictures for t in p)
            copies = given // known if known else 0
            if copies * known != given or (copies and len(rows) % copies):
                raise UnsupportedError(
                    f"{family}: the prompt has {given} {modality} placeholders but the encoded {modality}s make {known} "
                    "tokens; pass the pixels that belong to exactly the new tokens of this call."
                )
            queue = iter(pictures)
            mine: list[Picture] = []
            for b, places in enumerate(rows):
                if not copies or b % copies == 0:
                    mine, room = [], len(places)
                    while room > 0 and (tiles := next(queue, None)) is not None:
                        mine.append(tiles)
                        room -= sum(map(len, tiles))
                start = 0
                for tiles in mine:
                    for tile in tiles:
                        at = places[start : start + len(tile)]
                        segments.append(Segment(b, modality, picture, tile, at))
                        start += len(tile)
                    picture += 1
                if start != len(places):
                    raise UnsupportedError(
                        f"{family}: the {modality} placeholders of row {b} do not match the pictures given for it."
                    )
        return Layout(valid, segments)

    def units(self, unit: Unit) -> Units:
        """The tokens that are reduced together (segments, tiles, or whole pictures and clips) as one padded batch."""
        if unit == "row":
            return self._rows()
        groups: dict[tuple[int, int], list[Segment]] = {}
        segments = self.segments if unit != "tile" else [one for s in self.segments for one in _apart(s)]
        for i, segment in enumerate(segments):
            groups.setdefault((segment.picture, 0 if unit == "picture" else i), []).append(segment)
        parts = list(groups.values())

        def tiles(part: list[Segment]) -> list[Tensor]:
            first = torch.tensor([0, *(s.tile.parts for s in part[:-1])]).cumsum(0).tolist()
            return [
                k + (torch.zeros_like(s.places) if s.tile.part is None else s.tile.part)
                for k, s in zip(first, part, strict=True)
            ]

        def pad(tensors: list[list[Tensor]], value: int = -1) -> Tensor:
            return pad_sequence([torch.cat(t) for t in tensors], batch_first=True, padding_value=value)

        films = [_film(part) for part in parts]
        return Units(
            row=torch.tensor([part[0].row for part in parts]),
            picture=[part[0].picture for part in parts],
            modality=[part[0].modality for part in parts],
            places=(places := pad([[s.places for s in part] for part in parts])),
            cells=pad([cells for cells, _ in films]),
            source=pad([[s.tile.source for s in part] for part in parts]),
            segment=pad([[torch.full((len(s.places),), i) for i, s in enumerate(part)] for part in parts]),
            tile=pad([tiles(part) for part in parts]),
            tiles=torch.tensor([sum(s.tile.parts for s in part) for part in parts]),
            grid=torch.tensor([grid for _, grid in films]),
            heard=_nowhere(places),
        )

    def _rows(self) -> Units:
        """All visual tokens and sounds of every row that has some, in the order of their places. A segment is a run of one
        picture, clip or sound without anything between."""
        parts: dict[int, list[tuple[Tensor, ...]]] = {}
        for seen in self.segments:
            kind = torch.full_like(seen.places, seen.picture)
            parts.setdefault(seen.row, []).append((seen.places, seen.tile.source, kind, seen.tile.cells))
        for sound in self.sounds:
            none = torch.full_like(sound.places, -1)
            cells = none[:, None].expand(-1, 3)
            parts.setdefault(sound.row, []).append((sound.places, sound.source, none, cells))
        rows, columns = sorted(parts), []
        for row in rows:
            places, source, kind, cells = (torch.cat(column) for column in zip(*parts[row], strict=True))
            order = places.argsort()
            places, source, kind, cells = places[order], source[order], kind[order], cells[order]
            begins = (places.diff() > 1) | (kind.diff() != 0)
            run = torch.cat([begins.new_zeros(1), begins]).cumsum(0)
            columns.append((places, source, run, kind < 0, cells))
        places, source, run, heard, cells = (
            pad_sequence(list(column), batch_first=True, padding_value=-1) for column in zip(*columns, strict=True)
        )
        return Units(
            row=torch.tensor(rows),
            picture=rows,
            modality=["video"] * len(rows),
            places=places,
            cells=cells,
            source=source,
            segment=run,
            tile=run,
            grid=cells.amax(1) + 1,
            tiles=run.amax(1) + 1,
            heard=heard & (places >= 0),
        )


def _film(part: list[Segment]) -> tuple[list[Tensor], list[int]]:
    """The cells of the segments of one unit, with time counted from its first frame, and the unit's grid (t, h, w).

    A frame that the prompt separates from its clip is a unit of one frame, and so at time 0.
    """
    cells = [s.tile.cells for s in part]
    time = torch.cat(cells)[:, 0]
    time = time[time >= 0]
    first, last = (int(time.min()), int(time.max())) if len(time) else (0, -1)
    shifted = [torch.where(c < 0, c, c - c.new_tensor([first, 0, 0])) for c in cells] if first else cells
    h, w = (max(s.tile.grid[axis] for s in part) for axis in (1, 2))
    return shifted, [last - first + 1, h, w]


def _apart(segment: Segment) -> list[Segment]:
    """The stitched tiles of a segment that have tokens, one segment each; their cells stay those of the stitched grid."""
    tile = segment.tile
    if tile.part is None:
        return [segment]
    mine = [(tile.part == i).nonzero()[:, 0] for i in tile.part.unique().tolist()]
    return [
        replace(segment, tile=Tile(tile.grid, tile.cells[at], tile.source[at]), places=segment.places[at])
        for at in mine
    ]


@dataclass(frozen=True)
class Units:
    """Units (segments, tiles or pictures) as a padded batch.

    ``row [N]``, ``grid [N, 3]`` and ``tiles [N]`` (how many tiles the unit has) are one entry a unit, all else is ``[N, n]``
    (``cells [N, n, 3]``) and padded with -1 at the end. ``grid`` and the time of ``cells`` count frames from the unit's first.
    ``heard`` bool are tokens of sounds.
    """

    row: Tensor
    picture: list[int]
    modality: list[Modality]
    places: Tensor
    cells: Tensor
    source: Tensor
    segment: Tensor
    tile: Tensor
    grid: Tensor
    tiles: Tensor
    heard: Tensor

    @property
    def valid(self) -> Tensor:
        """``[N, n]`` bool, False for padding."""
        return self.places >= 0

    @property
    def seen(self) -> Tensor:
        """``[N, n]`` bool: the visual tokens."""
        return self.valid & ~self.heard

    def only(self, kept: Tensor) -> Units:
        """The same units with only the places in ``kept [B, S]`` bool."""
        return self._taken(self.valid & kept[self.row[:, None], self.places.clamp(min=0)])

    def split(self, part: Tensor) -> tuple[Units, Tensor, Tensor]:
        """Smaller units: the tokens of each in every ``part [B, S]`` of a prompt, a number, -1 for none; and of every one, the
        unit that it is of and the part that it is in, ``[M]`` long."""
        at = part[self.row[:, None], self.places.clamp(min=0)].masked_fill(~self.valid, -1)
        unit = torch.arange(len(at))[:, None].expand_as(at)
        pairs = torch.stack([unit, at], dim=-1)[at >= 0].unique(dim=0)
        mine, number = pairs.view(-1, 2).unbind(1)
        tensors = {name: value[mine] for name, value in vars(self).items() if isinstance(value, Tensor)}
        picture, modality = ([each[i] for i in mine.tolist()] for each in (self.picture, self.modality))
        whole = replace(self, picture=picture, modality=modality, **tensors)
        return whole._taken(at[mine] == number[:, None]), mine, number

    def _taken(self, kept: Tensor) -> Units:
        """The same units with only the slots ``kept [N, n]`` bool."""
        slots, held = leftmost(kept)
        names = ("places", "source", "segment", "tile")
        taken = {name: getattr(self, name).gather(1, slots).masked_fill(~held, -1) for name in names}
        cells = self.cells.gather(1, slots[..., None].expand(-1, -1, 3)).masked_fill(~held[..., None], -1)
        return replace(self, cells=cells, heard=self.heard.gather(1, slots) & held, **taken)


def _nowhere(like: Tensor) -> Tensor:
    """False of the shape of a tensor, in a single byte."""
    return torch.zeros((), dtype=torch.bool, device=like.device).expand(like.shape)
