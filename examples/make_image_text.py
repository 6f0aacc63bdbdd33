"""Makes tar shards of pictures with captions, and a small tokenizer, for pipelines/image-text.yaml:
python examples/make_image_text.py FOLDER [NUMBER]. Needs `pip install 'loaderkit[tokenize]'`."""

import argparse
import io
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", type=Path)
parser.add_argument("num", type=int, nargs="?", default=256, metavar="NUMBER", help="pictures; default: %(default)s")
args = parser.parse_args()
folder, num = args.folder, args.num
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 50)}
SHAPES = ("disc", "square")
WORDS = ["<pad>", "<start>", "<end>", "<unknown>", "a", "on", "small", "large", *COLOURS, *SHAPES]


def drawn(rng: np.random.Generator) -> tuple[bytes, str]:
    """A JPEG, and what it shows."""
    front, back = rng.permutation([*COLOURS])[:2]
    shape, size = SHAPES[rng.integers(2)], int(rng.integers(40, 200))
    picture = Image.new("RGB", (256, 240), COLOURS[back])
    draw = ImageDraw.Draw(picture)
    (draw.ellipse if shape == "disc" else draw.rectangle)((20, 20, 20 + size, 20 + size), fill=COLOURS[front])
    file = io.BytesIO()
    picture.save(file, "JPEG")
    return file.getvalue(), f"a {'large' if size > 110 else 'small'} {front} {shape} on {back}"


(folder / "shards").mkdir(parents=True, exist_ok=True)
for first in range(0, num, 64):
    with tarfile.open(folder / f"shards/{first // 64:05}.tar", "w") as archive:
        for number in range(first, min(first + 64, num)):
            jpeg, caption = drawn(np.random.default_rng(number))
            for extension, data in (("jpg", jpeg), ("txt", caption.encode())):
                member = tarfile.TarInfo(f"{number:08}.{extension}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))

tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unknown>"))
tokenizer.normalizer = normalizers.Lowercase()
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
ends = [("<start>", WORDS.index("<start>")), ("<end>", WORDS.index("<end>"))]
tokenizer.post_processor = processors.TemplateProcessing(single="<start> $A <end>", special_tokens=ends)
special = {"pad_token": "<pad>", "bos_token": "<start>", "eos_token": "<end>", "unk_token": "<unknown>"}
(folder / "tokenizer").mkdir(exist_ok=True)
tokenizer.save(str(folder / "tokenizer/tokenizer.json"))
config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
(folder / "tokenizer/tokenizer_config.json").write_text(json.dumps(config))
print(f"{num} pictures are in {folder}")
