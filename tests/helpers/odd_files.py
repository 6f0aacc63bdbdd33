"""Files that want to be something else: some 40 formats, whole or cut or bent, under names of the formats that are loaded.

What they would have done if anything obeyed them is told by the programs and modules they name: `PROGRAMS` and `MODULES`.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

PROGRAMS = (
    "gs", "gswin64c", "sh", "bash", "convert", "magick", "identify", "ffmpeg", "ffprobe", "djpeg", "python", "python3", "curl",
    "wget", "tar", "unzip", "gzip", "xz", "inkscape", "xdg-open", "open", "display", "pdftoppm", "touch",
)  # fmt: skip
MODULES = ("odd_payload", "antigravity", "this", "turtledemo", "pdb", "webbrowser")
EXTENSIONS = (
    "jpg", "jpeg", "png", "webp", "tif", "tiff", "gif", "bmp", "ppm", "npy", "npz", "tar", "safetensors", "pt", "pth", "bin",
    "ckpt", "metadata", "idx", "mp4", "mp3", "json", "txt", "text", "cls", "distcp", "yaml", "jsonl", "raw", "h5",
)  # fmt: skip
OUTSIDE = "/tmp/escaped-by-loaderkit"
ESCAPES = ("../escaped", OUTSIDE, "a/../../escaped", "..\\escaped", "C:\\escaped", "a\\..\\escaped", "~/escaped")


class Odd(NamedTuple):
    """A file: what it is, what it is called, and its bytes."""

    kind: str
    name: str
    data: bytes


def odd_files(rng: Random, num: int) -> Iterator[Odd]:
    """`num` files, of all kinds in turn; a third of them cut, or with some bytes changed."""
    kinds = list(MAKERS)
    for number in range(num):
        kind = kinds[number % len(kinds)]
        data = bytearray(MAKERS[kind](rng))
        change = rng.random()
        if change < 0.15:
            del data[rng.randrange(len(data) + 1) :]
        elif change < 0.3:
            for _ in range(min(len(data), rng.randrange(1, 6))):
                data[rng.randrange(len(data))] = rng.randrange(256)
        yield Odd(kind, f"{number:04}-{kind}.{rng.choice(EXTENSIONS)}", bytes(data))


# ------------------------------------------------------------------------------------------------------ pictures


def picture(rng: Random, kind: str, mode: str = "RGB", **more: Any) -> bytes:
    size = rng.choice([(16, 16), (32, 32), (48, 32)])
    file = io.BytesIO()
    Image.frombytes("RGB", size, rng.randbytes(3 * size[0] * size[1])).convert(mode).save(file, kind, **more)
    return file.getvalue()


def drawn(kind: str, *modes: str) -> Callable[[Random], bytes]:
    return lambda rng: picture(rng, kind, rng.choice(modes or ("RGB",)))


def postscript(rng: Random) -> bytes:
    if rng.random() < 0.5:
        return picture(rng, "EPS", rng.choice(["L", "RGB", "CMYK"]))
    text = (
        "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 {0} {0}\n%%EndComments\n(%pipe%touch odd-{1}) (w) file closefile\n"
        "(/etc/passwd) (r) file\nshowpage\n%%EOF\n"
    )
    return text.format(rng.randrange(1, 99), rng.randrange(99)).encode()


def dos_postscript(rng: Random) -> bytes:
    body = postscript(rng)
    preview = rng.randbytes(rng.randrange(40))
    head = struct.pack("<4s6IH", b"\xc5\xd0\xd3\xc6", 30, len(body), 0, 0, 30 + len(body), len(preview), 0xFFFF)
    return head + body + preview


def metafile(rng: Random) -> bytes:
    if rng.random() < 0.5:
        return (
            struct.pack("<IHhhhhHIH", 0x9AC6CDD7, 0, 0, 0, 99, 99, 1440, 0, 0) + b"\1\0\x09\0\0\3" + rng.randbytes(60)
        )
    return struct.pack("<II8i4sI", 1, 88, 0, 0, 99, 99, 0, 0, 2540, 2540, b" EMF", 0x10000) + rng.randbytes(80)


def layered(rng: Random) -> bytes:
    if rng.random() < 0.5:
        return b"gimp xcf v011\0" + struct.pack(">III", 32, 32, 0) + rng.randbytes(99)
    return b"8BPS" + struct.pack(">H6xHIIHH", 1, 3, 8, 8, 8, 3) + bytes(12) + bytes(2) + rng.randbytes(192)


def animation(rng: Random) -> bytes:
    size, magic = 128 + 40, rng.choice([0xAF11, 0xAF12])
    return struct.pack("<IHHHHHHI", size, magic, 2, 8, 8, 8, 3, 5).ljust(128, b"\0") + rng.randbytes(40)


def compound(rng: Random) -> bytes:
    """FPX, MIC and old Office files."""
    return (
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1".ljust(24, b"\0")
        + struct.pack("<HHHHH", 0x3E, 3, 0xFFFE, 9, 6)
        + rng.randbytes(990)
    )


def icon(rng: Random) -> bytes:
    inner = picture(rng, rng.choice(["PNG", "JPEG2000"]))
    return struct.pack(">4sI4sI", b"icns", 16 + len(inner), rng.choice([b"icp5", b"ic07"]), 8 + len(inner)) + inner


def blizzard(rng: Random) -> bytes:
    head = rng.choice([b"BLP1", b"BLP2"]) + struct.pack("<iBBBBII", rng.randrange(2), 1, 8, 0, 0, 4, 4)
    return head + rng.randbytes(16 * 8 + 1024 + 64)


def scientific(rng: Random) -> bytes:
    return rng.choice(
        [b"\x89HDF\r\n\x1a\n", b"GRIB\0\0\x10\1", b"BUFR\0\0\x10\4", b"SIMPLE  =                    T"]
    ) + rng.randbytes(200)


def bitmap_text(rng: Random) -> bytes:
    if rng.random() < 0.5:
        return picture(rng, "XBM", "1")
    return b'/* XPM */\nstatic char *x[] = {\n"2 1 2 1",\n"a c #ff0000",\n"b c `touch odd`",\n"ab"};\n'


def brush(rng: Random) -> bytes:
    return struct.pack(">IIII4sI", 34, rng.choice([1, 2]), 4, 4, b"GIMP", 10) + b"touch odd" + rng.randbytes(64)


def film(rng: Random) -> bytes:
    heads = (
        b"\0\0\0\x20ftypisom\0\0\2\0isomiso2avc1mp41", b"RIFF\xff\0\0\0AVI LIST", b"\x1a\x45\xdf\xa3\x9fB\x86\x81\1B\xf7\x81\1",
        b"\0\0\1\xb3\x04\0\x40\x13", b"\0\0\1\xba", b"#EXTM3U\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:1,\nfile:///etc/passwd\n",
        b"OggS\0\2", b"FLV\1\5", b"RIFF\x24\0\0\0WAVEfmt ", b"ffconcat version 1.0\nfile /etc/passwd\n",
    )  # fmt: skip
    return rng.choice(heads) + rng.randbytes(200)


# ------------------------------------------------------------------------------------------------------ documents


def document(rng: Random) -> bytes:
    actions = b"/OpenAction<</S/Launch/F(touch)/P(odd)>>/AA<</O<</S/JavaScript/JS(app.alert(1))>>>>"
    return b"%PDF-1.7\n1 0 obj<</Type/Catalog" + actions + b">>endobj\n%%EOF"


def vector(rng: Random) -> bytes:
    return (
        b'<?xml version="1.0"?><!DOCTYPE svg [<!ENTITY a "0123456789"><!ENTITY b "&a;&a;&a;&a;&a;&a;"><!ENTITY x SYSTEM '
        b'"file:///etc/passwd"><!ENTITY y SYSTEM "http://127.0.0.1:9/odd">]><svg xmlns="http://www.w3.org/2000/svg" '
        b'onload="boom()"><script>boom()</script><image href="msl:touch odd"/><text>&b;&x;&y;</text></svg>'
    )


def page(rng: Random) -> bytes:
    return b"<!doctype html><script>boom()</script><img src=x onerror=boom()><iframe src='file:///etc/passwd'></iframe>"


def magick(rng: Random) -> bytes:
    """ImageMagick's own languages."""
    return rng.choice(
        [
            b"push graphic-context\nviewbox 0 0 9 9\nfill 'url(https://127.0.0.1:9/x\"|touch \"odd)'\npop graphic-context\n",
            f'<?xml version="1.0"?><image><read filename="caption:odd"/><write filename="{OUTSIDE}"/></image>'.encode(),
        ]
    )


