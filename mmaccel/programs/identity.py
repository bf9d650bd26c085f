"""Digests of recipes, code of methods, questions, media and models, by content.

A saved result may be reused only where everything that it depends on is the same. Names and paths do not tell that: a method
keeps its name when its code changes. All functions return hexadecimal digests that change with the content.

>>> from mmaccel.programs.identity import recipe_identity
>>> from mmaccel.recipe import get_recipe
>>> one_token, all_tokens = get_recipe("divprune", retain=1), get_recipe("divprune", retain=1.0)
>>> recipe_identity(one_token) == recipe_identity(all_tokens)
False
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..core.shipped_models import located
from ..errors import MmaccelError
from ..families.pages import is_pages
from ..families.smollm2 import SHA256, weights_file
from ..method.calibration import NAME as CALIBRATION
from ..method.model_options import Loaded
from ..recipe import Recipe
from .bench import provenance

#: seconds after which reading shows a progress bar
_QUIET = 2.0
_CHUNK = 8 << 20
#: files up to this size are hashed whole; larger ones by size, time of change and so many bytes of each end
_WHOLE, _END = 64 << 20, 1 << 20
_PACKAGE = Path(__file__).parents[1]
#: options that name a folder or file, and what they name by default, next to the model's weights
_BESIDE = {"selector": "selector", "draft": "draft", "calibration": CALIBRATION}
#: entries of a class that do not change what it does, or differ between processes
_SILENT = {
    *"__dict__ __weakref__ __module__ __doc__ __firstlineno__ __static_attributes__ __annotations__ __annotate__".split(),
    *"__annotate_func__ __annotations_cache__ __dataclass_params__ __abstractmethods__ _abc_impl __orig_bases__".split(),
    *"__parameters__ __hash__ __match_args__".split(),
}


# ------------------------------------------------------------------------------------------------------------- recipes


def recipe_identity(recipe: Recipe, model: str | Path | None = None) -> str:
    """Digest of a recipe: every value with its type, the code of its methods, and the files that they load. ``retain=1`` (one
    token), ``1.0`` (all) and ``True`` are different.

    ``model`` is the model's folder, for methods that load files next to the weights (``selector/``, ``draft/``, a calibration).

    Raises MmaccelError if the recipe cannot be built, or a file that it names cannot be read.
    """
    return digest(recipe_parts(recipe, model))


def recipe_parts(recipe: Recipe, model: str | Path | None = None) -> dict[str, str]:
    """The parts of :func:`recipe_identity` as digests by name, to tell which of them differs: ``recipe`` (all values),
    ``code of METHOD`` and ``files of METHOD``."""
    parts, built = {}, recipe.build()
    parts["recipe"] = digest((recipe, [_fields(method) for _, method in built]))
    for number, (stage, method) in enumerate(built):
        # two stages of one method may name different files
        alone = [s.method for s, _ in built].count(stage.method) == 1
        label = stage.method if alone else f"{stage.method} #{number + 1}"
        parts[f"code of {label}"] = class_identity(type(method))
        if files := list(_files_of(method, model)):
            parts[f"files of {label}"] = digest(files)
    return parts


def class_identity(cls: type) -> str:
    """Digest of a class's code: the source files of its modules and of the modules that these use, and its bytecode.

    Bases count too. Left out are the standard library and installed packages, except for the package of the class itself;
    :mod:`mmaccel` counts whole. Bytecode replaces what has no file, such as a class made in a notebook or by ``exec``.
    """
    return digest(_Code(cls))


@functools.cache
def code_identity() -> str:
    """Digest of mmaccel's own source, kernels included, without the command line, which changes no result."""
    import mmaccel_kernels

    source = hashlib.sha256()
    for root in (_PACKAGE, Path(str(mmaccel_kernels.__file__)).parent):
        for path in sorted(root.rglob("*.py")):
            if _PACKAGE / "cli" not in path.parents:
                source.update(f"{path.relative_to(root).as_posix()} ".encode() + path.read_bytes())
    return source.hexdigest()


def versions() -> dict[str, str]:
    """Versions that results depend on: of mmaccel, torch and transformers, and ``code``, the start of
    :func:`code_identity`."""
    packages = provenance.versions()
    return {name: packages[name] for name in ("mmaccel", "torch", "transformers")} | {"code": code_identity()[:16]}


