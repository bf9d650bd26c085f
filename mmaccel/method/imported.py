"""Import Python files of a user, whose methods are then known by name."""

import sys
from contextlib import redirect_stdout
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import MmaccelError, first_line
from . import registry

#: files that were imported, in their order, for processes that need the same methods
files: list[str] = []


def import_methods(path: str | Path) -> None:
    """Import a Python file that registers methods. Its folder comes last in ``sys.path``, so that it can import its neighbours;
    what it prints goes to standard error. A file that is imported already is left as it is.

    Raises
    ------
    MmaccelError
        If there is no such file, it cannot be imported, registers no method, or takes the name of another one.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise MmaccelError(f"There is no file {str(path)!r} to import; give a Python file that registers methods.")
    if file.suffix != ".py":
        raise MmaccelError(f"Cannot import {str(path)!r}: it is not a Python file; give one whose name ends in .py.")
    before = registry.methods()
    if not any(_is_of(module, file) for module in list(sys.modules.values())):
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))
        spec: Any = spec_from_file_location(_free_name(file), file)
        module = sys.modules[spec.name] = module_from_spec(spec)
        try:
            with redirect_stdout(sys.stderr):
                spec.loader.exec_module(module)
            if registry.methods() == before:
                raise MmaccelError("it registers no method; decorate its class with @mmaccel.register.")
        except (Exception, SystemExit) as error:
            del sys.modules[spec.name]
            registry.forget_all_but(before)
            raise MmaccelError(f"Cannot import {str(path)!r}: {_reason(error, file)}") from error
    if str(file) not in files:
        files.append(str(file))


def _is_of(module: ModuleType, file: Path) -> bool:
    origin = getattr(module, "__dict__", {}).get("__file__")
    return isinstance(origin, str) and Path(origin).name == file.name and Path(origin).resolve() == file


def _free_name(file: Path) -> str:
    """The name of the file as a module, or another one if that is the name of another module."""
    name = file.stem
    spec = None if name in sys.modules or not name.isidentifier() else find_spec(name)
    taken = name in sys.modules or (spec is not None and spec.origin != str(file))
    name = f"imported_{name}" if taken else name
    while name in sys.modules:
        name += "_"
    return name


def _reason(error: BaseException, file: Path) -> str:
    """The error of an import as the end of a sentence, with its line in the file."""
    if isinstance(error, MmaccelError):
        return str(error)
    line, trace, what = None, error.__traceback__, first_line(error).rstrip(".")
    while trace is not None:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == str(file) else line
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.filename == str(file):
        line, what = error.lineno, error.msg
    where = "" if line is None else f"line {line}, "
    return f"{where}{type(error).__name__}: {what}; correct the file."
