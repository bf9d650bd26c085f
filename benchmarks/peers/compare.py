"""How do the policies for the KV cache compare with those of a peer, on the same model, prompt and kept length?

Two processes hold the same language model in float32: mmaccel in a LLaVA that sees the picture, the peer in a text model that
reads the embeddings which the LLaVA made of picture and text. The peer has an environment of its own, made with pip from the
package index; what it does not need in another version it shares with this one. Both sides are measured in turn within one
run: which keys stay, bytes of the cache, most bytes alive (as the allocator counts them), and process seconds of the text
model in the prompt and in the steps behind it. A side is also compared with itself without compression, since each uses a
version of transformers of its own.

    python benchmarks/peers/compare.py --out benchmarks/results/peers-kvpress-cpu.json --update benchmarks/README.md
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from mmaccel.cli.shared.text import markdown, put_between

HERE = Path(__file__).parent
#: what both sides know by the same name, and where their answers may differ although both are right
POLICIES = {
    "streaming-llm": "",
    "knorm": "",
    "keydiff": "",
    "lagkv": "keys are ranked within stretches, so that all stretches tie for the last places; torch.topk breaks a tie as it "
    "happens, mmaccel by the lower place",
    "tova": "",
    "snapkv": "",
    "pyramidkv": "kvpress rounds every layer by itself and keeps the same number everywhere, without a word, if the last layer "
    "would have fewer keys than the window; mmaccel's layers sum to the budget. Hence a pyramid of 10 and a window of 8 here",
    "adakv": "kvpress masks what it drops and frees nothing; its split (`safeguard:0.2` here) is not that of the "
    "paper, which mmaccel's recipe `adakv` follows",
    "observed-attention": "kvpress needs eager attention and holds the map",
}
IMAGE = 9


#: what the environment of a peer was tested with
PACKAGES = {"kvpress": ["kvpress==0.5.5", "transformers==5.2.0"]}


def environment(folder: Path, packages: Sequence[str], alone: Sequence[str] = ()) -> Path:
    """The Python of a virtual environment with ``packages`` from the package index, made if it is not there; those in ``alone``
    come without what they depend on."""
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        where = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        site = subprocess.run([python, "-c", where], check=True, capture_output=True, text=True).stdout.strip()
        # torch need not be there twice
        (Path(site) / "zz_shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
        install = [str(python), "-m", "pip", "install", "--quiet", "--no-warn-conflicts"]
        subprocess.run([*install, *packages], check=True)
        if alone:
            subprocess.run([*install, "--no-deps", *alone], check=True)
        (folder / "made").touch()
    return python


class Process:
    """A side in a process of its own."""

    def __init__(self, python: Path | str, script: str, threads: int, log: Path) -> None:
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [str(python), str(HERE / script), str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.script, self.log = script, log

    def __call__(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.script} ended:\n{self.log.read_text()[-3000:]}")
        return dict(json.loads(line))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


# --- models and prompts -----------------------------------------------------------------------------------------------
def random_model(
    side: int, text: int, layers: int, width: int
) -> tuple[LlavaForConditionalGeneration, dict[str, Tensor]]:
    """A LLaVA with random weights, 4 query heads to a key head, and a picture of ``side * side`` tokens between text."""
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=side * 4,
        patch_size=4,
    )
    language = LlamaConfig(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 256,
        max_position_embeddings=8192,
        # large enough for attention that is not nearly uniform
        initializer_range=0.06,
    )
    config = LlavaConfig(vision_config=vision, text_config=language, image_token_index=IMAGE, vision_feature_layer=-1)
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).eval()
    words = torch.randint(10, 1000, (2, text // 2), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([words[0], torch.full((side * side,), IMAGE), words[1]])[None]
    pixels = torch.randn(1, 3, side * 4, side * 4, generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def mini_llava() -> tuple[LlavaForConditionalGeneration, dict[str, Tensor]]:
    """The model that comes with mmaccel, two pictures of a gradient, and a question about them."""
    import mmaccel

    folder = Path(mmaccel.__file__).parent / "models" / "mini-llava"
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder)
    ramp = torch.arange(112, dtype=torch.float32).expand(112, 112)
    pictures = [
        torch.stack([ramp, ramp.T, (ramp + ramp.T) / 2], -1) * 2,
        torch.stack([ramp.T, 111 - ramp, ramp], -1) * 2,
    ]
    images = [Image.fromarray(p.to(torch.uint8).numpy()) for p in pictures]
    content = [
        {"type": "image"},
        {"type": "image"},
        {"type": "text", "text": "What color is the large square on the left?"},
    ]
    asked = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(images=images, text=asked, return_tensors="pt")
    return model, {key: inputs[key] for key in ("input_ids", "attention_mask", "pixel_values")}


def save(model: LlavaForConditionalGeneration, inputs: dict[str, Tensor], folder: Path) -> int:
    """Write both models and both prompts; returns the number of tokens."""
    seen: dict[str, Tensor] = {}

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen["inputs_embeds"] = kwargs["inputs_embeds"]

    hook = model.model.language_model.register_forward_pre_hook(note, with_kwargs=True)
    with torch.inference_mode():
        model(**inputs, logits_to_keep=1)
    hook.remove()
    text = LlamaForCausalLM(model.config.text_config)
    text.model.load_state_dict(model.model.language_model.state_dict())
    text.lm_head.load_state_dict(model.lm_head.state_dict())
    model.save_pretrained(folder / "llava")
    text.save_pretrained(folder / "text")
    save_file({key: x.contiguous() for key, x in inputs.items()}, folder / "llava.safetensors")
    prompt = {"inputs_embeds": seen["inputs_embeds"].clone(), "attention_mask": inputs["attention_mask"].clone()}
    save_file(prompt, folder / "text.safetensors")
    return int(inputs["input_ids"].shape[1])


# --- figures ----------------------------------------------------------------------------------------------------------
def agreement(
    ours: Sequence[Sequence[Sequence[int]]],
    theirs: Sequence[Sequence[Sequence[int]]],
    scores: Sequence[Sequence[Sequence[float]]] = (),
) -> dict[str, Any]:
    """How many of the kept places ``[layer][head]`` both sides keep.

    Parameters
    ----------
    scores : ``[layer][head][place]``, what the peer thinks of every key.

    Returns
    -------
    ``kept``, ``peer_kept`` : mean number a layer keeps, over heads; ``same`` : of all places that a side keeps the share that
    both keep (Jaccard index over layers, heads and places); ``differing_heads`` : of how many heads, ``heads``, the places
    differ; ``ties`` : of the places that one side keeps, the share that scores as much, within 1e-5, as the lowest that the
    peer keeps in that head.
    """
    pairs = [(set(a), set(b)) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    rows = [head for layer in scores for head in layer]
    tied = 0
    for (a, b), row in zip(pairs, rows, strict=False):
        least = min(row[i] for i in b)
        tied += sum(abs(row[i] - least) <= 1e-5 * abs(least) for i in a ^ b)
    return {
        "ties": tied / max(1, sum(len(a ^ b) for a, b in pairs)),
        "kept": sum(len(a) for a, _ in pairs) / len(pairs),
        "peer_kept": sum(len(b) for _, b in pairs) / len(pairs),
        "same": sum(len(a & b) for a, b in pairs) / max(1, sum(len(a | b) for a, b in pairs)),
        "differing_heads": sum(a != b for a, b in pairs),
        "heads": len(pairs),
    }


def paired(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Medians of four series taken in turn, and of their ratios run by run."""

    def ratio(a: str, b: str) -> float:
        return statistics.median(x / y for x, y in zip(samples[a], samples[b], strict=True))

    return {
        **{name: statistics.median(values) for name, values in samples.items()},
        "to_bare": ratio("ours", "ours_bare"),
        "peer_to_bare": ratio("peer", "peer_bare"),
        "to_peer": ratio("ours", "peer"),
    }


