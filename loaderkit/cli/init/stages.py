"""Which stages fit what samples hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from loaderkit.cli.init.kinds import FoundSource
from loaderkit.cli.init.samples import Seen, SeenSamples

_LEAST_SIDE = 8  # of a volume, in each of its three dimensions
_LENGTH = 2048
_TOKENS = ("input_ids", "tokens")
_BESIDE_TOKENS = frozenset({"attention_mask", "token_type_ids", "special_tokens_mask", "position_ids"})


class Line(NamedTuple):
    """A stage of the file, its arguments, if any, and a comment."""

    name: str
    args: dict[str, Any] = {}  # noqa: RUF012 - read only
    comment: str = ""


_DECODED = {
    "picture": "uint8 pixels",
    "pictures": "a list of pictures",
    "video": "clips, of which only these frames are decoded",
    "audio": "four seconds, at a random place",
}
_MOVES = (
    Line("random_resized_crop", {"size": 224}, "as in torchvision's v2; to validate: resize, center_crop"),
    Line("random_horizontal_flip", {}, "p: 0.5; remove it where left and right differ in meaning"),
)
_NO_MOVES = (Line("resize", {"size": [224, 224]}, "no crop or flip, which a text beside it would not follow"),)


def as_tokens(found: FoundSource, seen: SeenSamples) -> FoundSource:
    """The same files as documents of tokens, if rows hold nothing else."""
    names = [name for name in _TOKENS if name in seen.fields]
    if found.section["kind"] not in ("parquet", "huggingface") or not names or "split" in found.section:
        return found
    if not _are_tokens(seen.fields[names[0]]) or not seen.fields.keys() <= {names[0], *_BESIDE_TOKENS}:
        return found
    column = {} if names[0] == "input_ids" else {"column": names[0]}
    return replace(found, section={**found.section, "kind": "tokens", **column}, packs=True)


def stages_for(found: FoundSource, seen: SeenSamples) -> list[Line]:
    """The stages from `read` on."""
    if found.packs:
        return _packed(seen)
    kinds = {name: few[0].kind for name, few in seen.fields.items()}
    pictures = [name for name, kind in kinds.items() if kind in ("picture", "video")]
    volumes: list[str] = []
    if found.section["kind"] in ("files", "tar") or found.section.get("samples") == "whole":
        volumes = [name for name, few in seen.fields.items() if _is_volume(few)]
    lines = [Line("read", {}, "the bytes, or the values, of a sample")]
    if seen.is_encoded:
        lines.append(_decode(kinds))
    if pictures:
        lines += _MOVES if found.moves else _NO_MOVES
    if volumes:
        lines += _of_volumes(volumes, [name for name in found.marks if name in volumes])
    size = 4 if volumes else 8 if {"video", "audio"} & {*kinds.values()} else 64
    left = {name: few for name, few in seen.fields.items() if name not in volumes}
    lines += _ends(_fitting(size, seen.num), _unequal(left))
    if pictures:
        lines.append(Line("normalize", {"mean": "imagenet", "std": "imagenet"}, "(x / 255 - mean) / std, as float32"))
    return lines


def _packed(seen: SeenSamples) -> list[Line]:
    pack = Line("pack", {"length": _LENGTH, "window": 20000}, "input_ids, position_ids, document_ids, cu_seqlens")
    return [Line("read"), pack, *_ends(_fitting(8, seen.num_tokens // _LENGTH), {})]


def _decode(kinds: dict[str, str]) -> Line:
    args: dict[str, Any] = {}
    if masks := [name for name, kind in kinds.items() if kind == "mask"]:
        args["masks"] = masks
    if "video" in kinds.values():
        args["video"] = {"frames": 16, "stride": 4, "start": "random"}
    if "audio" in kinds.values():
        args["audio"] = {"rate": 16000, "seconds": 4, "channels": 1, "start": "random", "length": "num_samples"}
    return Line("decode", args, next((said for kind, said in _DECODED.items() if kind in kinds.values()), ""))


def _of_volumes(names: list[str], marked: list[str]) -> list[Line]:
    crop: dict[str, Any] = {"size": [96, 96, 96], "fields": names}
    if marked:
        crop |= {"foreground": marked[0], "labels": marked}
    return [
        Line("random_volume_crop", {**crop, "pad_if_needed": True}, "one window for all of them"),
        Line("random_volume_flip", {"fields": names}, "along each axis, p: 0.5"),
    ]


def hints(seen: SeenSamples) -> list[str]:
    """What cannot be seen in the data, and may be added."""
    kinds = {name: few[0].kind for name, few in seen.fields.items()}
    if chat := next((name for name, kind in kinds.items() if kind == "chat"), None):
        return [
            "The chats are lists of messages. A tokenizer makes tokens and labels of them (docs/jobs/sft.md), before `batch`:",
            f"  - tokenize: {{tokenizer: FOLDER, chat: {chat}, mask: prompt, max_length: {_LENGTH}}}",
        ]
    if text := next((name for name, kind in kinds.items() if kind == "text"), None):
        return [
            "Texts stay texts, a list in each batch. A tokenizer makes input_ids of them, before `batch`:",
            f"  - tokenize: {{tokenizer: FOLDER, text: {text}, max_length: {_LENGTH}}}",
        ]
    return []


def _ends(size: int, forms: dict[str, Any]) -> list[Line]:
    return [
        Line("batch", {"size": size, "drop_last": True, **forms}),
        Line("transfer", {"device": "auto"}, "to the GPU if there is one"),
    ]


def _fitting(size: int, num: int) -> int:
    """The largest power of two that is at most `size` and `num`, and at least 1."""
    return min(size, 1 << max(0, num.bit_length() - 1))


def _unequal(fields: dict[str, list[Seen]]) -> dict[str, Any]:
    """How `batch` takes arrays of unequal shape: of token ids the padding and its mask, of rows that differ in length
    padding, and of others, and of pictures in lists, lists."""
    ragged: dict[str, str] = {}
    pads: dict[str, int] = {}
    for name, few in fields.items():
        shapes = {one.shape for one in few if one.kind == "array"}
        if len(shapes) < 2:
            continue
        if name in _TOKENS or name == "labels" or name in _BESIDE_TOKENS:
            pads[name] = -100 if name == "labels" else 0
        else:
            ragged[name] = "pad" if {len(shape) for shape in shapes} == {1} else "list"
    forms: dict[str, Any] = {"ragged": ragged} if ragged else {}
    if pads:
        forms["pad_value"] = pads
        if "attention_mask" not in fields and (tokens := next((name for name in _TOKENS if name in pads), None)):
            forms["attention_mask"] = {"attention_mask": tokens}
    return forms


def _is_volume(few: list[Seen]) -> bool:
    return all(one.kind == "array" and len(one.shape) == 3 and min(one.shape) >= _LEAST_SIDE for one in few)


def _are_tokens(few: list[Seen]) -> bool:
    return all(one.kind == "array" and len(one.shape) == 1 and "int" in one.dtype for one in few)
