"""Video back ends, one a file, in the order in which they are tried."""

from ...errors import MmaccelError
from .base import Reader
from .decord import DecordReader
from .pictures import PicturesReader
from .pyav import PyAVReader
from .torchcodec import TorchcodecReader

#: by name
READERS: dict[str, type[Reader]] = {reader.name: reader for reader in (DecordReader, TorchcodecReader, PyAVReader)}


def usable(reader: type[Reader]) -> bool:
    """Whether the back end is installed and loads."""
    try:
        reader.load()
    except Exception:  # a broken shared library raises all kinds
        return False
    return True


def no_reader(name: str | None = None) -> MmaccelError:
    """The error that no back end is installed, or not the one of this name."""
    needed = " ".join(READERS[name or "pyav"].distributions)
    return MmaccelError(f"Reading video files needs {name or 'PyAV, decord or torchcodec'}; run: pip install {needed}")


__all__ = ["READERS", "PicturesReader", "Reader", "no_reader", "usable"]
