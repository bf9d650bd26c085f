"""Questions about videos on a Ray cluster: the answers are those of one machine, whatever happens to workers."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zoo
from films import film

from mmaccel import MmaccelError, get_recipe
from mmaccel.cli import main
from mmaccel.programs.video_qa import cluster
from mmaccel.programs.video_qa.cluster import ClusterAnswerer
from mmaccel.programs.video_qa.generator import Figures
from mmaccel.programs.video_qa.qa import QASettings
from mmaccel.programs.video_qa.questions import VideoQuestion

HAVE = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAVE, reason="Ray is not installed: pip install 'mmaccel[ray]'")
VIDEOS, ASKED = 10, ("what?", "where is it?")


# --- without a cluster ------------------------------------------------------------------------------------------------
def ask(videos: int, *more: VideoQuestion) -> list[VideoQuestion]:
    found = [
        VideoQuestion(f"{video} {words}", f"{video}.mp4", f"{video}.mp4", words)
        for words in ASKED
        for video in range(videos)
    ]
    return [*found, *more]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Ray were there."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def settings(size: int | str = 2, model: str = "tiny", **more: Any) -> QASettings:
    return QASettings(model, get_recipe("divprune"), frames=4, max_new_tokens=6, batch_size=size, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", (1, 3, 50))
@pytest.mark.parametrize("size", (1, 2, "auto"))
def test_jobs_keep_together_what_is_answered_together(size: int | str, workers: int, installed: None) -> None:
    """A worker makes of its job the windows that one machine makes of the whole set."""
    of = settings(size)
    questions = ask(40, VideoQuestion("bad", error="no JSON."), VideoQuestion("far", "x", "s3://x.mp4", "what?"))
    jobs = ClusterAnswerer(of)._jobs(questions, set(), workers)
    windows = [window for asked, _ in jobs for window in of.windows(asked)]
    assert [[q.name for g in w for q in g] for w in windows] == [
        [q.name for g in w for q in g] for w in of.windows(questions)
    ]
    assert len(jobs) >= min(len(windows), 4 * workers)
    assert all(len(list(of.windows(asked))) <= 4 for asked, _ in jobs)
    paths = {one.name: one.path for asked, _ in jobs for one in asked}
    assert paths["0 what?"] == str(Path.cwd() / "0.mp4") and paths["far"] == "s3://x.mp4"
    assert pickle.loads(pickle.dumps(jobs)) == jobs


def test_jobs_of_a_run_that_goes_on(installed: None) -> None:
    of, questions = settings(1), ask(6)
    answerer = ClusterAnswerer(of)
    # one of the two questions of a video, then both
    (asked, done), *rest = answerer._jobs(questions, {"0 what?", "1 what?", "1 where is it?"}, 1)
    assert [one.name for one in asked] == ["0 what?", "0 where is it?"] and done == {"0 what?"}
    assert "1 what?" not in {one.name for asked, _ in rest for one in asked} and not any(done for _, done in rest)
    assert answerer._jobs(questions, {one.name for one in questions}, 1) == []


def node(alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"Alive": alive, "Resources": resources}


@pytest.mark.ray
@needs_ray
@pytest.mark.parametrize(
    ("nodes", "device", "places"),
    [
        ([node(CPU=16, GPU=2), node(CPU=64)], None, (2, 4, 1)),
        ([node(CPU=16, GPU=2), node(CPU=9, GPU=3)], "cuda", (5, 3, 1)),
        ([node(CPU=2, GPU=4), node(alive=False, CPU=8, GPU=8)], None, (4, 0, 1)),
        ([node(CPU=16, GPU=2), node(CPU=7)], "cpu", (5, 4, 0)),
        ([node(CPU=2)], None, (1, 2, 0)),
        ([node(memory=1e9), node(CPU=3), node(CPU=11)], None, (2, 4, 0)),
    ],
)
def test_a_worker_for_every_gpu_or_four_cpus(
    nodes: list[dict[str, Any]], device: str | None, places: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    assert cluster._places(device) == places


@pytest.mark.ray
@needs_ray
def test_a_cluster_without_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.nodes", lambda: [node(CPU=8)])
    with pytest.raises(MmaccelError, match="has no GPU"):
        cluster._places("cuda")


def test_what_stands_in_the_way_is_said(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MmaccelError, match="got 'cuda:1'"):
        ClusterAnswerer(settings(device="cuda:1"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MmaccelError, match=r"mmaccel\[ray\]"):
        ClusterAnswerer(settings())


def test_the_model_is_named_for_every_machine(installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    assert ClusterAnswerer(settings(model="org/tiny")).settings.model == "org/tiny"
    monkeypatch.chdir(tmp_path)
    assert ClusterAnswerer(settings(model="tiny")).settings.model == str(tmp_path / "tiny")


def test_a_worker_tells_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records as they come, what was said with the next of them, the figures of each job for itself."""
    questions = ask(1)

    class Answerer:
        def __init__(self, of: QASettings, say: Any) -> None:
            self.say, self.generator = say, SimpleNamespace(figures=Figures())

        @property
        def figures(self) -> Figures:
            return self.generator.figures

        def run(self, questions: list[VideoQuestion], done: set[str]) -> Iterator[dict[str, Any]]:
            for one in questions:
                self.figures.questions += 1
                self.say("smaller")
                yield one.record("x")
            if done:
                raise MmaccelError("no room")

    def told(worker: cluster._Worker, *job: Any) -> list[list[Any]]:
        return [list(map(cluster._unpack, rows["output"])) for rows in worker({"job": [cluster._pack(job)]})]

    monkeypatch.setattr(cluster, "VideoAnswerer", Answerer)
    worker = cluster._Worker(settings(), ())
    for done in (set(), {"0 what?"}):
        *records, last = told(worker, questions, done)
        assert records == [["smaller", one.record("x")] for one in questions]
        figures = last[-1]
        assert figures.questions == 2 and ("loading" in figures.seconds) == (not done)
        assert [str(one) for one in last[:-1]] == (["no room"] if done else [])

    def refused(of: QASettings, say: Any) -> None:
        raise MmaccelError("no such model")

    monkeypatch.setattr(cluster, "VideoAnswerer", refused)
    ((error,),) = told(cluster._Worker(settings(), ()), questions, set())
    assert isinstance(error, MmaccelError) and str(error) == "no such model"


