"""The command line: what it prints, as text and as JSON, and what it says when something is wrong."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tables
import torch
import zoo
from PIL import Image

import mmaccel
from mmaccel.cli import ask, doctor, main, selfcheck
from mmaccel.cli.shared import needs
from mmaccel.errors import MmaccelError
from mmaccel.media import files as media
from mmaccel.video import decode

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models with their processors, pictures, a folder of frames."""
    root = tmp_path_factory.mktemp("ask")
    for family in ("llava", "qwen2_5_vl", "llava_onevision"):
        zoo.model(family).save_pretrained(root / family)
        zoo.processor(family).save_pretrained(root / family)
    zoo.image(120, 90, 0).save(root / "a.png")
    zoo.image(60, 90, 1).save(root / "b.jpg")
    (root / "cut.jpg").write_bytes((root / "b.jpg").read_bytes()[:200])
    (root / "frames").mkdir()
    for i, frame in enumerate(zoo.clip(12, 96, 64, 0)):
        Image.fromarray(frame).save(root / "frames" / f"f{i}.png")
    (root / "empty").mkdir()
    return root


def output(capsys: pytest.CaptureFixture[str], *argv: object, status: int = 0) -> str:
    """What a command prints; on an error what it says on stderr, which must be one line."""
    capsys.readouterr()
    assert main([str(a) for a in argv]) == status
    out, err = capsys.readouterr()
    if status:
        assert out == ""
        assert err.count("\n") == 1
        assert "Traceback" not in err
    return err if status else out


# --- ask --------------------------------------------------------------------------------------------------------------
def test_ask_compares_full_and_accelerated(folder, capsys):
    argv = ["ask", "--model", folder / "llava", "--max-new-tokens", 4, folder / "a.png", "what?"]
    report = json.loads(output(capsys, *argv, "--json"))
    full, fast = report["full"], report["accelerated"]
    assert (full["visual_tokens"], full["visual_tokens_kept"]) == (36, 36)
    assert (fast["visual_tokens"], fast["visual_tokens_kept"]) == (36, 9)
    assert full["prompt_tokens"] == fast["prompt_tokens"]
    assert fast["kv_bytes"] < full["kv_bytes"]
    for run in (full, fast):
        assert 0 < run["first_token_seconds"] < run["total_seconds"]
        assert run["new_tokens"] == 4
        assert run["tokens_per_second"] > 0
    assert report["agreement"].keys() == {"same_answer", "same_leading_tokens", "kl", "kl_tokens"}
    assert report["recipe"]["name"] == "balanced"

    text = output(capsys, *argv)
    for words in ("visual tokens kept", "time to first token", "KV cache", "agreement"):
        assert words in text


def test_ask_warms_up_before_it_measures():
    model, lengths = zoo.model("llava"), []
    model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["inputs_embeds"].shape[1]), with_kwargs=True
    )
    given = zoo.processor("llava"), zoo.inputs("llava"), "none"
    measured = ask.answer(model, *given, 4)
    # kernels of a step must not be compiled inside the run that is measured
    assert 1 in lengths[: lengths.index(measured.prompt_tokens, 1)]
    assert measured.tokens_per_second > 0
    # two tokens have one interval, which says nothing
    assert ask.answer(model, *given, 2).tokens_per_second is None


def test_ask_with_everything_kept_agrees(folder, capsys):
    argv = ["ask", "--model", folder / "qwen2_5_vl", "--max-new-tokens", 4, folder / "a.png", folder / "b.jpg", "what?"]
    report = json.loads(output(capsys, *argv, "--retain", "1.0", "--json"))
    assert report["agreement"]["same_answer"]
    assert report["agreement"]["same_leading_tokens"] == 4
    assert report["agreement"]["kl"] < 1e-6 and report["agreement"]["kl_tokens"] == 4