def yaml_tags(rng: Random) -> bytes:
    return rng.choice(
        [
            b"source: !!python/object/apply:os.system [touch odd]\n",
            b"!!python/object/new:subprocess.Popen [[touch, odd]]\n",
            b"source: !!python/name:odd_payload.main\nstages: !!python/module:odd_payload\n",
            b"- !!python/object/apply:builtins.exec ['import odd_payload']\n",
            b"a: &a [x,x,x,x]\nb: &b [*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b]\nd: [*c,*c,*c,*c]\n",
            b"source: {kind: files, url: '$(touch odd)`touch odd`;touch odd|touch odd'}\nstages: [read, {batch: {size: 1}}]\n",
        ]
    )


def listing(rng: Random) -> bytes:
    """Indexes and manifests that name other files."""
    place = rng.choice(ESCAPES)
    objects = {place: {"num_bytes": 1, "hashes": ["0"]}}
    values: list[Any] = [
        {"metadata": {}, "weight_map": {"a": place, "b": "file:///etc/passwd"}},
        {"version": 1, "hash": "xxh3_64", "block_bytes": 4096, "objects": objects},
        {"version": 1, "refs": {"a.jpg": ["file:///etc/passwd"], "b": "{{ ''.__class__ }}"}},
        {"key": place, "source": place, "epoch": 0, "position": 0},
        {"__class__": "os.system", "py/object": "subprocess.Popen", "args": ["touch odd"]},
    ]
    texts = [*map(json.dumps, values), f"v1.2 1\njpg 512 3 {place}.jpg\n", "[" * rng.randrange(1, 20_000)]
    return rng.choice(texts).encode()


