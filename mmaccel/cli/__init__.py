"""The command ``mmaccel``: every file in this folder is a subcommand.

``NAME.py`` is the subcommand ``NAME``, with a hyphen for an underscore. Its docstring is the text of ``--help``, and it has

- ``HELP``: a line for the list of subcommands,
- ``EXAMPLES``: printed below its help,
- ``run(...)``: does the work, prints, and returns the exit status. Its parameters are the options, as Typer reads them. A
  parameter whose type is a dataclass has the options that are its fields, see ``shared/options.py``. ``--debug`` is added;

and may have ``PLACE``, its place in the list (by default the end), ``EXTRA``, the extra of mmaccel without which it does not
start (see ``shared/needs.py``), and ``METHODS = False`` if it runs no methods: every other subcommand has ``--import``. Heavy
imports are inside functions: help needs no torch.
Shared code is in ``shared/``, or in a file whose name begins with an underscore.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from ..core.version import __version__
from ..errors import MmaccelError, first_line
from .shared import needs
from .shared.options import STDOUT

#: exit status of an error that the user can correct
USAGE = 2

_ABOUT = """\
Make pretrained vision and video LLMs faster by dropping visual tokens.

\b
  mmaccel quickstart                                           see it work, offline
  mmaccel methods                                              which methods and recipes exist?
  mmaccel ask --model FOLDER photo.jpg "What is on the table?" full against accelerated, side by side
  mmaccel eval --recipe divprune --retain 0.5 0.25             how many answers does it change?
  mmaccel compare --out curves.png                             several recipes as curves
  mmaccel tune --data questions.jsonl --keep 0.99              the recipe that keeps your answers and costs least
  mmaccel distil --data questions.jsonl -o selector/           a small network that picks the tokens for your questions
  mmaccel calibrate --data questions.jsonl                     what the attention heads of your model do, for cache policies
  mmaccel bench --shape llava-1.5-7b                           how fast, on the sizes of real models?
  mmaccel video-qa questions.jsonl -o answers.jsonl            thousands of videos; resumes interrupted runs
  mmaccel serve --recipe snapkv                                a model with a recipe, for OpenAI's clients
  mmaccel demo                                                 what is kept and what it costs, in a browser
  mmaccel doctor, mmaccel selfcheck                            does everything fit together here?
  mmaccel completion bash                                      completion for your shell
"""
#: columns of help: off a terminal, and at most on one
_WIDTH = 120
#: what Typer raises when it cannot read a command line; its name differs between versions
_Unreadable: Any = typer.BadParameter.__mro__[1]


def commands() -> dict[str, Any]:
    """The module of every subcommand by its name, in the order of the list."""
    names = sorted(one.name for one in iter_modules(__path__) if not one.ispkg and not one.name.startswith("_"))
    modules = {name.replace("_", "-"): import_module(f"{__name__}.{name}") for name in names}
    return dict(sorted(modules.items(), key=lambda item: getattr(item[1], "PLACE", 1000)))


# --------------------------------------------------------------------------------------------------------------- typer


class _Command(TyperCommand):
    """A subcommand that takes ``--retain 0.5 0.25`` for ``--retain 0.5 --retain 0.25``, and ``--json`` without a file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._spelled(args))

    def _spelled(self, args: list[str]) -> list[str]:
        # without arguments, all words after an option are its values
        bare = not any(one.param_type_name == "argument" for one in self.params)
        several = [name for one in self.params if getattr(one, "multiple", False) for name in one.opts]
        spelled: list[str] = []
        option = ""
        for number, word in enumerate(args):
            if word == "--":
                return spelled + args[number:]
            name = word.partition("=")[0]
            if word.startswith("-") and not word[1:2].isdecimal():
                option = name
                spelled.append(word)
                following = args[number + 1] if number + 1 < len(args) else "-"
                if word == "--json" and (following.startswith("-") or not (bare or following.endswith(".json"))):
                    spelled.append(STDOUT)
            else:
                if bare and option in several and spelled[-1] != option:
                    spelled.append(option)
                spelled.append(word)
        return spelled