@pytest.mark.parametrize("drafts", [["--lookup"], ["--draft", "self"], ["--draft", "draft"]])
def test_ask_with_drafts_is_lossless(folder, capsys, drafts):
    """With a recipe that drops all but a few tokens; the table counts forwards and drafts."""
    drafts = [str(zoo.draft("llava")) if one == "draft" else one for one in drafts]
    argv = ["ask", "--model", folder / "llava", "--max-new-tokens", 40, folder / "a.png", "what?", "--retain", 4]
    report = json.loads(output(capsys, *argv, "--recipe", "divprune", "--lossless", *drafts, "--json"))
    assert report["agreement"]["same_leading_tokens"] == report["full"]["new_tokens"] == 40
    drafting = report["accelerated"]["stats"]["drafting"]
    assert drafting["drafted"] > 0 and drafting["verifications"] <= 39
    assert "drafted tokens accepted" in output(capsys, *argv, "--recipe", "divprune", "--lossless", *drafts)


def test_ask_copies_nothing_from_its_warm_up():
    """The figures are those of a first answer: what was generated before anything is measured is no earlier answer."""
    settings = {"lossless": True, "lookup": True}
    given = zoo.model("qwen2_vl"), zoo.processor("qwen2_vl"), zoo.inputs("qwen2_vl")
    found = ask.answer(*given, "none", 6, settings=settings)
    assert len(set(found.ids[:4].tolist())) == 4
    assert found.stats["drafting"]["drafted_by"][0][:4] == [""] * 4


def test_ask_falls_back(folder, capsys):
    argv = ["ask", "--model", folder / "llava", folder / "a.png", "what?", "--recipe", "divprune", "--retain", 4]
    report = json.loads(output(capsys, *argv, "--fallback", "1.0", "--json"))
    assert report["agreement"]["same_answer"]
    assert report["accelerated"]["stats"]["fallback"]["reading"] == [1]
    assert "answer of reading" in output(capsys, *argv, "--fallback", "1.0")
    for value, words in (
        ("sure", "--fallback takes a threshold"),
        ("auto", "mmaccel tune --fallback"),
        ("7", "at most 1"),
    ):
        assert main([*map(str, argv), "--fallback", value]) == 2
        assert words in capsys.readouterr().err


def test_ask_says_what_a_shipped_model_knows(folder, capsys):
    """Whether it is named by its short name or its folder, or not at all."""
    said = [
        ask.KNOWN in output(capsys, "ask", *model, "--max-new-tokens", 2, folder / "a.png", "what?")
        for model in ([], ["--model", "mini-llava"], ["--model", ask.SHIPPED], ["--model", folder / "llava"])
    ]
    assert said == [True, True, True, False]


def test_a_server_drafts_for_one_request_at_a_time(capsys):
    assert main(["serve", "--draft", "small", "--several", "2"]) == 2
    assert "give --several 1" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ("snapkv", "h2o-decode", "tova"))
def test_ask_compares_steps_behind_a_compressed_cache(folder, capsys, recipe):
    """The first token comes before anything is evicted, and says nothing of it."""
    argv = ["ask", "--model", folder / "llava", "--max-new-tokens", 4, folder / "a.png", "what?"]
    agreement = json.loads(output(capsys, *argv, "--recipe", recipe, "--json"))["agreement"]
    assert agreement["kl_tokens"] > 1 and agreement["kl"] > 0
    text = output(capsys, *argv, "--recipe", recipe)
    assert f"{agreement['kl']:.4f} nats (mean; tokens compared: {agreement['kl_tokens']})" in text