@pytest.mark.parametrize("address", ("nonsense", "ray://127.0.0.1:10001", "127.0.0.1:x", ":1", "127.0.0.1:99999"))
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(MmaccelError, match="The address of a Ray cluster must be auto"):
        cluster._reach(address)


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(
            MmaccelError, match=f"No Ray cluster answers at '127.0.0.1:{port}' \\(Connection refused\\)"
        ):
            cluster._reach(f"127.0.0.1:{port}")
    with pytest.raises(MmaccelError, match="No Ray cluster answers at 'no.such.invalid:6379'"):
        cluster._reach("no.such.invalid:6379")


@pytest.mark.parametrize(
    ("answer", "said"), [(b"HTTP/1.1 400 Bad Request\r\n\r\n", "gRPC"), (b"", "gRPC"), (None, "timed out")]
)
def test_somebody_else_listens(answer: bytes | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_PATIENCE", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            peer, _ = server.accept()
            peer.recv(100)
            if answer is None:
                peer.recv(100)
            else:
                peer.sendall(answer)
            peer.close()

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(MmaccelError, match=f"No Ray cluster answers at .*{said}"):
            cluster._reach(f"127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.parametrize(
    ("address", "failing", "tries"), [("auto", 0, 1), ("auto", 2, 3), ("auto", 9, 3), ("10.0.0.1:6379", 9, 1)]
)
def test_a_start_that_fails_is_tried_again(
    address: str, failing: int, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is begun is taken down before; somebody else's cluster is asked once."""
    did: list[str] = []

    def init(**options: Any) -> None:
        did.append(f"init {options['address']}")
        if len([one for one in did if one.startswith("init")]) <= failing:
            raise TimeoutError("too slow.\nat line 3")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init, shutdown=lambda: did.append("down")))
    if failing >= tries:
        with pytest.raises(
            MmaccelError, match=rf"^Cannot use the Ray cluster '{address}' \(too slow\); see 'ray status'"
        ):
            cluster._join(address, did.append)
    else:
        cluster._join(address, did.append)
    begin = f"init {None if address == 'auto' else address}"
    assert did == [begin, *["Ray did not start (too slow); trying again.", "down", begin] * (tries - 1)]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            '\x1b[36mray::MapWorker(F).submit()\x1b[39m (pid=7, repr=F)\n  File "f.py", line 9, in f\n    raise x\n'
            "ZeroDivisionError: a fault: ours\n\nThe above exception was the direct cause of the following exception:\n\n"
            "\x1b[36mray::MapWorker(F).submit()\x1b[39m (pid=7)\nray.exceptions.UserCodeException: UDF failed.",
            "ZeroDivisionError: a fault: ours",
        ),
        (
            'The actor died.\n  File "f.py", line 9\n    ^^^^\ntorch.AcceleratorError: no GPU.\n',
            "torch.AcceleratorError: no GPU",
        ),
        ('The actor died.\n  File "f.py", line 9\nAssertionError\n', "AssertionError"),
        ("No progress for 1800 s.\nSee the log.", "RuntimeError: No progress for 1800 s"),
        ("", "RuntimeError: RuntimeError"),
    ],
)
def test_a_fault_is_one_line(said: str, why: str) -> None:
    assert cluster._fault(RuntimeError(said)) == why