class _Group(TyperGroup):
    """The list of subcommands, with their whole lines."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.short_help) for name, one in self.commands.items()])


def _spread(run: Callable[..., int], methods: bool, extra: str | None) -> Callable[..., int]:
    """``run`` with an option for every field of parameters that are dataclasses, with ``--import`` if it runs ``methods``, and
    with ``--debug``; without the packages of ``extra`` it is an error that says how to install them."""
    groups: dict[str, Any] = {}
    spread = []
    for one in inspect.signature(run, eval_str=True).parameters.values():
        if not is_dataclass(one.annotation):
            spread.append(one.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[one.name] = one.annotation
        hints = get_type_hints(one.annotation, include_extras=True)
        for field in fields(one.annotation):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            spread.append(_option(field.name, hints[field.name], default))
    imported = typer.Option(
        "--import",
        metavar="FILE",
        help="A Python file that registers methods of yours, which are then known by name. Can be repeated.",
    )
    spread += [_option("imported", Annotated[list[str] | None, imported], None)] if methods else []
    debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
    spread.append(_option("debug", debug, False))

    def call(**given: Any) -> int:
        del given["debug"]  # main looks for it, since an error may come earlier
        if extra is not None:
            needs.require(extra, "This command")
        for file in given.pop("imported", None) or ():
            from ..method.imported import import_methods

            import_methods(file)
        arguments = {
            name: kind(**{one.name: given.pop(one.name) for one in fields(kind)}) for name, kind in groups.items()
        }
        return run(**arguments, **given)

    call.__signature__ = inspect.Signature(spread)  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in spread}
    return call


def _option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"mmaccel {__version__}")
        raise typer.Exit()


def _about(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def build_app() -> typer.Typer:
    """The application with all subcommands."""
    shown = sys.stdout is not None and sys.stdout.isatty()
    app = typer.Typer(
        cls=_Group,
        rich_markup_mode=None,
        add_completion=False,
        context_settings={
            "help_option_names": ["-h", "--help"],
            "max_content_width": _WIDTH,
            "terminal_width": None if shown else _WIDTH,
        },
    )
    app.callback(help=_ABOUT)(_about)
    for name, module in commands().items():
        extra = getattr(module, "EXTRA", None)
        app.command(
            name,
            cls=_Command,
            help=f"{module.__doc__}\n\nNeeds an extra: {needs.install(extra)}" if extra else module.__doc__,
            short_help=f"{module.HELP} (extra: {extra})" if extra else module.HELP,
            # Typer keeps the lines of a paragraph that begins so
            epilog="\n\n".join(f"\b\n{part}" for part in module.EXAMPLES.strip().split("\n\n")),
        )(_spread(module.run, getattr(module, "METHODS", True), extra))
    return app


# ---------------------------------------------------------------------------------------------------------------- main


def _silence() -> None:
    """Keep the interpreter from reporting at exit what standard output does not take."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        return
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line. The exit status is 0, 1 (a check failed, or an unexpected error), 2 (an error that the user can
    correct), or 3 (done, but some questions could not be used)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    app = typer.main.get_command(build_app())
    known: Any = app
    called = " ".join(["mmaccel", *(word for word in arguments[:1] if word in known.commands)])
    if sys.stderr is None:
        # closed; its text would go to standard output
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:
        print(f"{called}: standard output is closed; send it to a file or /dev/null.", file=sys.stderr)
        return USAGE
    try:
        with app.make_context("mmaccel", list(arguments or ["--help"]), obj=arguments) as context:
            status: int = app.invoke(context)
        sys.stdout.flush()
        return status
    except typer.Exit as done:
        # help without --help: the command is missing
        return done.exit_code if arguments else USAGE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # the reader (`| head`) has ended
        _silence()
        return 0
    except Exception as error:
        if "--debug" in arguments:
            traceback.print_exc()
        status, sentence = _explain(error, called)
        print(f"{called}: {sentence}", file=sys.stderr)
        if isinstance(error, OSError):
            _silence()
        return status


def _explain(error: Exception, called: str) -> tuple[int, str]:
    """The exit status of an error, and the sentence about it."""
    if isinstance(error, _Unreadable):
        sentence = " ".join(error.format_message().split())
        return USAGE, f"{sentence}{'' if sentence[-1] in '.?' else '.'} See {called} --help."
    if isinstance(error, MmaccelError):
        return USAGE, str(error)
    if isinstance(error, OSError):
        where = "its output" if error.filename is None else repr(os.fspath(error.filename))
        return USAGE, f"cannot use {where} ({error.strerror or error}); correct that and start again."
    return 1, f"unexpected {type(error).__name__}: {first_line(error)} (--debug shows where)"