def test_agreement_is_over_the_steps_behind_the_same_text():
    """Up to the first token that differs, whose distributions still follow the same text."""
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(0))

    def run(ids: list[int], logits: torch.Tensor) -> Any:
        return SimpleNamespace(ids=torch.tensor(ids), logits=logits, answer=str(ids))

    full = run([1, 2, 3, 4, 5, 6], logits)
    other = logits.clone()
    other[2:] = torch.randn(4, 11, generator=torch.Generator().manual_seed(1))
    terms = [
        float((p.exp() * (p - q)).sum()) for p, q in zip(logits.log_softmax(-1), other.log_softmax(-1), strict=True)
    ]
    for ids, steps in (([1, 2, 9, 4, 5, 6], 3), ([1, 2, 3, 4, 5, 6], 6), ([9, 2], 1), ([1, 2], 2)):
        found = ask.agreement(full, run(ids, other[: len(ids)]))
        assert found["kl_tokens"] == steps and found["kl"] == pytest.approx(sum(terms[:steps]) / steps, abs=1e-5)


def test_ask_passes_budget_and_options_on(folder, capsys):
    argv = ["ask", "--model", folder / "llava", "--max-new-tokens", 2, folder / "a.png", "what?", "--json"]
    report = json.loads(output(capsys, *argv, "--recipe", "fastv", "--retain", 6, "--set", "layer=3"))
    assert report["accelerated"]["visual_tokens_kept"] == 6
    assert report["recipe"]["stages"][0]["options"] == {"layer": 3}


def test_ask_about_a_folder_of_frames(folder, capsys):
    argv = ["ask", "--model", folder / "qwen2_5_vl", "--max-new-tokens", 2, "--frames", 4, folder / "frames", "what?"]
    report = json.loads(output(capsys, *argv, "--json"))
    assert report["full"]["visual_tokens"] == 2 * 4 * 6
    smaller = json.loads(output(capsys, *argv, "--recipe", "resize", "--set", "frames=0.5", "--retain", 0.5, "--json"))
    assert smaller["accelerated"]["visual_tokens"] == 4 * 6
    assert smaller["full"]["visual_tokens"] == 2 * 4 * 6


def test_frames_come_in_the_order_of_their_numbers(folder):
    clip = decode(folder / "frames", 12)
    assert np.array_equal(clip.frames, zoo.clip(12, 96, 64, 0))
    assert media.spaced(12, 4) == [1, 4, 7, 10]
    assert media.spaced(2, 4) == [0, 1]


def test_ask_about_a_video_file(folder, tmp_path, capsys):
    av = pytest.importorskip("av")
    clip = zoo.clip(16, 96, 64, 0)
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=4)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for frame in clip:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    read = decode(path, 8)
    assert (read.total, read.fps, read.indices) == (16, 4.0, [1, 3, 5, 7, 9, 11, 13, 15])
    assert np.abs(read.frames.astype(int) - clip[1::2]).mean() < 12
    argv = ["ask", "--model", folder / "qwen2_5_vl", "--max-new-tokens", 2, "--frames", 4, path, "what?", "--json"]
    assert json.loads(output(capsys, *argv))["full"]["visual_tokens"] == 2 * 4 * 6

    data = path.read_bytes()
    for share in (0.1, 0.6):
        (tmp_path / "cut.mp4").write_bytes(data[: int(len(data) * share)])
        with pytest.raises(mmaccel.MmaccelError, match=r"cut\.mp4.*(breaks off after|broken)"):
            decode(tmp_path / "cut.mp4", 16)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["{}/gone.png", "what?"], "does not exist"),
        (["{}/cut.jpg", "what?"], "cannot be read"),
        (["{}/gone.mp4", "what?"], "does not exist"),
        (["{}/empty", "what?"], "holds no frames"),
        (["{}/frames", "{}/empty", "what?"], "One video at a time"),
        (["{}/frames", "what?"], "takes no video"),
        (["{}/a.png", " "], "question is empty"),
        (["{}/a.png", ""], "question is empty"),
        (["{}/a.png"], "The question is missing after '"),
        (["{}/a.png", "{}/b.jpg"], "The question is missing after '"),
        (["{}/frames"], "The question is missing after '"),
        (["gone.3gp"], "The question is missing after 'gone.3gp'"),
        (["gone.PNG"], "The question is missing after 'gone.PNG'"),
        (["{}/a.png", "gone.png"], "The question is missing after 'gone.png'"),
        (["what?"], "The picture or video is missing; give its path before the question"),
        (["what is in a.png"], "The picture or video is missing; give its path before the question"),
        (["word " * 2000], "The picture or video is missing; give its path before the question"),
        ([], "The picture or video and the question are missing"),
        (["{}/a.png", "what?", "--recipe", "divprun"], "did you mean 'divprune'"),
        (["{}/a.png", "what?", "--retain", "0"], "keeps no token"),
        (["{}/a.png", "what?", "--set", "layer"], "OPTION=VALUE"),
        (["{}/a.png", "what?", "--frames", "0"], "--frames"),
        (["{}/a.png", "what?", "--model", "{}/nowhere"], "There is no folder"),
        (["{}/a.png", "what?", "--model", "{}/empty"], "Cannot load"),
        (["{}/a.png", "what?", "--model", "{}/llava_onevision", "--recipe", "vtc-cls"], "CLS"),
    ],
)
def test_ask_says_what_is_wrong(folder, capsys, argv, words):
    model = [] if "--model" in argv else ["--model", folder / "llava"]
    error = output(capsys, "ask", *[a.format(folder) for a in argv], *model, status=2)
    assert words in error
    assert error.startswith("mmaccel ask: ")