def _fields(value: Any) -> dict[str, Any]:
    """The options of a method, or whatever an object holds."""
    if dataclasses.is_dataclass(value):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    return dict(vars(value)) if hasattr(value, "__dict__") else {}


def _files_of(method: Any, model: str | Path | None) -> Iterator[tuple[str, Any]]:
    """Names and digests of files that the options of a method name."""
    for name, value in _fields(method).items():
        if name in _BESIDE and value == "" and model is not None:
            value = str(Path(located(str(model))) / _BESIDE[name])
        if not isinstance(value, (str, Path)) or not str(value):
            continue
        path = Path(value)
        try:
            exists = path.exists()
        except (OSError, ValueError):
            # not a path: too long, or with a null
            continue
        if exists:
            yield name, path_identity(path, hash_large=False)
        elif name == "draft" and len(path.parts) == 2:
            yield name, hub_commit(str(value))


# ----------------------------------------------------------------------------------------------------------- questions


def question_identity(question: Any) -> str:
    """Digest of a question: its text, earlier turns, choices, expected answer and task, and the content of its media.

    question : a :class:`mmaccel.programs.evaluate.Question` or :class:`mmaccel.programs.video_qa.VideoQuestion`. One that
        names files is not loaded: its files are hashed, of more than 64 MiB by size, time of change, first and last MiB. Others
        are loaded, and their pixels hashed. A missing file has a digest too.
    """
    sample = getattr(question, "sample", None)
    if sample is not None:
        files = [*sample.images, *([sample.video] if sample.video else [])]
        words = (sample.question, sample.earlier, question.expected, question.task, question.frames)
        return digest((words, [_media(path) for path in files]))
    if hasattr(question, "load"):
        return digest((question.task, question.expected, question.load()))
    asked = (question.question, question.choices, question.answer, question.error)
    return digest((asked, _media(question.path) if question.path else None))


def _media(path: str | Path) -> str | None:
    """The digest of a picture, a video or a folder of pictures; None if it cannot be read."""
    try:
        return path_identity(path, hash_large=False)
    except (MmaccelError, ValueError):
        return None


def path_identity(path: str | Path, hash_large: bool = True) -> str:
    """Digest of a file's content, or of the names and contents of all files below a folder; where it lies does not count.

    ``hash_large=False`` takes size, time of change, first and last MiB of files of more than 64 MiB.

    Raises MmaccelError if it is missing or cannot be read.
    """
    path = Path(path)
    try:
        if path.is_dir():
            files = sorted(one for one in path.rglob("*") if one.is_file() and not one.name.startswith("."))
            return digest([(one.relative_to(path).as_posix(), _file(one, hash_large)) for one in files])
        return _file(path, hash_large)
    except OSError as error:
        raise MmaccelError(
            f"Cannot read {str(error.filename or path)!r} ({error.strerror}); give a file or folder that can be read."
        ) from error


def _file(path: Path, whole: bool) -> str:
    state = path.stat()
    # ctime, which cannot be set, tells whether a file changed since it was hashed in this process
    touched = state.st_ino, state.st_ctime_ns
    return _hashed(path.resolve(), state.st_size, state.st_mtime_ns, whole or state.st_size <= _WHOLE, touched)


@functools.lru_cache(maxsize=4096)
def _hashed(path: Path, size: int, changed: int, whole: bool, touched: tuple[int, int]) -> str:
    with path.open("rb") as file:
        if whole:
            return hashlib.file_digest(file, "sha256").hexdigest()
        begin = f"{size} {changed} ".encode() + file.read(_END)
        file.seek(-_END, 2)
        return hashlib.sha256(begin + file.read(_END)).hexdigest()


# -------------------------------------------------------------------------------------------------------------- models


