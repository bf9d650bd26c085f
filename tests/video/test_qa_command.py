"""The command video-qa, and whatever stops it."""

from __future__ import annotations

import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from asking import ASKED, command, lines, questions_file
from films import film
from waiting import until

from mmaccel.cli import main
from mmaccel.programs.video_qa.qa import VideoAnswerer


# --- the command ------------------------------------------------------------------------------------------------------
def test_the_command(films: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    videos = [films / "a.mp4", tmp_path / "later.mp4", films / "high.mp4"]
    questions, out, told = questions_file(tmp_path / "q.jsonl", videos), tmp_path / "a.jsonl", tmp_path / "s.json"
    with questions.open("a") as file:
        film_ = str(films / "pictures")
        file.write(json.dumps({"video": film_, "question": "which?", "choices": ["x", "y"], "answer": "x"}) + "\n")
    argv = command(questions, out, model, "--json", told)
    assert main(argv) == 3
    text, said = capsys.readouterr()
    assert said.count("later.mp4") == 2 and "Traceback" not in said
    assert "model at work" in text and "waiting for frames" in text and "accuracy" in text
    first = lines(out)
    assert len(first) == 7 and sum("error" in one for one in first) == 2
    report = json.loads(told.read_text())
    assert (report["questions"], report["failed"], report["answered_now"], report["judged"]) == (7, 2, 5, 1)
    assert report["prefills"] == 3 and report["visual_tokens_kept"] < report["visual_tokens"] / 3
    assert 0 < report["model_share"] < 1 and 0 < report["waiting_share"] < 1 and report["kv_bytes"] > 0
    # the missing video has come: its questions are asked, and no others
    film(tmp_path / "later.mp4", 30)
    assert main([*argv, "--json"]) == 0
    text, said = capsys.readouterr()
    report = json.loads(text)
    assert (report["taken_over"], report["answered_now"], report["failed"]) == (5, 2, 0) and "5 of 7" in said
    assert [one for one in lines(out) if "later" not in one["video"]] == [one for one in first if "error" not in one]
    # nothing is left: the model is not even loaded
    content = out.read_bytes()
    assert main(argv) == 0 and out.read_bytes() == content
    capsys.readouterr()
    assert main([*argv, "--retain", "0.5"]) == 2
    assert "different settings (recipe: " in capsys.readouterr().err


def test_drafts(films: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lossless answers are those of the bare model; figures of drafts are printed and written; another draft is another run."""
    questions = questions_file(tmp_path / "q.jsonl", [films / "a.mp4", films / "high.mp4"])
    out, told = tmp_path / "a.jsonl", tmp_path / "s.json"
    argv = command(questions, out, model, "--recipe", "holitom", "--retain", 0.2, "--lossless", "--max-new-tokens", 16)
    assert main([*argv, "--lookup", "--json", str(told)]) == 0
    assert "drafted tokens accepted" in capsys.readouterr().out
    bare = tmp_path / "bare16.jsonl"
    assert main(command(questions, bare, model, "--recipe", "none", "--max-new-tokens", 16)) == 0
    answered = [{one["id"]: one["answer"] for one in lines(path)} for path in (out, bare)]
    assert answered[0] == answered[1]
    report = json.loads(told.read_text())
    drafting = report["drafting"]
    assert drafting["tokens"] == 4 * 16 and drafting["verifications"] + drafting["forwards_saved"] >= 15
    assert report["visual_tokens_kept"] == report["visual_tokens"]
    capsys.readouterr()
    assert main([*argv, "--draft", str(model)]) == 2
    assert "different settings (drafts)" in capsys.readouterr().err


def test_strict_stops_at_the_first(
    films: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = questions_file(tmp_path / "q.jsonl", [films / "text.mp4", films / "bare", films / "a.mp4"])
    assert main(command(questions, tmp_path / "a.jsonl", model, "--strict")) == 2
    assert "text.mp4" in capsys.readouterr().err
    (only,) = lines(tmp_path / "a.jsonl")
    assert "text.mp4" in only["error"]


def test_an_interrupt_says_where_things_stand(
    films: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = questions_file(tmp_path / "q.jsonl", [films / "a.mp4", films / "nope.mp4", films / "high.mp4"])
    argv = command(questions, tmp_path / "a.jsonl", model, "--batch-size", 2)
    run = VideoAnswerer.run

    def broken(self: VideoAnswerer, *args: Any) -> Any:
        for number, one in enumerate(run(self, *args), 1):
            yield one
            if number == 3:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(VideoAnswerer, "run", broken)
        assert main(argv) == 130
    said = capsys.readouterr().err
    assert "3 of 6" in said and "resumes" in said and len(lines(tmp_path / "a.jsonl")) == 3
    assert main(argv) == 3 and len(lines(tmp_path / "a.jsonl")) == 6


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--frames", "0"], "'--frames'"),
        (["--batch-size", "0"], "'--batch-size': must be a number of 1 or more, or auto, got '0'"),
        (["--memory-limit", "0"], "--memory-limit"),
        (["--memory-limit", "nan"], "--memory-limit"),
        (["--time-limit", "-1"], "--time-limit must be greater than 0 seconds, got -1"),
        (["--frame-method", "nope"], "got 'nope'"),
        (["--recipe", "nope"], "no recipe 'nope'"),
        (["--set", "nothing=1"], "'nothing'"),
        (["--frame-method", "distinct-frames", "--set", "threshold=300.0"], "`threshold` of distinct-frames must be"),
        (["--json", "/none/of/these/s.json"], "does not exist"),
        (["--model", "./none"], "no folder './none'"),
    ],
)
def test_options_that_the_command_refuses(
    more: list[str], said: str, films: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = questions_file(tmp_path / "q.jsonl", [films / "a.mp4"])
    assert main(command(questions, tmp_path / "a.jsonl", model, *more)) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_a_summary_overwrites_nothing(
    films: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = questions_file(tmp_path / "q.jsonl", [films / "a.mp4"])
    content = questions.read_bytes()
    (tmp_path / "a.jsonl").touch()
    for told in (questions, tmp_path / "a.jsonl", tmp_path):
        assert main(command(questions, tmp_path / "a.jsonl", model, f"--json={told}")) == 2
        assert re.search("give (another|the name of a) file", capsys.readouterr().err)
    assert questions.read_bytes() == content and not (tmp_path / "a.jsonl").read_bytes()


def test_questions_and_answers_are_two_files(
    films: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = questions_file(tmp_path / "q.jsonl", [films / "a.mp4"])
    content = questions.read_bytes()
    assert main(command(questions, questions, model)) == 2 and questions.read_bytes() == content
    assert main(command(tmp_path / "none.jsonl", tmp_path / "a.jsonl", model)) == 2
    assert "Cannot read" in capsys.readouterr().err
    assert main(["video-qa", "--help"]) == 0
    assert "clips/dog.mp4" in capsys.readouterr().out


# --- whatever stops it ------------------------------------------------------------------------------------------------
def start(argv: list[str]) -> int:
    """The command in a process of its own, which has imported everything already; its id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        status = main(argv)
    finally:
        os._exit(status)


def count(path: Path) -> int:
    """Whole lines of a file."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


INTERRUPTED = """
import signal, sys
from mmaccel.cli import main
from mmaccel.video import subprocess_decoder
signal.signal(signal.SIGINT, signal.default_int_handler)
subprocess_decoder._START = subprocess_decoder._START.replace("serve()", sys.argv[1] + "; serve()")
sys.exit(main(sys.argv[2:]))
"""
HANGS = (
    "import time; from mmaccel.video import subprocess_decoder; real = subprocess_decoder.decode_in_process; "
    "subprocess_decoder.decode_in_process = lambda path, *a, **k: "
    "(open(path + '.waits', 'w').close(), time.sleep(1000)) if 'hang' in path else real(path, *a, **k)"
)


@pytest.mark.full
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send")
def test_an_interrupt_does_not_wait_for_decoders_that_hang(films: Path, model: Path, tmp_path: Path) -> None:
    videos = [films / "a.mp4", films / "high.mp4", *(tmp_path / f"hang{i}.mp4" for i in range(4))]
    questions, out = questions_file(tmp_path / "q.jsonl", videos, ASKED[:1]), tmp_path / "a.jsonl"
    argv = command(questions, out, model, "--batch-size", 1, "--time-limit", 60)
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED, HANGS, *argv], stderr=subprocess.PIPE, text=True) as run:
        # the next are waited for
        until(lambda: run.poll() is not None or count(out) >= 2 and list(tmp_path.glob("hang*.waits")), 120)
        assert run.poll() is None
        run.send_signal(signal.SIGINT)
        begin = time.monotonic()
        assert run.stderr is not None
        said = next(one for one in run.stderr if one.startswith("Stopped"))
        assert time.monotonic() - begin < 2
        # Python takes the libraries down, which a busy machine needs seconds for; no decoder is waited for
        rest = run.stderr.read()
        assert run.wait() == 130 and time.monotonic() - begin < 30 and "Traceback" not in rest
    assert "2 of 6 answers are in" in said
    assert {one["video"] for one in lines(out)} == {str(video) for video in videos[:2]}


def written(child: int, out: Path, wanted: int) -> bool:
    """Whether a run that goes on has written so many lines."""
    assert os.waitpid(child, os.WNOHANG) == (0, 0), "it came to its end before it was killed ten times"
    return count(out) >= wanted


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a run is killed in a forked process")
@pytest.mark.parametrize("which", ("divprune", "fastv"))
def test_killed_ten_times_it_is_as_if_it_never_was(which: str, films: Path, model: Path, tmp_path: Path) -> None:
    """SIGKILL at random moments; the same set of records as in an undisturbed run."""
    videos = []
    for number in range(20):
        videos.append(tmp_path / f"{number}.mp4")
        film(videos[-1], 8 + number % 5)
    videos[3:3] = [films / "text.mp4", films / "nope.mp4"]
    questions = questions_file(tmp_path / "q.jsonl", videos, (*ASKED, "who?"))
    whole, out = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    more = ("--recipe", which, "--batch-size", 4)
    assert os.waitstatus_to_exitcode(os.waitpid(start(command(questions, whole, model, *more)), 0)[1]) == 3
    rng, kills, left = random.Random(which), 0, []
    while kills < 10:
        # at any moment from its start on, or just after a number of new lines
        child, begin, still = start(command(questions, out, model, *more)), count(out), rng.random() < 0.3
        wanted = 0 if still else begin + rng.randint(0, 5)
        until(functools.partial(written, child, out, wanted), 120, every=0.002)
        time.sleep(rng.random() * 0.1)  # not to wait for anything: it may be killed at any moment
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        kills += 1
        left.append(count(out))
        if rng.random() < 0.5 and out.exists():
            # as if it had been killed while it wrote
            with out.open("ab") as file:
                file.write(b'{"id": "torn')
    assert max(left) > 10
    assert os.waitstatus_to_exitcode(os.waitpid(start(command(questions, out, model, *more)), 0)[1]) == 3
    assert sorted(map(json.dumps, lines(out))) == sorted(map(json.dumps, lines(whole)))
    assert len(lines(out)) == 88


@pytest.mark.full
def test_whatever_is_called_a_video(
    films: Path, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Cut off at every 5 %, flipped bits, zeros, text, folders: one record each, and nobody waits or falls over."""
    rng, videos = random.Random(0), []
    for name, options in {"a.mp4": {}, "b.webm": {"codec": "libvpx", "options": {"cpu-used": "8"}}}.items():
        whole = film(tmp_path / name, 24, **options).read_bytes()
        broken = {f"cut{percent}": whole[: len(whole) * percent // 100] for percent in range(0, 100, 5)}
        for number in range(12):
            flipped = bytearray(whole)
            for _ in range(1 + number):
                flipped[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
            broken[f"flip{number}"] = bytes(flipped)
        for percent in (0, 30, 60, 90):
            at = len(whole) * percent // 100
            broken[f"zero{percent}"] = whole[:at] + bytes(200) + whole[at + 200 :]
        for kind, content in broken.items():
            videos.append(tmp_path / f"{kind}-{name}")
            videos[-1].write_bytes(content)
    videos += [films / "text.mp4", films / "bare", tmp_path / "none.mp4", films / "a.mp4"]
    questions = questions_file(tmp_path / "q.jsonl", videos, ASKED[:1])
    begin = time.monotonic()
    status = main(command(questions, tmp_path / "out.jsonl", model, "--time-limit", 60))
    found = lines(tmp_path / "out.jsonl")
    assert status == 3 and len(found) == len(videos) == 76 and time.monotonic() - begin < 1200
    for one in found:
        assert ("answer" in one) != ("error" in one)
        assert "error" not in one or (
            one["error"].endswith(".") and "\n" not in one["error"] and len(one["error"]) < 400
        )
    assert any(one["video"] == str(films / "a.mp4") and "answer" in one for one in found)
    assert sum("error" in one for one in found) > 30
    assert "Traceback" not in capfd.readouterr().err