def script(rng: Random) -> bytes:
    return rng.choice(
        [
            b"#!/bin/sh\ntouch odd\n",
            b"#!/usr/bin/env python3\nimport odd_payload\n",
            b"import odd_payload\nodd_payload.main()\n",
            b"__import__('os').system('touch odd')\n",
            b"() { :; }; touch odd\n",
            b"$(touch odd)\n`touch odd`\n|touch odd\n%s%n",
        ]
    )


def program(rng: Random) -> bytes:
    return rng.choice(
        [b"\x7fELF\2\1\1", b"MZ\x90\0", b"\xca\xfe\xba\xbe", b"!<arch>\n", b"\0asm\1\0\0\0"]
    ) + rng.randbytes(300)


# -------------------------------------------------------------------------------------------------------- pickles


class Order:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def malicious(rng: Random) -> bytes:
    """A pickle, of any protocol, that calls what it should not: some made by Python, some by hand."""
    import os
    import subprocess

    if rng.random() < 0.5:
        orders = (
            Order(os.system, "touch odd"), Order(subprocess.Popen, ["touch", "odd"]), Order(eval, "__import__('odd_payload')"),
            Order(exec, "import odd_payload"), Order(__import__, "odd_payload"), Order(os.execlp, "touch", "touch", "odd"),
            Order(os.posix_spawn, "/bin/false", ["false"], {}), Order(open, OUTSIDE, "w"),
        )  # fmt: skip
        order: Any = rng.choice(orders)
        value = rng.choice([order, {"weight": order}, [order] * 2, {"state_dict": {order: 1}}, ({"a": 1}, order)])
        return pickle.dumps(value, rng.randrange(6))
    module, name, argument = rng.choice(
        [
            ("os", "system", "touch odd"), ("posix", "system", "touch odd"), ("odd_payload", "main", "x"), ("pdb", "run", "1"),
            ("antigravity", "geohash", "x"), ("webbrowser", "open", "http://127.0.0.1:9/"), ("torch", "load", "odd"),
            ("torch.hub", "load", "odd"), ("numpy", "load", "odd"), ("runpy", "run_path", "odd"),
            ("ctypes", "CDLL", "/etc/passwd"),
            ("torch._utils", "_rebuild_tensor_v2.__globals__", "x"), ("builtins", "getattr", "x"),
            ("timeit", "timeit", "import odd_payload"),
        ]
    )  # fmt: skip
    text = b"\x8c" + bytes([len(argument)]) + argument.encode()
    named = b"\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93"
    return rng.choice(
        [
            f"c{module}\n{name}\n(S{argument!r}\ntR.".encode(),
            f"(S{argument!r}\ni{module}\n{name}\n.".encode(),
            f"(c{module}\n{name}\nS{argument!r}\no.".encode(),
            b"\x80\x04" + named + text + b"\x85R.",
            b"\x80\x04" + named + text + b"\x85\x81.",
            b"\x80\x04" + named + b")\x81}" + text + b"K\1sb.",
            b"\x80\x04}" + text + named + text + b"\x85Rs.",
        ]
    )