class Terminal(io.StringIO):
    """A terminal with what was typed."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("shown", [["a.png"], ["a.png", "b.jpg"], ["frames"], ["b.jpg", "frames"]])
def test_ask_asks_for_the_question_on_a_terminal(folder, capsys, monkeypatch, shown):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal("  what is it?\n"))
    monkeypatch.setattr(sys, "stderr", screen)
    video = "frames" in shown
    argv = ["ask", "--model", folder / ("qwen2_5_vl" if video else "llava"), *(folder / name for name in shown)]
    report = json.loads(output(capsys, *argv, "--max-new-tokens", 1, "--json"))
    assert report["question"] == "what is it?" and screen.getvalue().count("Question: ") == 1
    for typed in ("\n", ""):
        # nothing was typed, or the input was closed
        monkeypatch.setattr(sys, "stdin", Terminal(typed))
        assert main([str(word) for word in argv]) == 2 and "The question is empty; type one" in screen.getvalue()
    monkeypatch.setattr(sys, "stdin", Terminal("what?\n"))
    assert main(["ask", str(folder / "gone.png")]) == 2 and "does not exist" in screen.getvalue()
    # a pipe has nobody to ask
    monkeypatch.setattr(sys, "stdin", io.StringIO("what?\n"))
    assert main([str(word) for word in argv]) == 2 and "The question is missing after" in screen.getvalue()


def test_ask_says_that_a_count_above_what_a_picture_has_keeps_it_whole(folder, capsys):
    argv = ["ask", "--model", folder / "llava", folder / "a.png", "what?", "--recipe", "divprune", "--retain", 100]
    told = output(capsys, *argv, "--max-new-tokens", 1)
    assert (
        "divprune was asked to keep 100 tokens and keeps all of 1 of 1 pictures or clips, which have at most 36" in told
    )


def test_ask_refuses_families_it_does_not_know(folder, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    error = output(capsys, "ask", "--model", tmp_path, folder / "a.png", "what?", status=2)
    assert "'bert'" in error
    assert "qwen2_5_vl" in error


def test_ask_reads_safetensors_only(folder, tmp_path, capsys):
    import shutil

    shutil.copytree(folder / "llava", tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    torch.save(zoo.model("llava").state_dict(), tmp_path / "m" / "pytorch_model.bin")
    assert "Cannot load" in output(capsys, "ask", "--model", tmp_path / "m", folder / "a.png", "what?", status=2)


def test_ask_wants_a_model(folder, capsys, monkeypatch):
    monkeypatch.setattr(ask, "SHIPPED", folder / "nowhere")
    assert "--model" in output(capsys, "ask", folder / "a.png", "what?", status=2)
    monkeypatch.setattr(ask, "SHIPPED", folder / "llava")
    out = output(capsys, "ask", folder / "a.png", "what?", "--max-new-tokens", 1)
    assert "on cpu" in out or "on cuda" in out


def test_errors_can_be_traced(folder, capsys):
    assert main(["ask", "--debug", "--model", str(folder / "llava"), str(folder / "gone.png"), "what?"]) == 2
    assert "Traceback" in capsys.readouterr().err


# --- the rest ---------------------------------------------------------------------------------------------------------
def test_methods_lists_what_there_is(capsys):
    listed = json.loads(output(capsys, "methods", "--json"))
    known = mmaccel.methods()
    assert {m["name"] for m in listed["methods"]} == set(known)
    assert {r["name"] for r in listed["recipes"]} == set(mmaccel.recipes()) - set(known)
    by_name = {m["name"]: m for m in listed["methods"]}
    assert by_name["vtc-cls"]["needs"] == ["CLS attention"]
    assert by_name["fastv"]["needs"] == ["prompt attention"]
    assert by_name["divprune"]["needs"] == []
    assert by_name["snapkv"]["options"]["window"] == 32
    text = output(capsys, "methods", "--site", "cache")
    assert "snapkv" in text
    assert "divprune" not in text
    for name, cls in known.items():
        if cls.__module__.startswith("mmaccel."):
            assert cls.summary, f"{name} has no summary"


def test_the_tables_of_the_documentation_are_current():
    for page, made in (("methods/index.md", tables.method_tables()), ("families.md", tables.family_table())):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        assert made in text, f"run: python docs/making/tables.py docs/{page}"


def test_tables_are_written_between_the_markers(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- methods -->\nold\n<!-- /methods -->\nafter\n")
    tables.update(page)
    text = page.read_text()
    assert text.startswith("before\n<!-- methods -->\n| method |")
    assert text.endswith("<!-- /methods -->\nafter\n")
    page.write_text("<!-- families -->\nold\n<!-- /families -->\n<!-- methods -->\nold\n<!-- /methods -->\n")
    tables.update(page)
    text = page.read_text()
    assert "\nold\n" not in text and "| `qwen3_vl` | yes, any size |" in text and "| divprune |" in text
    page.write_text("nothing")
    with pytest.raises(MmaccelError, match="no markers"):
        tables.update(page)


def test_the_documentation_names_every_family():
    from mmaccel.families import families

    page = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    table = page.split("<!-- families -->")[1].split("<!-- /families -->")[0]
    assert [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")] == list(families())
    assert list(selfcheck.TINY) == list(families())


def test_the_table_of_families_is_true():
    from mmaccel.families import families, family_of

    for name, family in families().items():
        if name not in zoo.FAMILIES:
            assert needs.missing(name) == f"transformers>={family.since}"
            continue
        adapter = family_of(zoo.model(name), zoo.processor(name))
        assert (adapter.name, adapter.has_cls) == (name, family.facts.cls)
        assert (adapter.closed, adapter.whole, adapter.halves) == (family.closed, family.whole, family.halves)
        assert (family.facts.merging == "-") == ((family.closed or family.whole) is not None)
        assert family.facts.clips == ("video" in zoo.kinds(name))


def test_selfcheck_leaves_out_what_cannot_be_built(capsys, monkeypatch):
    monkeypatch.setattr(needs, "find_spec", lambda name: None)
    monkeypatch.setattr(selfcheck, "TINY", {name: selfcheck.TINY[name] for name in ("llava", "fast_vlm")})
    out = output(capsys, "selfcheck")
    assert "fast_vlm was left out: timm is not installed." in out and "1 of 1 families pass." in out
    assert main(["selfcheck", "--family", "fast_vlm"]) == 2
    assert "fast_vlm is built with timm, which is not installed; pip install 'timm'." in capsys.readouterr().err
    monkeypatch.setattr(needs, "version", lambda name: "5.22.1")
    monkeypatch.setattr(selfcheck, "TINY", {"qwen2_5_omni": None})
    assert main(["selfcheck", "--family", "qwen2_5_omni"]) == 2
    assert "qwen2_5_omni is built with transformers>=5.23, which is not installed" in capsys.readouterr().err


def test_doctor_reports(capsys):
    status = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert status == (1 if report["problems"] else 0)
    from mmaccel.families import REFUSED, families

    assert report["refused"] == REFUSED and REFUSED["mllama"] in doctor.render(report)
    assert len(report["families"]) == sum(len(family.model_types) for family in families().values())
    assert report["versions"]["torch"]
    assert "families are ready" in doctor.render(report)


def test_doctor_says_which_families_transformers_refuses_flash_attention(capsys):
    """Those that loading refuses because of the model; of the others it misses the package, or a GPU."""
    from transformers import AutoModelForImageTextToText

    report, said = json.loads(output(capsys, "doctor", "--json")), output(capsys, "doctor")
    listed = report["without_flash_attention"]
    for name in zoo.FAMILIES:
        config = zoo._family(name).config({}, len(zoo.tokenizer(name)))
        with pytest.raises((ValueError, ImportError, RuntimeError)) as caught:
            AutoModelForImageTextToText.from_config(config, attn_implementation="flash_attention_2")
        assert (config.model_type in listed) == ("does not support Flash Attention 2" in str(caught.value)), name
    assert "got_ocr2" in listed and "llava" not in listed
    assert "GotOcr2ForConditionalGeneration; transformers refuses flash attention, load it with sdpa" in said


def test_doctor_without_a_gpu_says_so_in_a_sentence(capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "every site of a recipe its definition in plain torch" in output(capsys, "doctor")
    assert json.loads(output(capsys, "doctor", "--json"))["devices"] == []


def test_doctor_has_no_problem_with_families_that_are_newer(capsys, monkeypatch):
    monkeypatch.setattr(needs, "version", lambda package: "5.17.0")
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "molmo2            not ready: needs transformers>=5.23" in said and "PROBLEM" not in said


def test_doctor_names_a_mismatched_torchvision(capsys, monkeypatch):
    import torchvision

    def missing(*args):
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(torchvision.ops, "nms", missing)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "DOES NOT match torch" in out
    assert "install both from one index" in out


def test_selfcheck_runs_families(capsys):
    report = json.loads(output(capsys, "selfcheck", "--family", "llava", "qwen3_vl", "--json"))
    assert [f["visual_tokens_kept"] for f in report["families"]] == [9, 6]
    assert all(f["problem"] is None and f["kv_bytes"] < f["kv_bytes_full"] for f in report["families"])
    out = output(capsys, "selfcheck", "--family", "smolvlm", "--recipe", "uniform", "--retain", 4)
    assert "1 of 1 families pass" in out
    assert "known are llava" in output(capsys, "selfcheck", "--family", "lava", status=2)


def test_help_teaches_with_examples(capsys):
    for command in ("quickstart", "ask", "eval", "compare", "methods", "doctor", "selfcheck"):
        assert main([command, "--help"]) == 0
        out = capsys.readouterr().out
        assert "examples:" in out
        assert "--json" in out
    assert main([]) == 2
    assert main(["ask", "a.png", "what?", "--retain", "much"]) == 2
    assert "a budget must be" in capsys.readouterr().err


@pytest.mark.full
def test_listing_methods_does_not_import_transformers():
    code = "import sys; from mmaccel.cli import main; main(['methods']); sys.exit('transformers' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, env={"PATH": "", "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr.decode()
    assert b"divprune" in done.stdout
