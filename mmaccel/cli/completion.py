"""Print the script that completes mmaccel's commands, options, recipes and models in your shell.

\b
  bash   add to ~/.bashrc:                    eval "$(mmaccel completion bash)"
  zsh    add to ~/.zshrc, behind compinit:    eval "$(mmaccel completion zsh)"
  fish   run once:   mmaccel completion fish > ~/.config/fish/completions/mmaccel.fish

Completed are commands, their options, the values of options with a choice, recipes and methods that come with mmaccel, and the
short names of its models; files everywhere else.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

METHODS = False
HELP = "print the completion script of a shell"
EXAMPLES = """\
examples:
  eval "$(mmaccel completion bash)"
  mmaccel completion fish > ~/.config/fish/completions/mmaccel.fish
"""

#: every script asks ``mmaccel completion SHELL -- WORDS``: the words up to the cursor, the last of which may be empty
_SCRIPTS = {
    "bash": r"""
_mmaccel() {
    local IFS=$'\n'
    COMPREPLY=( $("$1" completion bash -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null) )
}
complete -o default -F _mmaccel mmaccel
""",
    "zsh": r"""#compdef mmaccel
_mmaccel() {
    local -a found
    found=("${(@f)$("${(Q)words[1]}" completion zsh -- "${(@Q)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n "$found" ]]; then _describe -V mmaccel found; else _files; fi
}
if [[ "${funcstack[1]}" == _mmaccel ]]; then _mmaccel "$@"; else compdef _mmaccel mmaccel; fi
""",
    "fish": r"""
function __mmaccel
    set -l words (commandline -opc)
    set -l last (commandline -ct)
    set -l found ($words[1] completion fish -- $words[2..-1] "$last" 2>/dev/null)
    if set -q found[1]
        printf '%s\n' $found
    else
        __fish_complete_path "$last"
    end
end
complete -c mmaccel -f -a '(__mmaccel)'
""",
}


def run(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(metavar="bash|zsh|fish", help="The shell.")],
    words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
) -> int:
    """Print the script, or the completions of the last of ``words``."""
    if not words:
        print(_SCRIPTS[shell].strip())
        return 0
    for text, meaning in complete(words):
        meaning = " ".join(meaning.split())
        # zsh has its meaning behind a colon, fish behind a tab, bash shows none
        if shell == "zsh":
            text = text.replace(":", "\\:")
        sign = {"zsh": ":", "fish": "\t"}.get(shell, "")
        print(f"{text}{sign}{meaning}" if sign and meaning else text)
    return 0


def complete(words: list[str]) -> list[tuple[str, str]]:
    """Completions of the last of ``words``, each with its meaning; none for files, numbers and free text.

    words : of the command line after ``mmaccel``, up to the cursor.
    """
    from . import build_app

    app: Any = typer.main.get_command(build_app())
    *before, last = words
    if not before:
        named = [(name, one.short_help) for name, one in app.commands.items()]
        return _begin(last, _options(app) if last.startswith("-") else named)
    command = app.commands.get(before[0])
    if command is None or "--" in before:
        return []
    # bash takes = for a word of its own
    if last == "=":
        before, last = [*before, last], ""
    given = [word for number, word in enumerate(before) if word != "=" or not before[number - 1].startswith("--")]
    asked = given[1:]
    if last.startswith("--") and "=" in last:
        name, _, value = last.partition("=")
        return [(f"{name}={text}", "") for text in _values(command, _option(command, name), value)]
    if last.startswith("-"):
        return _begin(last, _options(command))
    return [(text, "") for text in _values(command, _expected(command, asked), last)]


def _begin(text: str, found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [one for one in found if one[0].startswith(text)]


def _options(command: Any) -> list[tuple[str, str]]:
    """The options of a command, by their long names."""
    shown = [one for one in command.params if one.param_type_name == "option" and not getattr(one, "hidden", False)]
    return [(max(one.opts, key=len), one.help or "") for one in shown] + [("--help", "Show the help.")]


def _option(command: Any, name: str) -> Any:
    return next((one for one in command.params if name in one.opts and one.param_type_name == "option"), None)


def _expected(command: Any, words: list[str]) -> Any:
    """The option whose value comes behind ``words``, or else the next argument; None for neither."""
    spelled = command._spelled([*words, ""])
    # an option that takes several values has its name before each
    option = _option(command, spelled[-2]) if len(spelled) > 1 else None
    if option is not None and not option.is_flag:
        return option
    arguments = [one for one in command.params if one.param_type_name == "argument" and not one.hidden]
    taken, values = 0, iter(spelled[:-1])
    for word in values:
        one = _option(command, word)
        if one is None:
            taken += not word.startswith("-")
        elif not one.is_flag:
            next(values, None)
    return arguments[taken] if taken < len(arguments) else None


def _values(command: Any, param: Any, text: str) -> list[str]:
    """What an option or argument takes and begins with ``text``, if there is a list of it."""
    if param is None:
        return []
    if param.metavar in _NAMES:
        return [name for name in _NAMES[param.metavar]() if name.startswith(text)]
    return [one.value for one in param.shell_complete(typer.Context(command), text)]


def _recipes() -> tuple[str, ...]:
    from typing import get_args

    from ..core.recipe_names import RecipeName

    return get_args(RecipeName)


def _models() -> list[str]:
    from ..core.shipped_models import shipped_models

    return sorted(shipped_models())


#: names by the metavar of an option or argument
_NAMES: Any = {"RECIPE": _recipes, "RECIPE...": _recipes, "[NAME]": _recipes, "MODEL": _models}
