"""The command line as such: one name an option, one line an error, plain text in pipes, tables and bars on a terminal."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from PIL import Image

import mmaccel
from mmaccel.cli import build_app, commands, main, selfcheck
from mmaccel.cli.shared import needs, text
from mmaccel.families import load
from mmaccel.video import readers

ROOT = Path(__file__).parent.parent


class Terminal(io.StringIO):
    """A stream that takes itself for a screen."""

    def isatty(self) -> bool:
        return True


def command(name: str) -> Any:
    """A subcommand, as Typer has it."""
    app: Any = typer.main.get_command(build_app())
    return app.commands[name]


def said(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 2) -> str:
    """The one line of an error."""
    capsys.readouterr()
    assert main(argv) == status
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and "Usage" not in err and "Traceback" not in err
    return err


# --- one name an option -----------------------------------------------------------------------------------------------
def test_the_same_option_has_one_name_and_takes_the_same_everywhere() -> None:
    names: dict[str, set[str]] = {}
    # it prints a script for a shell to read
    every = set(commands()) - {"completion"}
    for name in every:
        options = [one for one in command(name).params if one.param_type_name == "option"]
        for option in options:
            names.setdefault(max(option.opts, key=len), set()).add(name)
        assert {"--json", "--debug"} <= {spelled for one in options for spelled in one.opts}
        assert next(one for one in options if "--json" in one.opts).metavar == "[FILE]"
    assert {"--recipe", "--retain", "--batch-size", "--max-new-tokens", "--model", "--device", "--json"} <= set(names)
    assert not {"--recipes", "--batch", "--answer", "--families", "--summary"} & set(names)
    assert names["--model"] == every - {"quickstart", "methods", "doctor", "selfcheck"}
    # what is trained becomes a recipe
    assert names["--recipe"] == every - {"demo", "methods", "doctor", "distil", "calibrate"}
    # budgets are what is searched there; a selector is trained at one
    assert names["--retain"] == names["--recipe"] - {"tune"} | {"distil"}


@pytest.mark.parametrize(
    ("name", "typed", "means"),
    [
        ("eval", "--retain 0.5 0.25 --limit 3", "--retain 0.5 --retain 0.25 --limit 3"),
        ("eval", "--retain=0.5 0.25 --json", "--retain=0.5 --retain 0.25 --json -"),
        ("eval", "--json --limit 3", "--json - --limit 3"),
        ("eval", "--json out --limit 3", "--json out --limit 3"),
        ("bench", "--batch-size 1 8 --max-new-tokens 4", "--batch-size 1 --batch-size 8 --max-new-tokens 4"),
        ("compare", "--recipe none fastv -o a.png", "--recipe none --recipe fastv -o a.png"),
        ("compare", "--retain 1 -2", "--retain 1 --retain -2"),
        # what stands behind --json may be a picture there
        ("ask", "--json a.png what?", "--json - a.png what?"),
        ("ask", "a.png what? --json a.json", "a.png what? --json a.json"),
        ("ask", "--set a=1 b.png what?", "--set a=1 b.png what?"),
        ("ask", "-- --json a.png", "-- --json a.png"),
    ],
)
def test_values_that_stand_behind_one_option(name: str, typed: str, means: str) -> None:
    assert command(name)._spelled(typed.split()) == means.split()


def test_json_goes_to_standard_output_or_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "fastv", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main(["methods", "fastv", "--json", str(tmp_path / "one.json")]) == 0
    assert "prompt attention" in capsys.readouterr().out  # the text is printed beside it
    assert json.loads((tmp_path / "one.json").read_text()) == told and told["options"] == {"layer": 2}
    assert "does not exist" in said(capsys, "doctor", f"--json={tmp_path}/none/x.json")
    assert "is a folder" in said(capsys, "selfcheck", "--family", "smolvlm", f"--json={tmp_path}")


# --- errors -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["bnch"], "mmaccel: .*'bnch'.*'bench'.* See mmaccel --help"),
        (["video-qa"], "mmaccel video-qa: Missing argument .* See mmaccel video-qa --help"),
        (["ask"], "mmaccel ask: The picture or video and the question are missing; write the question last"),
        (["eval", "--reciep", "x"], "mmaccel eval: .*--reciep.*--recipe"),
        (["eval", "--limit", "many"], "'--limit'.*integer"),
        (
            ["eval", "--retain", "much"],
            "'--retain': a budget must be a ratio such as 0.25 or a count such as 64, got 'much'",
        ),
        (["eval", "--suite", "colour", "--data", "x"], "--suite or --data, not both"),
        (["video-qa", "q.jsonl"], "'--out'"),
        (["methods", "fastvv"], "did you mean 'fastv'"),
        (["ask", "a.png", "?", "--dtype", "int3"], "'--dtype'.*'bfloat16'"),
    ],
)
def test_an_error_is_one_line_that_says_what_helps(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(words, said(capsys, *argv))


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for argv in (["selfcheck", "--device", "cuda"], ["bench", "--shape", "tiny", "--device", "cuda:1"]):
        error = said(capsys, *argv)
        assert "no GPU that torch can use" in error and "--device cpu" in error
    with pytest.raises(mmaccel.MmaccelError, match="no GPU that torch can use"):
        load.load("mmaccel/models/mini-llava", device="cuda")
    with pytest.raises(mmaccel.MmaccelError, match="no device 'gpu'; give cpu, cuda"):
        load.place("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert load.place("cuda:1").index == 1
    with pytest.raises(mmaccel.MmaccelError, match="no cuda:2; this machine has cuda:0, cuda:1"):
        load.place("cuda:2")


def test_bars_of_downloads_are_not_silenced() -> None:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    shown, downloads = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    try:
        for wanted in (True, False):
            (enable_progress_bars if wanted else disable_progress_bars)()
            with load._only_downloads():
                assert not logging.is_progress_bar_enabled() and are_progress_bars_disabled() == (not wanted)
            assert logging.is_progress_bar_enabled() == shown
    finally:
        (enable_progress_bars if downloads else disable_progress_bars)()


# --- extras -----------------------------------------------------------------------------------------------------------
#: of an extra, packages whose module has another name
MODULES = {"prometheus-client": "prometheus_client", "open_clip_torch": "open_clip", "ray[data]": "ray"}


def test_extras_are_those_of_the_project_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, modules in needs.EXTRAS.items():
        packages = [re.split("[>=;]", text)[0].strip() for text in project[extra]]
        assert sorted(MODULES.get(name, name) for name in packages) == sorted(modules), extra


EXTRAS_OF_COMMANDS = [
    (["demo"], "demo", "This command needs gradio"),
    (["serve"], "serve", "This command needs uvicorn"),
    (["tune", "--trials", "1"], "tune", "This command needs optuna"),
    (["tune"], "tune", "This command needs matplotlib"),
    (["distil"], "bench", "This command needs matplotlib"),
    (["compare"], "bench", "This command needs matplotlib"),
    (["bench", "--shape", "tiny", "--plots", "plots"], "bench", "--plots needs matplotlib"),
    (["video-qa", "q.jsonl", "-o", "a.jsonl", "--ray", "auto"], "ray", "--ray needs ray"),
    (["ask", "a.png", "?", "--recipe", "cdpruner", "--set", "clip=ViT-B-32:openai"], "clip", "needs open_clip"),
    (["eval", "--recipe", "clip.json"], "clip", "clip='ViT-B-32:openai' needs open_clip"),
    (["bench", "--shape", "tiny", "--recipe", "clip.json"], "clip", "clip='ViT-B-32:openai' needs open_clip"),
    (
        [
            "video-qa",
            "q.jsonl",
            "-o",
            "a.jsonl",
            "--frame-method",
            "query-frames",
            "--set",
            "clip_model=ViT-B-32:openai",
        ],
        "clip",
        "needs open_clip",
    ),
]


@pytest.mark.parametrize(("argv", "extra", "words"), EXTRAS_OF_COMMANDS, ids=lambda one: one[0] if one[0] else None)
def test_a_missing_extra_is_told_before_any_work(
    argv: list[str],
    extra: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gone = words.split()[-1]
    monkeypatch.chdir(tmp_path)
    Path("clip.json").write_text(mmaccel.get_recipe("cdpruner", clip="ViT-B-32:openai").to_json())
    (tmp_path / "film").mkdir()
    Path("q.jsonl").write_text(json.dumps({"video": "film", "question": "what?"}))
    Image.new("RGB", (8, 8)).save("a.png")
    found = needs.find_spec
    # others may be missing here in truth
    monkeypatch.setattr(needs, "find_spec", lambda name: None if name == gone else found("json"))
    monkeypatch.setattr(load, "load", lambda *a, **k: pytest.fail("a model is loaded"))
    error = said(capsys, *argv)
    assert words in error and error.endswith(f"run: pip install 'mmaccel[{extra}]'\n")
    assert not {"a.jsonl", "curves.png", "recipe.json", "plots"} & {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("name", ["ask", "video-qa", "eval"])
def test_a_missing_reader_of_videos_is_told_before_a_model_is_loaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mmaccel.video import in_process

    (tmp_path / "clip.3gp").write_bytes(b"\0\0\0\x14ftyp3gp4" + bytes(8) + b"\0\0\0\x08mdat")
    questions = tmp_path / "q.jsonl"
    questions.write_text(json.dumps({"video": "clip.3gp", "question": "what?"}))
    for module in (readers, in_process):
        monkeypatch.setattr(module, "usable", lambda reader: False)
    monkeypatch.setattr(load, "load", lambda *a, **k: pytest.fail("a model is loaded"))
    rest = {
        "ask": ["--model", str(tmp_path), str(tmp_path / "clip.3gp"), "what?"],
        "video-qa": [str(questions), "-o", str(tmp_path / "a.jsonl")],
        "eval": ["--data", str(questions)],
    }
    monkeypatch.setattr("mmaccel.video.decode.usable", lambda reader: False, raising=False)
    error = said(capsys, name, *rest[name])
    assert "Reading video files needs PyAV, decord or torchcodec; run: pip install av" in error
    assert not (tmp_path / "a.jsonl").exists()


def test_help_marks_what_needs_an_extra(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    for name, module in commands().items():
        extra = getattr(module, "EXTRA", None)
        line = next(line for line in listed.splitlines() if line.startswith(f"  {name} "))
        assert line.endswith(f"(extra: {extra})") == (extra is not None), line
        assert main([name, "--help"]) == 0
        told = capsys.readouterr().out
        assert (extra is None) or f"pip install 'mmaccel[{extra}]'" in told
    assert {name for name, one in commands().items() if hasattr(one, "EXTRA")} == {
        argv[0] for argv, _, words in EXTRAS_OF_COMMANDS if words.startswith("This command")
    }


# --- what is printed --------------------------------------------------------------------------------------------------
def test_a_row_is_one_plain_line_in_a_pipe_and_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["methods"]) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("snapkv ")]
    assert "keys the last prompt queries attend to" in line
    assert "\x1b" not in out and not re.search(r" $", out, re.M)
    assert main(["methods", "snapkv"]) == 0
    one = capsys.readouterr().out
    (line,) = [line for line in one.splitlines() if line.startswith("paper ")]
    assert "arXiv 2404.14469" in line
    screen = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", screen)
        patch.setenv("COLUMNS", "90")
        patch.setenv("TERM", "xterm")
        assert main(["methods", "--site", "codec"]) == 0
    shown = screen.getvalue()
    assert "\x1b[1m" in shown and "kivi" in shown
    assert max(len(re.sub(r"\x1b\[[\d;]*m", "", line)) for line in shown.splitlines()) <= 90


def test_the_list_of_methods_fits_and_is_grouped_by_what_a_model_meets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["methods"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 and len(out.splitlines()) < 2.25 * len(mmaccel.recipes())
    found: dict[str, list[str]] = {}
    for part in out.split("\n\n"):
        title, *rows = part.splitlines()
        found[title] = [row.split()[0] for row in rows if not row.startswith(" ")]
    assert [title.split(" (")[0] for title in found] == [
        "before the processor: frames and pixels",
        "before the vision tower",
        "inside the vision tower",
        "before the language model",
        "inside the language model",
        "KV cache: keys to keep",
        "KV cache: keys to read at every decode step",
        "KV cache: keys and values in fewer bits",
        "recipes of several stages, or with other settings",
    ]
    assert sorted(name for names in found.values() for name in names) == list(mmaccel.recipes())
    sites = {name: title.partition("site ")[2].rstrip(")") for title, names in found.items() for name in names}
    assert all(sites[name] == one.site for name, one in mmaccel.methods().items())
    every_step = found["KV cache: keys to read at every decode step (site cache)"]
    assert {"quest", "dycoke-cache"} <= set(every_step) and "snapkv" not in every_step
    # no word of a summary is lost where it folds
    told = " ".join(out.split())
    assert all(" ".join(one.summary.split()[-2:]) in told for one in mmaccel.recipes().values())
    # a narrow and a wide terminal
    for columns, most in ((60, 60), (300, 120)):
        screen = Terminal()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", screen)
            patch.setenv("COLUMNS", str(columns))
            patch.setenv("TERM", "xterm")
            assert main(["methods"]) == 0
        lines = re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue()).splitlines()
        assert max(map(len, lines)) <= most


def test_a_bar_is_shown_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, words in ((Terminal(), ("counting", "2/4")), (io.StringIO(), ())):
        monkeypatch.setattr(sys, "stderr", stream)
        with text.working("counting", 4) as bar:
            bar.advance(2)
            bar.say("[one] left out")
            bar.progress.refresh()
        assert all(word in stream.getvalue() for word in words)
        assert "[one] left out" in stream.getvalue()
    assert stream.getvalue() == "[one] left out\n"


def test_a_method_is_described_with_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    from mmaccel.cli.methods import describe

    assert main(["methods", "hired"]) == 0
    told = capsys.readouterr().out
    assert "paper    arXiv" in told and "needs    CLS attention" in told and "option" in told and "default" in told
    assert "families llava, vipllava, llava_next, " in told and "qwen" not in told.split("families")[1].splitlines()[0]
    for name, cls in mmaccel.methods().items():
        if cls.__module__.startswith("mmaccel."):
            one = describe(name)
            assert set(one["options"]) <= set(one["option_docs"]), name
            assert one["families"] and one["about"] and "`" not in one["about"], name
    assert main(["methods", "balanced"]) == 0
    assert "spacetime" in capsys.readouterr().out
    # as papers write them
    for name, known in (
        ("HiRED", "hired"),
        ("Squeezed Attention", "squeezed-attention"),
        ("PruMerge+", "prumerge-plus"),
    ):
        assert describe(name) == describe(known)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, None),
        ({"tokens_kept": 10}, "divprune kept 10 tokens for a budget of 9"),
        ({"tokens_kept": 0, "resolved": 0}, "divprune kept 0 of 36 tokens"),
        ({"kv_bytes": 1000}, "tokens were dropped, and the cache did not become smaller"),
        ({"method": "holitom-merge", "tokens_kept": 8}, None),
        ({"method": "quest", "tokens_kept": 36}, None),
        ({"method": "quest"}, "quest kept 9 tokens for a budget of 36"),
    ],
)
def test_selfcheck_holds_a_recipe_to_its_budget(changed: dict[str, Any], problem: str | None) -> None:
    stage = {"method": "divprune", "tokens_in": 36, "resolved": 9, "tokens_kept": 9}
    stage |= {key: value for key, value in changed.items() if key in stage}
    stats = {"stages": [stage], "visual_tokens": 36, "visual_tokens_kept": 9, "kv_bytes": changed.get("kv_bytes", 400)}
    assert next((wrong for wrong, is_so in selfcheck._wrong(stats, 1000).items() if is_so), None) == problem


# --- a walk -----------------------------------------------------------------------------------------------------------
def walk(*argv: str, **environment: str) -> tuple[str, float]:
    """What a command prints in a process of its own, and the seconds of CPU that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