def saved_zip(rng: Random) -> bytes:
    """As `torch.save` has written since 1.6."""
    file = io.BytesIO()
    root = rng.choice(["archive", "x", "../escaped"])
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{root}/data.pkl", malicious(rng))
        archive.writestr(f"{root}/byteorder", "little")
        archive.writestr(f"{root}/data/0", bytes(16))
        archive.writestr(f"{root}/version", "3\n")
        if rng.random() < 0.5:
            archive.writestr(f"{root}/constants.pkl", malicious(rng))
            archive.writestr(f"{root}/code/__torch__.py", "def forward(self): import odd_payload\n")
    return file.getvalue()


def saved_before(rng: Random) -> bytes:
    """As it wrote before: pickles one behind another; and before that, a tar of them."""
    if rng.random() < 0.5:
        heads: tuple[Any, ...] = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
        return b"".join(pickle.dumps(head, 2) for head in heads) + malicious(rng)
    return archive_of([(name, malicious(rng)) for name in ("pickle", "storages", "tensors", "sys_info")])


def saved_dcp(rng: Random) -> bytes:
    """A `.metadata` whose parts, or whose places, are not what they should be."""
    if rng.random() < 0.5:
        return malicious(rng)
    from torch.distributed.checkpoint import metadata as meta
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    place = rng.choice([*ESCAPES, "__0_0.distcp", "\0", "a" * 5000, "file:///etc/passwd", "http://127.0.0.1:9/x"])
    index = meta.MetadataIndex("a")
    found = meta.Metadata({"a": meta.BytesStorageMetadata()}, storage_data={index: _StorageInfo(place, 0, 100)})
    found.planner_data = rng.choice([None, Order(eval, "__import__('odd_payload')"), {"a": ("..", "/")}])
    return pickle.dumps(found)


# ------------------------------------------------------------------------------------------------- arrays, archives


def objects(rng: Random) -> bytes:
    """Arrays of Python objects, which NumPy pickles."""
    array = np.array([Order(eval, "__import__('odd_payload')"), None], object)
    file = io.BytesIO()
    if rng.random() < 0.5:
        np.save(file, array, allow_pickle=True)
    else:
        named: Any = {rng.choice(["a", "../escaped", OUTSIDE]): array}
        np.savez(file, **named)
    return file.getvalue()


def array_headers(rng: Random) -> bytes:
    text = rng.choice(
        [
            "{'descr': __import__('odd_payload'), 'fortran_order': False, 'shape': (1,)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (10**9,)}", "__import__('os').system('touch odd')", "(" * 3000,
            "{'descr': [('a', '|O'), ('b', '<f4')], 'fortran_order': False, 'shape': (2,)}", "-" * 9000 + "1",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296)}",
        ]
    ).encode()  # fmt: skip
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + rng.randbytes(64)


