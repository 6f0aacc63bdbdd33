"""What is carried to a machine with a GPU: libraries lose the code of other GPUs, and nothing else."""

from __future__ import annotations

import random
import struct

import pytest

from profiles.gpu_bundle.fatbin import cut, sections

PTX, ELF = 1, 2
Code = tuple[int, int, bytes]  # kind, architecture, payload


def container(*codes: Code) -> bytes:
    """As nvcc writes it."""
    entries = b""
    for kind, architecture, payload in codes:
        padded = payload.ljust(-(-len(payload) // 8) * 8, b"\0")
        header = struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(padded), 0, 0, 4, 1, architecture)
        entries += header.ljust(64, b"\x11") + padded
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def library(code: bytes, symbols: bytes = b"symbols!", strings: bytes = b"their names") -> bytearray:
    """An ELF file whose sections are `.text`, `.nv_fatbin`, a symbol table with its names, and the names of sections."""
    names = b"\0.text\0.nv_fatbin\0.symtab\0.strtab\0"
    contents = [(b".text", 1, b"\x7fmachine code", 0), (b".nv_fatbin", 1, code, 0), (b".symtab", 2, symbols, 4)]
    contents += [(b".strtab", 3, strings, 0), (b"", 3, names, 0)]
    body, headers = b"", b"\0" * 64
    for name, kind, data, link in contents:
        body = body.ljust(-(-len(body) // 8) * 8, b"\0")
        where = names.index(name + b"\0") if name else 0
        headers += struct.pack("<IIQQQQI", where, kind, 0, 0, 64 + len(body), len(data), link).ljust(64, b"\0")
        body += data
    header = b"\x7fELF\x02".ljust(40, b"\0") + struct.pack("<Q", 64 + len(body))
    return bytearray(header.ljust(58, b"\0") + struct.pack("<HHH", 64, 6, 5) + body + headers)


def code_in(made: bytearray) -> bytes:
    (section,) = (section for section in sections(made) if section.name == b".nv_fatbin")
    return bytes(made[section.begin : section.end])


def test_a_container_becomes_the_one_of_its_architecture_alone(rng: random.Random) -> None:
    codes = [(ELF, number, rng.randbytes(rng.randint(1, 100))) for number in (75, 80, 90, 100)]
    codes.append((PTX, 90, rng.randbytes(30)))
    whole = container(*codes)
    made = library(whole + whole)
    cut(made, 90)
    alone = container(codes[2]).ljust(len(whole), b"\0")
    assert code_in(made) == alone + alone
    assert made[64 : 64 + 13] == b"\x7fmachine code"


def test_code_for_no_such_gpu_stays_whole() -> None:
    whole = container((ELF, 75, b"old"), (PTX, 80, b"to be compiled"))
    made = library(whole)
    cut(made, 90)
    assert code_in(made) == whole


def test_symbols_become_zeros_and_names_of_sections_stay() -> None:
    made = library(container((ELF, 90, b"code")))
    before = sections(made)
    cut(made, 90)
    assert sections(made) == before
    assert b"symbols!" not in made
    assert b"their names" not in made


@pytest.mark.parametrize("at", [0, 16, 20], ids=["of a container", "a kind", "the size of a header"])
def test_what_is_not_understood_is_an_error(at: int) -> None:
    code = bytearray(container((ELF, 75, b"one"), (ELF, 90, b"other")))
    code[at : at + 2] = b"\x07\x00"
    with pytest.raises(ValueError, match="byte 80 begins no" if at == 0 else "begins no code"):
        cut(library(bytes(code)), 90)


def test_what_is_no_library_is_left_alone() -> None:
    text = bytearray(b"GROUP ( libm.so.6 )")
    cut(text, 90)
    assert text == b"GROUP ( libm.so.6 )"