def model_identity(model: Any, processor: Any = None) -> str:
    """Digest of a model.

    Of a folder every byte of the files that may decide an answer counts, of a hub id its commit (:func:`digests`). Of a loaded
    model its class, configuration and all weights; with ``processor`` also its tokenizer, chat template and settings.

    Raises MmaccelError if files cannot be read, or the commit of a hub id is unknown on this machine.
    """
    if isinstance(model, (str, Path)):
        files = digests(str(model))
        if None in files.values():
            raise MmaccelError(
                f"The commit of {str(model)!r} is not known on this machine; load the model once, or give a folder."
            )
        return digest(files)
    generation = getattr(model, "generation_config", None)
    settings = [_settings(one) for one in (getattr(model, "config", None), generation)]
    weights = {name: _sums(weight) for name, weight in model.state_dict().items() if isinstance(weight, torch.Tensor)}
    return digest((type(model).__qualname__, settings, weights, None if processor is None else _processor(processor)))


def _settings(config: Any) -> dict[str, Any]:
    """A configuration without its origin and the version of transformers."""
    values = config.to_dict() if hasattr(config, "to_dict") else {}
    return {key: value for key, value in values.items() if key not in ("_name_or_path", "transformers_version")}


def _processor(processor: Any) -> Any:
    parts = [getattr(processor, name, None) for name in ("image_processor", "video_processor")]
    tokenizer = getattr(processor, "tokenizer", processor)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # every call sets padding and truncation, so that they say how the last one was made
    last = {"padding": None, "truncation": None}
    words = sorted(tokenizer.get_vocab().items()) if backend is None else json.loads(backend.to_str()) | last
    templates = [getattr(one, "chat_template", None) for one in (processor, tokenizer)]
    return type(processor).__qualname__, [_settings(part) for part in parts], words, templates


def _sums(weight: torch.Tensor) -> Any:
    """An exact checksum of a tensor, the same on every device: a sum over words of 8 bytes, each mixed with its position."""
    about = str(weight.dtype), tuple(weight.shape)
    whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    if whole.is_meta or not whole.numel():
        return about
    flat = whole.detach().contiguous().reshape(-1).view(torch.uint8)
    even = len(flat) // 8 * 8
    total = 0
    for start in range(0, even, _CHUNK):
        piece = flat[start : min(start + _CHUNK, even)]
        words = (piece if piece.storage_offset() % 8 == 0 else piece.clone()).view(torch.int64)
        x = words + torch.arange(start, start + len(words), device=words.device) * 0x9E3779B97F4A7C1
        # a mix as in splitmix64: products wrap in the same way everywhere
        x = (x ^ (x >> 30)) * 0x3F58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x14D049BB133111EB
        total += int((x ^ (x >> 31)).sum())
    return *about, total, flat[even:].tolist()


def digests(model: str) -> dict[str, str | None]:
    """Digest of every byte of every file of a folder that may decide an answer: weights, configurations, tokenizer, chat
    templates, processors, code. Of a hub id, the commit that it resolves to on this machine, which names them all; or None.

    Nothing is taken from an earlier reading. A bar on standard error shows a reading that takes long.

    Raises MmaccelError if a file cannot be read.
    """
    folder = Path(located(model))
    if not folder.is_dir():
        if is_pages(model):
            path = weights_file()
            return {f"file {path.name}": SHA256}
        return {"commit": hub_commit(model)}
    from tqdm import tqdm

    files = _files(folder)
    digests: dict[str, str | None] = {}
    try:
        with tqdm(
            total=sum(path.stat().st_size for path in files),
            desc="reading the model's files",
            unit="B",
            unit_scale=True,
            delay=_QUIET,
            disable=None,
            leave=False,
        ) as bar:
            for path in files:
                content = hashlib.sha256()
                with path.open("rb") as file:
                    while piece := file.read(_CHUNK):
                        content.update(piece)
                        bar.update(len(piece))
                digests[f"file {path.relative_to(folder).as_posix()}"] = content.hexdigest()
    except OSError as error:
        raise MmaccelError(
            f"Cannot read {str(error.filename or folder)!r} of the model ({error.strerror}); mend it, or give another model."
        ) from error
    return digests


def _files(folder: Path) -> list[Path]:
    """The files that a model is loaded from: all at the top but Markdown, and templates and code in subfolders."""
    top = {path for path in folder.iterdir() if path.suffix.lower() != ".md"}
    below = {path for kind in ("*.jinja", "*.py") for path in folder.rglob(kind)}
    return sorted(path for path in top | below if path.is_file() and not path.name.startswith("."))