class Pair:
    """Both sides with the same model and prompt."""

    def __init__(self, ours: Process, peer: Process, kept: int, tokens: int, steps: int) -> None:
        self.sides = {"ours": ours, "peer": peer}
        self.work = {"kept": kept, "tokens": tokens, "steps": steps}
        self.bare = {
            side: {**self.ask(side, "bare", "keys"), **self.ask(side, "bare", "memory")} for side in self.sides
        }

    def ask(self, side: str, policy: str, what: str) -> dict[str, Any]:
        return self.sides[side](do=what, policy=policy, **self.work)

    def keep(self, policy: str) -> dict[str, Any]:
        """What both sides keep under one policy, and the bytes."""
        found = {side: {**self.ask(side, policy, "keys"), **self.ask(side, policy, "memory")} for side in self.sides}
        sides = {**found, **{f"{side}_bare": answer for side, answer in self.bare.items()}}
        return {
            "policy": policy,
            **agreement(found["ours"]["positions"], found["peer"]["positions"], found["peer"]["scores"]),
            **{
                name: {side: answer[name] for side, answer in sides.items()}
                for name in ("bytes", "prefill_peak", "decode_peak")
            },
        }

    def time(self, policy: str, runs: int) -> dict[str, Any]:
        """How long both sides take under one policy and without, and whether they answer alike."""
        order = [("ours", policy), ("peer", policy), ("ours", "bare"), ("peer", "bare")]
        taken: dict[str, list[dict[str, Any]]] = {"ours": [], "peer": [], "ours_bare": [], "peer_bare": []}
        for run in range(runs + 1):
            for side, name in order[run % 4 :] + order[: run % 4]:
                taken[side if name == policy else f"{side}_bare"].append(self.ask(side, name, "time"))
        # the first of each is the warm-up
        return {
            "same_answer": taken["ours"][0]["tokens"] == taken["peer"][0]["tokens"],
            **{
                f"{what}_s": paired({side: [run[f"{what}_s"] for run in timed[1:]] for side, timed in taken.items()})
                for what in ("prefill", "decode")
            },
        }


