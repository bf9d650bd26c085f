"""The command ``mmaccel``; one file a subcommand. Heavy imports happen in the subcommand that needs them."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence

from ..errors import MmaccelError
from ..version import __version__
from . import ask, bench, compare, demo, doctor, methods, quickstart, selfcheck, video_qa
from . import eval as eval_

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


def build_parser() -> argparse.ArgumentParser:
    """The parser with all subcommands."""
    parser = argparse.ArgumentParser(
        prog="mmaccel", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"mmaccel {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for module in (quickstart, ask, eval_, compare, bench, video_qa, demo, methods, doctor, selfcheck):
        command = commands.add_parser(
            module.__name__.rpartition(".")[2].replace("_", "-"),
            help=module.HELP,
            description=module.__doc__,
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        if module in (eval_, compare, bench):
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
