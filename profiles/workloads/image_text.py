"""Tar shards of JPEGs of 500 x 375 with captions of 5 to 30 words, in batches of 16 of 224 x 224 with their tokens.

The peer is webdataset with a buffer of 1,000 samples to shuffle in, Pillow, torchvision's transforms, and transformers' call of
the same tokenizer for a batch.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from profiles.workloads.vision import v2
from profiles.workloads.work import WORKERS, Like, Work, photograph

BATCH, SIDE, IN_SHARD, SHARDS, NUM_TOKENS = 16, 224, 128, 6, 4000
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]  # CLIP's


def write(folder: Path, scale: float) -> int:
    num = 2 * max(1, round(SHARDS * scale / 2))  # as many for each worker
    rng = np.random.default_rng(0)
    words = ["".join(map(chr, rng.integers(97, 123, size))) for size in rng.integers(1, 10, 3000)]
    captions = [" ".join(rng.choice(words, rng.integers(5, 31))) for _ in range(num * IN_SHARD)]
    (folder / "shards").mkdir()
    for shard in range(num):
        with tarfile.open(folder / f"shards/{shard:05}.tar", "w") as archive:
            for number in range(shard * IN_SHARD, (shard + 1) * IN_SHARD):
                file = io.BytesIO()
                photograph(np.random.default_rng(number), 500, 375).save(file, "JPEG", quality=90)
                for extension, data in (("jpg", file.getvalue()), ("txt", captions[number].encode())):
                    member = tarfile.TarInfo(f"{number:08}.{extension}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    write_tokenizer(folder / "tokenizer", captions)
    return num * IN_SHARD // BATCH


def write_tokenizer(folder: Path, texts: list[str]) -> None:
    """Pairs of bytes, as CLIP's is."""
    folder.mkdir()
    special = {"pad_token": "<pad>", "bos_token": "<start>", "eos_token": "<end>"}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=NUM_TOKENS, special_tokens=[*special.values()], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    ends = [("<start>", 1), ("<end>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<start> $A <end>", special_tokens=ends)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def peers(folder: Path) -> dict[str, Iterable[Any]]:
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    bicubic = v2.InterpolationMode.BICUBIC
    transform = v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop((SIDE, SIDE), scale=(0.9, 1.0), interpolation=bicubic, antialias=True),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
            v2.ToPureTensor(),
        ]
    )

    def joined(samples: list[tuple[torch.Tensor, str]]) -> dict[str, Any]:
        texts = [text for _, text in samples]
        tokens = tokenizer(texts, padding=True, truncation=True, max_length=77, return_tensors="pt")
        return {"image": torch.stack([image for image, _ in samples]), **tokens}

    shards = [str(path) for path in sorted((folder / "shards").iterdir())]
    data = webdataset.WebDataset(shards, shardshuffle=100).shuffle(1000).decode("pil").to_tuple("jpg", "txt")
    data = data.map_tuple(transform).batched(BATCH, collation_fn=joined, partial=False)
    return {"webdataset": webdataset.WebLoader(data, batch_size=None, **WORKERS)}


FIELDS = {
    "image": Like(torch.float32, (BATCH, 3, SIDE, SIDE), -MEAN[0] / STD[0], (1 - MEAN[2]) / STD[2]),
    "input_ids": Like(torch.int64, (BATCH, None), 0, NUM_TOKENS - 1),
    "attention_mask": Like(torch.int64, (BATCH, None), 0, 1),
}
WORK = Work("IMAGE_TEXT", BATCH, FIELDS, write, peers)