# --- on a cluster -----------------------------------------------------------------------------------------------------
class Mortal(cluster._Worker):
    """A worker that is killed before its ``at``-th record is told, the first that comes so far; at 0 while it is made."""

    folder, at = Path(), 3

    def __init__(self, of: QASettings) -> None:
        super().__init__(of)
        self.answered = 0
        (self.folder / f"born-{os.getpid()}").touch()
        self._die()

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, list[str]]]:
        for rows in super().__call__(batch):
            self.answered += 1
            self._die()
            yield rows

    def _die(self) -> None:
        if self.answered == self.at:
            try:
                (self.folder / "killed").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of two questions about each of ten clips, one of which is broken."""
    root = tmp_path_factory.mktemp("ray")
    for video in range(VIDEOS):
        film(root / f"{video}.mp4", 6 + video % 3)
    (root / "3.mp4").write_text("no film")
    lines = [{"video": f"{video}.mp4", "question": words} for video in range(VIDEOS) for words in ASKED]
    (root / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root / "q.jsonl"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray-model") / "tiny"
    zoo.model("qwen2_5_vl").save_pretrained(folder)
    zoo.processor("qwen2_5_vl").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def machine() -> Iterator[None]:
    """The Ray that runs here, which must have two CPUs, or else a small one of this machine alone."""
    import ray

    # as a run that connects by itself has it
    for name, value in cluster._RAY.items():
        os.environ.setdefault(name, value)
    try:
        ray.init("auto", log_to_driver=False)
    except ConnectionError:
        ray.init(num_cpus=2, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def two(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers."""
    monkeypatch.setattr(cluster, "_CPUS", 1)


def command(questions: Path, out: Path, model: Path, *more: object) -> list[str]:
    words = [questions, "-o", out, "--model", model, "--frames", 4, "--max-new-tokens", 6, "--batch-size", 2, *more]
    return ["video-qa", *map(str, words)]


def lines(path: Path) -> list[dict[str, Any]]:
    """The records in an order of their own, each once."""
    found = sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda one: one["id"])
    assert len({one["id"] for one in found}) == len(found)
    return found