def table(result: Mapping[str, Any]) -> str:
    """One table per model, the losses marked."""
    versions, peer = result["versions"], result["peer"]
    parts = [
        f"{peer} {versions['peer'][peer]} on transformers {versions['peer']['transformers']}, mmaccel on "
        f"{versions['ours']['transformers']}, both on torch {versions['ours']['torch']}, float32, {result['machine']}, "
        f"{result['date']}. Medians of {result['runs']} runs in turn; {result['steps']} decode steps. `same keys` is the share "
        f"of kept keys that both keep. Figures are mmaccel's / {peer}'s: MiB of the cache; MiB by which the most bytes alive "
        "fell against the same side without compression; and process seconds of the text model with, in brackets, the ratio to "
        f"the same side without. Made by `{result['command']}`.",
    ]
    for model in result["models"]:
        rows = [
            ["policy", "kept", "same keys", "same answer", "KV", "peak in prefill", "in decode", "prefill", "decode"]
        ]
        for row in model["rows"]:

            def both(figures: Mapping[str, float]) -> str:
                return f"{figures['ours'] / 2**20:.2f} / {figures['peer'] / 2**20:.2f}"

            def less(figures: Mapping[str, float]) -> str:
                return both({side: figures[f"{side}_bare"] - figures[side] for side in ("ours", "peer")})

            def time(t: Mapping[str, float]) -> str:
                return f"{t['ours']:.3f} ({t['to_bare']:.2f}) / {t['peer']:.3f} ({t['peer_to_bare']:.2f})"

            kept = f"{row['kept']:.4g}" + ("" if row["kept"] == row["peer_kept"] else f" / {row['peer_kept']:.4g}")
            rows.append(
                [
                    f"`{row['policy']}`",
                    kept,
                    "all" if row["same"] == 1 else f"{row['same']:.2%}" + (", rest ties" if row["ties"] == 1 else ""),
                    {True: "yes", False: "no", None: "not timed"}[row.get("same_answer")],
                    both(row["bytes"]),
                    less(row["prefill_peak"]),
                    less(row["decode_peak"]),
                    *(time(row[part]) if part in row else "not timed" for part in ("prefill_s", "decode_s")),
                ]
            )
        parts += ["", f"**{model['name']}**, {model['tokens']} tokens, {model['kept']} kept.", "", markdown(rows)]
        slower = [
            f"`{row['policy']}` in {what} ({row[f'{what}_s']['to_peer']:.2f} times the peer's time)"
            for row in model["rows"]
            for what in ("prefill", "decode")
            if row.get(f"{what}_s", {"to_peer": 0.0})["to_peer"] > 1.02
        ]
        if any("prefill_s" in row for row in model["rows"]):
            parts += ["", f"Slower than the peer: {', '.join(slower) or 'none'}."]
    notes = [f"`{name}`: {why}." for name, why in POLICIES.items() if why]
    return "\n".join([*parts, "", " ".join(["Where the sides differ by design:", *notes])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default="kvpress", choices=PACKAGES)
    parser.add_argument(
        "--environments", type=Path, default=Path.home() / ".cache" / "mmaccel" / "peers", help="folder"
    )
    parser.add_argument("--models", nargs="+", default=["random", "mini-llava"], choices=["random", "mini-llava"])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--side", type=int, default=44, help="the random model's picture makes side * side tokens")
    parser.add_argument("--text", type=int, default=112)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--share", type=float, default=0.25, help="of the keys that stay")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--runs", type=int, default=5, help="timed in turn; 0 times nothing")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None, help="write JSON here")
    parser.add_argument("--update", type=Path, default=None, help="write the tables between the marks of this page")
    args = parser.parse_args()
    python = environment(args.environments / args.peer, PACKAGES[args.peer])
    made = {
        "random": lambda: random_model(args.side, args.text, args.layers, args.width),
        "mini-llava": mini_llava,
    }
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "date": date.today().isoformat(),
        "machine": f"a CPU ({platform.machine()}), threads: {args.threads}",
        "peer": args.peer,
        "steps": args.steps,
        "runs": args.runs,
        "versions": {},
        "models": [],
    }
    with tempfile.TemporaryDirectory() as work:
        for name in args.models:
            folder = Path(work) / name
            tokens = save(*made[name](), folder)
            ours = Process(sys.executable, "with_mmaccel.py", args.threads, folder / "ours.log")
            peer = Process(python, f"with_{args.peer}.py", args.threads, folder / "peer.log")
            for side, process in (("ours", ours), ("peer", peer)):
                result["versions"][side] = process(do="load", folder=str(folder))["versions"]
            kept = int(tokens * args.share)
            pair = Pair(ours, peer, kept, tokens, args.steps)
            rows: list[dict[str, Any]] = []
            result["models"].append({"name": name, "tokens": tokens, "kept": kept, "rows": rows})

            def write() -> None:
                if args.out:
                    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
                if args.update:
                    put_between(args.update, f"peers-{args.peer}", table(result))

            for policy in args.policies:
                rows.append(pair.keep(policy))
                print(f"{name:<11}{policy:<20}same keys {rows[-1]['same']:.4f}", flush=True)
                write()
            for row in rows if args.runs else []:
                row |= pair.time(row["policy"], args.runs)
                print(
                    f"{name:<11}{row['policy']:<20}same answer {row['same_answer']}, time / peer's: "
                    f"prefill {row['prefill_s']['to_peer']:.2f}, decode {row['decode_s']['to_peer']:.2f}",
                    flush=True,
                )
                write()
            ours.close()
            peer.close()


if __name__ == "__main__":
    main()
