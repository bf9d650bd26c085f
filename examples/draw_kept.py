"""Draw which visual tokens recipes keep: the picture, then one panel a recipe. Runs offline on the shipped model.

python examples/draw_kept.py kept.png --recipes divprune vtc-cls visionzip pool --retain 0.25
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from transformers import AutoModelForImageTextToText, AutoProcessor

import mmaccel
from mmaccel.media import draw
from mmaccel.media.picture import load_picture
from mmaccel.suite import make_item

SHIPPED = Path(mmaccel.__file__).parent / "models" / "mini-llava"


def main() -> None:
    """Parse the command line, run every recipe and write the sheet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="PNG to write")
    parser.add_argument("--picture", type=Path, default=None, help="default: a generated one")
    parser.add_argument("--recipes", nargs="+", default=["divprune", "vtc-cls", "visionzip", "pool"])
    parser.add_argument("--retain", type=float, default=0.25)
    parser.add_argument("--size", type=int, default=224, help="pixels along a panel")
    args = parser.parse_args()
    processor = AutoProcessor.from_pretrained(SHIPPED)
    model = AutoModelForImageTextToText.from_pretrained(SHIPPED, dtype=torch.float32).eval()
    picture = load_picture(args.picture or make_item("count", "test", 4).pictures()[0])
    side = model.config.vision_config.image_size
    picture = picture.resize((side, side), Image.Resampling.BICUBIC)
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "describe the picture"}]}]
    prompt = processor.apply_chat_template(chat, add_generation_prompt=True)
    inputs = processor(images=picture, text=prompt, return_tensors="pt")
    large = picture.resize((args.size, args.size), Image.Resampling.LANCZOS)
    panels = [("picture", large)]
    for name in args.recipes:
        with mmaccel.accelerated(model, name, retain=args.retain), torch.no_grad():
            model(**inputs)
            segment, reduction = model.mmaccel.layout.segments[0], model.mmaccel.reduction
            count = int(reduction.kept[0, segment.places].sum())
        title = f"{name}: {count} of {len(segment.places)}"
        panels.append((title, draw.kept(large, segment, reduction)))
    sheet = Image.new("RGB", (len(panels) * (args.size + 8) - 8, args.size + 18), "white")
    for i, (title, panel) in enumerate(panels):
        sheet.paste(panel, (i * (args.size + 8), 18))
        ImageDraw.Draw(sheet).text((i * (args.size + 8), 3), title, fill="black")
    sheet.save(args.out, optimize=True)


if __name__ == "__main__":
    main()