@pytest.mark.ray
@needs_ray
def test_a_wrong_address_is_one_sentence(questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said before a model is loaded, and nothing is left that would keep the same command from going on."""
    argv = command(questions, tmp_path / "a.jsonl", Path("org/tiny"), "--ray", "127.0.0.1:1")
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "No Ray cluster answers at '127.0.0.1:1'" in said
    assert (tmp_path / "a.jsonl").read_bytes() == b""


@pytest.mark.ray
@needs_ray
def test_a_slow_start_is_waited_for(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The first start is given no time at all; what was begun is gone, and the second start comes up."""
    import ray

    if ray.is_initialized():
        pytest.skip("this process is connected to a cluster already")
    monkeypatch.setenv("RAY_gcs_server_port_wait_time_s", "0")
    said: list[str] = []

    def say(sentence: str) -> None:
        said.append(sentence)
        if "trying again" in sentence:
            monkeypatch.delenv("RAY_gcs_server_port_wait_time_s")

    with cluster._connected("auto", say):
        assert cluster._places("cpu")[0] >= 1
    assert not ray.is_initialized()
    connecting, again = said
    assert connecting.startswith("Connecting to Ray") and again.startswith("Ray did not start (")
    assert capfd.readouterr().err == ""


@pytest.mark.ray
@needs_ray
@pytest.mark.parametrize("at", (0, 1, 3))
def test_a_lost_worker_loses_no_answer(
    at: int,
    questions: Path,
    model: Path,
    tmp_path: Path,
    two: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Two workers, one killed at its start or in mid-run; the answers of one machine, each once, and a run that goes on."""
    from ray import cloudpickle

    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    assert main([*command(questions, here, model), "--json"]) == 3
    alone = json.loads(capfd.readouterr().out)
    # a run that was broken off in its first window
    there.write_text("".join(here.read_text().splitlines(keepends=True)[:3]))
    (tmp_path / "there.jsonl.run.json").write_bytes((tmp_path / "here.jsonl.run.json").read_bytes())
    begun = there.read_text()

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(cluster, "_Worker", Mortal)
    monkeypatch.setattr(Mortal, "folder", tmp_path)
    monkeypatch.setattr(Mortal, "at", at)
    assert main([*command(questions, there, model), "--ray", "auto", "--json"]) == 3
    out, err = capfd.readouterr()
    report = json.loads(out)

    # one that dies at its start may not be replaced before the other has done all
    born = len(list(tmp_path.glob("born-*")))
    assert (tmp_path / "killed").exists() and (born == 3 if at else born >= 2)
    assert there.read_text().startswith(begun) and lines(there) == lines(here) and len(lines(here)) == 20
    assert report["taken_over"] == 3 and report["workers"] == 2
    assert report["answered_now"] == 15 and report["failed"] == 2 and report["seconds"]["loading"] > 0
    assert report["visual_tokens"] == pytest.approx(alone["visual_tokens"], rel=0.5)
    assert 0 < report["model_share"] < 1
    # what is there, and what failed; of Ray there is nothing
    first, *failed = err.splitlines()
    assert first.startswith("3 of 20 answers")
    assert sorted(line.split(":")[0] for line in failed) == [one["id"] for one in lines(there) if "error" in one]


class Faulty(cluster._Worker):
    """A worker that is not as it should be."""

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, list[str]]]:
        raise ZeroDivisionError("a fault of ours")


@pytest.mark.ray
@needs_ray
def test_a_fault_ends_the_run_with_a_sentence(
    questions: Path, model: Path, two: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(cluster, "_Worker", Faulty)
    asked = [VideoQuestion("1", "1.mp4", str(questions.parent / "1.mp4"), "what?")]
    with pytest.raises(
        MmaccelError, match=r"^Ray gave up \(ZeroDivisionError: a fault of ours\); finished answers are kept"
    ):
        list(ClusterAnswerer(settings(model=str(model))).run(asked))


@pytest.mark.ray
@needs_ray
def test_a_model_that_no_worker_can_load(questions: Path, tmp_path: Path, two: None) -> None:
    asked = [VideoQuestion("1", "1.mp4", str(questions.parent / "1.mp4"), "what?")]
    with pytest.raises(MmaccelError, match=r"no folder '\./none'"):
        list(ClusterAnswerer(settings(model="./none")).run(asked))