def zipped(rng: Random) -> bytes:
    """Names that lead out of the folder, a link, and a member that grows a thousandfold."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in rng.sample(ESCAPES, 3):
            archive.writestr(rng.choice([name, f"{name}.npy"]), b"#!/bin/sh\ntouch odd\n")
        link = zipfile.ZipInfo("link.npy")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
        archive.writestr("bomb.npy", bytes(200_000))
    return file.getvalue()


def archive_of(members: list[tuple[str, bytes]], *others: tarfile.TarInfo, form: int = tarfile.GNU_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o4755
            tar.addfile(info, io.BytesIO(data))
        for info in others:
            tar.addfile(info)
    return file.getvalue()


def taped(rng: Random) -> bytes:
    """Links, devices, pipes, and names that lead out of the folder."""
    others = []
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE):
        info = tarfile.TarInfo(f"{rng.choice(ESCAPES)}.{rng.choice(EXTENSIONS)}")
        info.type, info.linkname = kind, rng.choice(["/etc/passwd", *ESCAPES])
        others.append(info)
    members = [(f"{name}.{rng.choice(EXTENSIONS)}", malicious(rng)) for name in rng.sample(ESCAPES, 4)]
    members += [("000.jpg", postscript(rng)), ("000.cls", b"1")]
    return archive_of(members, *others, form=rng.choice([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT]))


def playlist(rng: Random) -> bytes:
    """What players read, and what names other files: as it is, and behind the beginning of a container."""
    target = rng.choice(
        ["/etc/passwd", "http://127.0.0.1:9/x", "concat:/etc/passwd", "subfile,,start,0,end,9,,:/etc/passwd"]
    )
    text = rng.choice([
        "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{0}\n#EXT-X-ENDLIST\n", "ffconcat version 1.0\nfile '{0}'\n",
        "<MPD><Period><BaseURL>{0}</BaseURL></Period></MPD>", "v=0\nc=IN IP4 127.0.0.1\nm=video 1 RTP/AVP 96\na=control:{0}\n",
        "[playlist]\nFile1={0}\n", "#!AMR\n{0}",
    ]).format(target).encode()  # fmt: skip
    head = rng.choice(
        [b"", b"", b"\x1a\x45\xdf\xa3", b"RIFF\xff\xff\xff\xffAVI ", b"OggS", b"\0\0\0\x10ftypisom\0\0\0\0"]
    )
    return head + text


def packed(rng: Random) -> bytes:
    """Small bombs, and malicious pickles, packed."""
    data = rng.choice([bytes(300_000), malicious(rng), taped(rng)])
    return rng.choice([gzip.compress(data), bz2.compress(data), lzma.compress(data)])


def tensors(rng: Random) -> bytes:
    """Safetensors with odd headers."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header: dict[str, Any] = rng.choice(
        [
            {"a": {**entry, "data_offsets": [0, 2**62]}},
            {"../escaped": {**entry, "dtype": "object"}},
            {"__metadata__": {"format": "pt", "exec": "import odd_payload"}, "a": entry},
            {"a": {**entry, "shape": [2**31, 2**31]}},
            {"__reduce__": ["os.system", "touch odd"]},
        ]
    )
    text = json.dumps(header).encode()
    return struct.pack("<Q", rng.choice([len(text), len(text) + 1, 2**40])) + text + bytes(8)


def stored(rng: Random) -> bytes:
    """HDF5 files whose values, or whose groups, lie elsewhere, or that need a plugin."""
    import h5py

    file = io.BytesIO()
    with h5py.File(file, "w") as made:
        how = rng.randrange(6)
        if how == 0:
            made["x"] = h5py.ExternalLink(rng.choice(["/etc/passwd", *ESCAPES]), "/x")
        elif how == 1:
            made.create_dataset("x", (9,), "u1", external=[(rng.choice(["/etc/passwd", OUTSIDE]), 0, 9)])
        elif how == 2:
            layout = h5py.VirtualLayout((9,), "u1")
            layout[:] = h5py.VirtualSource(rng.choice(["/etc/passwd", OUTSIDE]), "x", (9,))
            made.create_virtual_dataset("x", layout)
        elif how == 3:
            made.create_dataset("x", data=[malicious(rng).hex()], dtype=h5py.string_dtype())
        elif how == 4:
            made["x"] = h5py.SoftLink("/x")
        else:
            made.create_dataset("x", (8, 8), "f4", chunks=(4, 4), compression="gzip")
            made["x"][...] = 1
    data = file.getvalue()
    return data if rng.random() < 0.5 else data.replace(b"\1\0\x08\0\1\0\1\0deflate", b"\1\x7d\x08\0\1\0\1\0deflate")