def hub_commit(name: str) -> str | None:
    """The commit of a hub id on this machine; None if it is unknown."""
    from transformers.utils.hub import cached_file, extract_commit_hash

    try:
        commit: str | None = extract_commit_hash(cached_file(name, "config.json"), None)
    except Exception:
        return None
    return commit


# ------------------------------------------------------------------------------------------------------ any value, code


def digest(value: Any) -> str:
    """Digest of a value with the types in it: of plain data, arrays, tensors, pictures, dataclasses, functions, classes.

    A tuple equals a list, a mapping one in another order. ``1``, ``1.0`` and ``True`` differ.
    """
    feed = _Feed()
    feed.add(value)
    # in a loop: modules may use each other in long chains
    while feed.modules:
        feed.source(feed.modules.pop(0))
    return feed.hash.hexdigest()


@dataclasses.dataclass(frozen=True)
class _Code:
    """Marks a class of which the code is to be hashed, with the modules it is from."""

    cls: type


class _Feed:
    """Adds values to one hash, each with its type and length, so that different values differ in the hash."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        #: objects that were added, by id; kept, so that no other object gets the id
        self.seen: dict[int, tuple[int, Any]] = {}
        #: installed packages whose modules are followed
        self.packages: set[str] = set()
        #: modules whose source must still be added
        self.modules: list[types.ModuleType] = []

    def _put(self, tag: str, content: bytes | str = b"") -> None:
        content = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        self.hash.update(f"{tag} {len(content)} ".encode())
        self.hash.update(content)

    def add(self, value: Any) -> None:
        if value is None or value is ... or isinstance(value, bool):
            self._put("is", repr(value))
        elif isinstance(value, int):
            self._put("int", hex(value))
        elif isinstance(value, float):
            self._put("float", float(value).hex())
        elif isinstance(value, (str, Path)):
            self._put("str" if isinstance(value, str) else "path", str(value))
        elif isinstance(value, (bytes, bytearray)):
            self._put("bytes", bytes(value))
        elif isinstance(value, (list, tuple, set, frozenset, Mapping)):
            self._container(value)
        elif isinstance(value, torch.Tensor):
            self._put("tensor", repr(_sums(value)))
        elif isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
            self._put(f"array {value.dtype} {value.shape}", value.tobytes())
        elif isinstance(value, Image.Image):
            self._put("picture", value.tobytes())
            self.add((value.mode, value.size, value.getpalette(), value.info.get("transparency")))
        elif isinstance(value, Loaded):
            self._put("model", model_identity(value.model))
        elif id(value) in self.seen:
            self._put("again", str(self.seen[id(value)][0]))
        else:
            self.seen[id(value)] = len(self.seen), value
            self._object(value)

    def _container(self, value: Any) -> None:
        if isinstance(value, (list, tuple)):
            self._put(f"sequence of {len(value)}")
            for one in value:
                self.add(one)
        elif isinstance(value, (set, frozenset)):
            self._put("set", "".join(sorted(map(self._apart, value))))
        else:
            self._put(f"mapping of {len(value)}")
            for key, one in sorted(((self._apart(key), one) for key, one in value.items()), key=lambda item: item[0]):
                self._put("key", key)
                self.add(one)

    def _apart(self, value: Any) -> str:
        """The digest of a key or of a member of a set, for a stable order."""
        feed = _Feed()
        feed.packages, feed.seen, feed.modules = self.packages, dict(self.seen), self.modules
        feed.add(value)
        return feed.hash.hexdigest()

    def _object(self, value: Any) -> None:
        """Add code, or another object that is not plain data."""
        if isinstance(value, _Code):
            self._method(value.cls)
        elif isinstance(value, types.ModuleType):
            self._module(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.CodeType):
            self._bytecode(value)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
            self._put(str(type(value).__name__))
            self.add(value.__func__)
        elif isinstance(value, property):
            self.add((value.fget, value.fset, value.fdel))
        elif isinstance(value, functools.partial):
            self.add((value.func, value.args, value.keywords))
        elif isinstance(value, functools.cached_property):
            self.add(value.func)
        elif isinstance(getattr(value, "__wrapped__", None), types.FunctionType):
            self.add(value.__wrapped__)
        else:
            kind = type(value)
            self._put("object", f"{kind.__module__}.{kind.__qualname__}")
            if dataclasses.is_dataclass(value) or _follows(kind.__module__, self.packages):
                self.add(_fields(value))
            elif " at 0x" not in (text := repr(value)):
                self._put("repr", text)

    # --- code -------------------------------------------------------------------------------------------------
    def _method(self, cls: Any) -> None:
        """Add a class, its bases, and their modules."""
        self.packages.add(cls.__module__.partition(".")[0])
        for base in cls.__mro__:
            if _own(base.__module__) or _follows(base.__module__, self.packages):
                self._put("base", f"{base.__module__}.{base.__qualname__}")
                self._entries(base)
                self.add(sys.modules.get(base.__module__))

    def _class(self, cls: type) -> None:
        self._put("class", f"{cls.__module__}.{cls.__qualname__}")
        if _follows(cls.__module__, self.packages):
            self._entries(cls)
            self.add(cls.__bases__)

    def _entries(self, cls: type) -> None:
        for name, value in sorted(vars(cls).items()):
            if name == "__dataclass_fields__":
                self.add([(field, one.default, one.default_factory) for field, one in value.items()])
            elif name not in _SILENT:
                self._put("entry", name)
                self.add(value)

    def _module(self, module: types.ModuleType) -> None:
        """Add a module by its version, or note that its source must be added."""
        name = module.__name__
        self._put("module", name)
        if _own(name):
            self._put("mmaccel", code_identity())
        elif not _follows(name, self.packages):
            self._put("version", str(getattr(sys.modules.get(name.partition(".")[0]), "__version__", "")))
        elif _source(name) is not None:
            self.modules.append(module)

    def source(self, module: types.ModuleType) -> None:
        """Add the source of a module, and the modules that it uses."""
        source = _source(module.__name__)
        self._put(f"source of {module.__name__}", b"" if source is None else source.read_bytes())
        used = {}
        for value in list(vars(module).values()):
            if isinstance(value, types.ModuleType):
                used[value.__name__] = value
            elif isinstance(value, (type, types.FunctionType)) and value.__module__ in sys.modules:
                used[value.__module__] = sys.modules[value.__module__]
        for other in sorted(used):
            self.add(used[other])

    def _function(self, function: types.FunctionType) -> None:
        module = function.__module__ or ""
        self._put("function", f"{module}.{function.__qualname__}")
        if not (_own(module) or _follows(module, self.packages)):
            return
        self.add(function.__code__)
        self.add((function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:
                # not set yet
                self._put("empty")
        if _own(module):
            # code_identity covers what it calls
            return
        if _source(module) is not None and Path(function.__code__.co_filename).exists():
            # the source of its module, which is added, covers what it calls
            self.add(sys.modules[module])
            return
        for name in sorted(set(_names(function.__code__)) & function.__globals__.keys()):
            self._put("global", name)
            self.add(function.__globals__[name])

    def _bytecode(self, code: types.CodeType) -> None:
        self._put("code", code.co_code)
        self.add((code.co_names, code.co_varnames, code.co_freevars, code.co_argcount, code.co_kwonlyargcount))
        self.add((code.co_flags, code.co_consts))


def _own(module: str) -> bool:
    return module.partition(".")[0] in ("mmaccel", "mmaccel_kernels")


def _follows(module: str, packages: set[str]) -> bool:
    """Whether the source of a module counts: that of ``packages``, and of modules that are not mmaccel's, not of the standard
    library, and not installed."""
    top = module.partition(".")[0]
    if _own(module):
        return False
    return top in packages or top == "__main__" or (top not in sys.stdlib_module_names and top not in _installed())


#: top names of installed packages
_installed = functools.cache(packages_distributions)


def _source(module: str) -> Path | None:
    """The file of a module; None in a notebook, in a shell, or after ``exec``."""
    path = Path(getattr(sys.modules.get(module), "__file__", None) or "")
    return path if path.suffix == ".py" and path.is_file() else None


def _names(code: types.CodeType) -> Iterable[str]:
    """Names that code, nested code included, uses of its module."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
