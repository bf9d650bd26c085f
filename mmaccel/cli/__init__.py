"""The command ``mmaccel``; one file a subcommand, which is found because it lies in this folder.

``NAME.py`` is the subcommand ``NAME``, with a hyphen for an underscore. Its docstring is what ``--help`` says, and it has

- ``HELP``: a line for the list of subcommands,
- ``EXAMPLES``: what stands below its help,
- ``add_arguments(parser)``: declares its own options; ``--json`` and ``--debug`` are there already,
- ``run(options)``: does the work, prints, and returns the exit status;

and may have ``PLACE``, its place in the list (by default the end), and ``JSON_FILE = True``, if ``--json`` may name a file to
write. Heavy imports happen in the functions that need them. What several share lies in ``shared/``, or in a file whose name
begins with an underscore.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from ..errors import MmaccelError
from ..method.registry import files
from ..version import __version__

#: exit status of an error that the user can mend; argparse uses the same
USAGE = 2

_ABOUT = """\
Make pretrained vision and video LLMs faster by dropping visual tokens.

  mmaccel quickstart                                           see it work, offline
  mmaccel methods                                              what is there to choose from?
  mmaccel ask --model FOLDER photo.jpg "What is on the table?" full against accelerated, side by side
  mmaccel eval --recipe divprune --retain 0.5 0.25             what does it cost in answers?
  mmaccel compare --out curves.png                             several recipes as curves
  mmaccel bench --shape llava-1.5-7b                           how fast, on the sizes of real models?
  mmaccel video-qa questions.jsonl -o answers.jsonl            thousands of videos, and going on where it was killed
  mmaccel demo                                                 what is kept and what it costs, in a browser
  mmaccel doctor, mmaccel selfcheck                            does everything fit together here?
"""


def commands() -> dict[str, Any]:
    """The module of every subcommand by its name, in the order of the list."""
    found = [import_module(name) for name in files(sys.modules[__name__])]
    found.sort(key=lambda module: getattr(module, "PLACE", 1000))
    return {module.__name__.rpartition(".")[2].replace("_", "-"): module for module in found}


def build_parser() -> argparse.ArgumentParser:
    """The parser with all subcommands."""
    parser = argparse.ArgumentParser(
        prog="mmaccel", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"mmaccel {__version__}")
    places = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, module in commands().items():
        command = places.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        if getattr(module, "JSON_FILE", False):
            command.add_argument(
                "--json", nargs="?", const="-", metavar="FILE", help="print JSON instead of text, or write it to FILE"
            )
        else:
            command.add_argument("--json", action="store_true", help="print JSON instead of text")
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.set_defaults(run=module.run)
    return parser


def _silence() -> None:
    """Keep the interpreter from complaining at exit about what standard output does not take."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        return
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status: 0, 1 (a check failed, or a fault of ours), 2 (an error to mend), 3 (done,
    but for some questions that could not be used)."""
    parser = build_parser()
    options = parser.parse_args(argv)
    options.argv = list(sys.argv[1:] if argv is None else argv)
    if options.command is None:
        parser.print_help()
        return USAGE
    if sys.stderr is None:
        # closed; what is meant for it would come out on standard output
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:
        print(f"mmaccel {options.command}: standard output is closed; send it to a file or /dev/null.", file=sys.stderr)
        return USAGE
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # the reader (`| head`) has gone
        _silence()
        return 0
    except OSError as error:
        if options.debug:
            traceback.print_exc()
        where = "its output" if error.filename is None else repr(os.fspath(error.filename))
        print(
            f"mmaccel {options.command}: cannot use {where} ({error.strerror or error}); mend that and start again.",
            file=sys.stderr,
        )
        _silence()
        return USAGE
    except MmaccelError as error:
        if options.debug:
            traceback.print_exc()
        print(f"mmaccel {options.command}: {error}", file=sys.stderr)
        return USAGE
    except Exception as error:
        if options.debug:
            traceback.print_exc()
        first = (str(error).strip().splitlines() or [""])[0]
        print(
            f"mmaccel {options.command}: unexpected {type(error).__name__}: {first} (--debug shows where)",
            file=sys.stderr,
        )
        return 1