def array_metadata(rng: Random) -> bytes:
    """Metadata of Zarr, of both versions, with codecs that run code, and types that are objects."""
    codec = rng.choice(["pickle", "numcodecs.pickle", "json2", "msgpack2", "odd_payload.main", "vlen-utf8", "bytes"])
    grid = {"name": "regular", "configuration": {"chunk_shape": [rng.choice([4, 2**60])]}}
    inner = [{"name": codec, "configuration": {"protocol": 5, "chunk_shape": [2], "codecs": [{"name": codec}]}}]
    values: list[dict[str, Any]] = [
        {"data_type": rng.choice(["uint8", "string", "object", "variable_length_bytes"]), "codecs": inner},
        {
            "data_type": "uint8",
            "codecs": [{"name": "sharding_indexed", "configuration": {"chunk_shape": [2], "codecs": inner}}],
        },
        {"data_type": "uint8", "codecs": [{"name": "bytes"}], "storage_transformers": [{"name": "odd_payload.main"}]},
    ]
    base_3 = {"zarr_format": 3, "node_type": "array", "shape": [8], "chunk_grid": grid, "fill_value": 0, "attributes": {},
              "chunk_key_encoding": {"name": rng.choice(["default", "../escaped"])}}  # fmt: skip
    base_2 = {"zarr_format": 2, "shape": [8], "chunks": [4], "fill_value": None, "order": "C", "filters": None}
    codecs_2 = {"compressor": {"id": codec.removeprefix("numcodecs.")}, "dtype": rng.choice(["|u1", "|O", "|S9"])}
    return json.dumps(rng.choice([*({**base_3, **value} for value in values), {**base_2, **codecs_2}])).encode()


def saved_zero(rng: Random) -> bytes:
    """A part of a folder of DeepSpeed, whose pickle calls something."""
    import os

    order = Order(os.system, "touch odd")
    values: list[Any] = [
        {"optimizer_state_dict": order}, {"optimizer_state_dict": {"zero_stage": order, "partition_count": 1}},
        {"module": {"a": order}, "param_shapes": [order], "buffer_names": []}, {"module": order, "ds_config": order},
    ]  # fmt: skip
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("x/data.pkl", pickle.dumps(rng.choice(values), 2))
        archive.writestr("x/byteorder", "little")
        archive.writestr("x/version", "3\n")
    return file.getvalue()


MAKERS: dict[str, Callable[[Random], bytes]] = {
    "postscript": postscript, "dos-postscript": dos_postscript, "pdf": drawn("PDF"), "document": document, "svg": vector,
    "metafile": metafile, "layered": layered, "fli": animation, "compound": compound, "icns": icon,
    "ico": drawn("ICO", "RGB", "RGBA"), "tga": drawn("TGA", "RGB", "L", "P"), "pcx": drawn("PCX", "RGB", "1", "P"),
    "dds": drawn("DDS", "RGB", "L"), "sgi": drawn("SGI", "RGB", "L"), "blp": blizzard, "scientific": scientific,
    "im": drawn("IM", "RGB", "F", "P"), "msp": drawn("MSP", "1"), "spider": drawn("SPIDER", "F"), "mpo": drawn("MPO"),
    "jpeg2000": drawn("JPEG2000", "RGB", "L"), "gbr": brush, "bitmap-text": bitmap_text, "film": film, "html": page,
    "magick": magick, "yaml": yaml_tags, "listing": listing, "script": script, "program": program, "pickle": malicious,
    "torch-zip": saved_zip, "torch-old": saved_before, "dcp": saved_dcp, "objects": objects, "npy-header": array_headers,
    "playlist": playlist, "zip": zipped, "tar": taped, "packed": packed, "safetensors": tensors,
    "hdf5": stored, "zarr": array_metadata, "zero": saved_zero,
}  # fmt: skip