HELP = """
import sys
from mmaccel.cli import commands, main
for name in ((), *((name,) for name in commands())):
    assert main([*name, "--help"]) == 0
heavy = {"torch", "transformers", "numpy", "PIL", "tqdm", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_of_every_command_needs_no_torch() -> None:
    told, _ = walk("-c", HELP)
    assert all(f"mmaccel {name}" in told for name in commands())


@pytest.mark.parametrize(
    "argv", [["-c", "import mmaccel.cli"], ["-m", "mmaccel", "--help"], ["-m", "mmaccel", "ask", "-h"]]
)
def test_help_is_there_at_once(argv: list[str]) -> None:
    """A few tenths of a second of CPU, see ``benchmarks/start.py``; a process that imports torch takes several seconds."""
    walk(*argv)  # whatever is compiled for the first time
    assert walk(*argv)[1] < 1


COMPLETION = """
import sys
from mmaccel.cli.completion import complete
for line in sys.stdin.read().splitlines():
    print(*(text for text, _ in complete(line.split(" "))))
heavy = {"torch", "transformers", "numpy", "PIL"} & set(sys.modules)
assert not heavy, heavy
"""


def test_the_word_at_the_cursor_is_completed_without_torch() -> None:
    expected = {
        "sel": "selfcheck",
        "eval --reci": "--recipe",
        "eval --device cpu --ret": "--retain",
        "ask --recipe divp": "divprune",
        "ask --recipe=divp": "--recipe=divprune",
        # as bash splits them
        "ask --recipe = divp": "divprune",
        "tune --goal =": "ttft tokens kv cost",
        "eval --recipe none fastv snap": "snapkv",
        "eval --recipe=none --limit 3 --model mini-q": "mini-qwen-vl",
        "eval --model mini-llava-": "mini-llava-deep",
        "methods snap": "snapkv",
        "compare --x ": "layers kv",
        "completion ": "bash zsh fish",
        # files, numbers and texts
        "eval --data ": "",
        "bench --batch-size 1 ": "",
        "ask --recipe divprune ": "",
        "methods snapkv ": "",
        "ask -- --rec": "",
        "nothing ": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPLETION],
        cwd=ROOT,
        input="\n".join(expected),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert dict(zip(expected, done.stdout.splitlines(), strict=True)) == expected


def test_every_option_and_recipe_is_completed() -> None:
    from mmaccel.cli.completion import complete

    assert [text for text, _ in complete([""])] == list(commands())
    for name in commands():
        offered = {text for text, _ in complete([name, "--"])}
        assert {max(one.opts, key=len) for one in command(name).params if one.param_type_name == "option"} < offered
    shipped = {name for name, one in mmaccel.recipes().items() if name not in mmaccel.methods() or is_shipped(name)}
    for typed in (["methods"], ["ask", "--recipe"], ["eval", "--recipe", "none"]):
        assert {text for text, _ in complete([*typed, ""])} == shipped


def is_shipped(name: str) -> bool:
    """Whether a method comes with mmaccel."""
    return mmaccel.get_method(name).__module__.startswith("mmaccel.")


def test_bash_completes(tmp_path: Path) -> None:
    """The printed script, in bash itself."""
    if (bash := shutil.which("bash")) is None:
        pytest.skip("no bash")
    program = tmp_path / "mmaccel"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mmaccel "$@"\n')
    program.chmod(0o755)
    (tmp_path / "film.mp4").touch()
    lines = [
        'eval "$(./mmaccel completion bash)"',
        "complete -p mmaccel",
        *(
            f'COMP_WORDS=({words}); COMP_CWORD={words.count(" ")}; _mmaccel ./mmaccel; echo "${{COMPREPLY[@]}}"'
            for words in ('mmaccel ""', "mmaccel ask --recipe divp", "mmaccel ask --recipe = fastk", "mmaccel ask film")
        ),
    ]
    done = subprocess.run(
        [bash, "--norc", "-c", "\n".join(lines)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "complete -o default -F _mmaccel mmaccel",
        " ".join(commands()),
        "divprune",
        "fastkv fastkv-tokens",
        "",
    ]


def test_scripts_of_all_shells_ask_the_same_program(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        assert f"completion {shell} -- " in capsys.readouterr().out
    assert main(["completion", "zsh", "--", "ask", "--dev"]) == 0
    assert capsys.readouterr().out.startswith("--device:cpu, cuda, cuda:1, ...")
    assert main(["completion", "fish", "--", "sel"]) == 0
    assert capsys.readouterr().out.startswith("selfcheck\trun all model families")
    assert "'tcsh'" in said(capsys, "completion", "tcsh")


@pytest.mark.full
def test_quickstart_as_a_new_user_sees_it() -> None:
    """About a minute of CPU on a quiet machine; three times that is too long."""
    told, taken = walk("-m", "mmaccel", "quickstart", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    for words in ("times as fast", "KV cache", "mini-llava: ", "of 32 right", "picture-kept.png", "clip-kept.png"):
        assert words in told
    gain = float(re.search(r"([\d.]+) times as fast", told)[1])
    assert gain > 2 and taken < 180


# ------------------------------------------------------------------------------------------------------ rows of reports
def test_rows_that_differ_have_titles_that_differ(tmp_path):
    """``1`` is a token and ``1.0`` all of them; recipes of two files may have one name; nothing comes twice."""
    from mmaccel import Recipe, Stage
    from mmaccel.cli.shared.measure import rows
    from mmaccel.cli.shared.options import rows_of

    (tmp_path / "sub").mkdir()
    for file, method in (
        ("x.json", "uniform"),
        ("y.json", "random"),
        ("sub/x.json", "divprune"),
        ("z.json", "uniform"),
    ):
        (tmp_path / file).write_text(Recipe("mine", (Stage(method, 0.5),)).to_json())
    x, y, other, same = (str(tmp_path / file) for file in ("x.json", "y.json", "sub/x.json", "z.json"))
    budgets = [1, 1.0, 0.25, 0.25, 0.1234567, 0.1234568]
    told = ["1", "1.0", "0.25", "0.1234567", "0.1234568"]
    assert [title for title, _ in rows_of(["divprune", "divprune"], budgets)] == [f"divprune {one}" for one in told]
    assert [type(one.retain) for _, one in rows_of(["divprune"], [1, 1.0])] == [int, float]
    assert [row.title for row in rows(["divprune"], budgets)] == ["none", *(f"divprune {one}" for one in told)]
    found = dict(rows_of([x, y, same], None))
    assert {title: one.stages[0].method for title, one in found.items()} == {
        "mine (x.json)": "uniform",
        "mine (y.json)": "random",
    }
    found = dict(rows_of([x, y, other], None))
    assert [found[f"mine ({one})"].stages[0].method for one in (x, "y.json", other)] == [
        "uniform",
        "random",
        "divprune",
    ]
    (tmp_path / "d.json").write_text(Recipe("divprune", (Stage("uniform", 0.5),)).to_json())
    found = dict(rows_of(["divprune", str(tmp_path / "d.json")], [0.5]))
    assert {title: one.stages[0].method for title, one in found.items()} == {
        "divprune 0.5": "divprune",
        "divprune (d.json) 0.5": "uniform",
    }
