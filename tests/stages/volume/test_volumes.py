"""Crops and flips of volumes against NumPy, and NIfTI against nibabel, on drawn arrays."""

from __future__ import annotations

import gzip
import io
import random
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import FormatError, StageError
from loaderkit.stages.volume.moves import (
    RandomVolumeCropArgs,
    RandomVolumeFlipArgs,
    random_volume_crop,
    random_volume_flip,
)
from loaderkit.stages.volume.nifti import read_nifti

DTYPES = ["uint8", "int8", "int16", "uint16", "int32", "float32", "float64"]
MODES = [torch.from_numpy, lambda array: array]


def drawn_array(rng: random.Random, shape: tuple[int, ...], dtype: str) -> Any:
    values = np.random.default_rng(rng.randrange(2**32)).integers(0, 100, shape)
    return values.astype(dtype)


def scan_and_labels(rng: random.Random, num_dims: int) -> tuple[Any, Any]:
    """Every value of the scan says where it lies."""
    shape = tuple(rng.randrange(3, 9) for _ in range(num_dims))
    places = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    channels = [places + 10_000 * n for n in range(rng.randrange(1, 3))]
    return np.stack(channels), (drawn_array(rng, shape, "uint8") > 96).astype(np.uint8)


@pytest.mark.parametrize("num_dims", [1, 2, 3, 4])
@pytest.mark.parametrize("given", MODES)
def test_one_window_of_both(num_dims: int, given: Any, rng: random.Random) -> None:
    """Whatever the draws: the same one in all channels and in the labels, inside, and each place as likely at its ends."""
    scan, labels = scan_and_labels(rng, num_dims)
    size = tuple(rng.randrange(1, length + 1) for length in labels.shape)
    crop = random_volume_crop(RandomVolumeCropArgs(size=size, fields=("scan", "labels")))
    for kind in (0.0, 1.0 - 2**-53, None):
        draws = np.array([rng.random() if kind is None else kind for _ in range(6)])
        sample = {"scan": given(scan), "labels": given(labels), "__key__": "x"}
        crop(sample, draws)
        starts = [
            int(draw * (length - wanted + 1))
            for draw, length, wanted in zip(draws[2:], labels.shape, size, strict=False)
        ]
        window = tuple(slice(start, start + wanted) for start, wanted in zip(starts, size, strict=True))
        assert np.array_equal(sample["scan"], scan[(slice(None), *window)])
        assert np.array_equal(sample["labels"], labels[window])


def test_the_foreground_is_in_it(rng: random.Random) -> None:
    scan, labels = np.zeros((2, 9, 8, 7), np.float32), np.zeros((1, 9, 8, 7), np.int16)
    labels[0, rng.randrange(9), rng.randrange(8), rng.randrange(7)] = 3
    args = RandomVolumeCropArgs(size=(2, 3, 4), fields=("scan", "labels"), foreground="labels", p=0.5)
    crop, held = random_volume_crop(args), [0, 0]
    for number in range(200):
        draws = np.array([rng.random() for _ in range(6)])
        sample: dict[str, Any] = {"scan": scan, "labels": labels}
        crop(sample, draws)
        assert sample["scan"].shape == (2, 2, 3, 4)
        if draws[0] < 0.5:
            assert sample["labels"].any(), number
        else:
            held[bool(sample["labels"].any())] += 1
    assert held[0] > held[1]
    sample = {"scan": scan, "labels": np.zeros_like(labels)}
    crop(sample, np.zeros(6))  # there is none
    assert sample["labels"].shape == (1, 2, 3, 4)


def test_what_is_smaller_is_padded_or_refused(rng: random.Random) -> None:
    scan, labels = scan_and_labels(rng, 3)
    size = tuple(length + rng.randrange(3) for length in labels.shape)
    given = {"scan": scan, "labels": labels}
    args: dict[str, Any] = {"size": size, "fields": ("scan", "labels"), "fill": -7, "labels": ("labels",)}
    sample = {**given}
    random_volume_crop(RandomVolumeCropArgs(pad_if_needed=True, **args))(sample, np.zeros(6))
    missing = [wanted - length for wanted, length in zip(size, labels.shape, strict=True)]
    around = [(num // 2, num - num // 2) for num in missing]
    assert np.array_equal(sample["scan"], np.pad(scan, [(0, 0), *around], constant_values=-7))
    assert np.array_equal(sample["labels"], np.pad(labels, around))
    if any(missing):
        with pytest.raises(ValueError, match=r"fill` is 0\.5, which its uint8 array cannot hold"):
            random_volume_crop(RandomVolumeCropArgs(size=size, fields=("labels",), pad_if_needed=True, fill=0.5))(
                {**given}, np.zeros(6)
            )
        with pytest.raises(ValueError, match="less than the window"):
            random_volume_crop(RandomVolumeCropArgs(**args))({**given}, np.zeros(6))


@pytest.mark.parametrize("names", [{"foreground": "maks"}, {"labels": ("maks",)}])
def test_names_that_are_no_fields(names: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="'maks', which is none of `fields`"):
        RandomVolumeCropArgs(size=(2,), fields=("scan",), **names)


@pytest.mark.parametrize("given", MODES)
def test_one_flip_of_both(given: Any, rng: random.Random) -> None:
    scan, labels = scan_and_labels(rng, 3)
    axes = tuple(rng.sample([-3, -2, -1], rng.randrange(1, 4)))
    flip = random_volume_flip(RandomVolumeFlipArgs(fields=("scan", "labels"), axes=axes, p=0.5))
    for _ in range(8):
        draws = np.array([rng.random() for _ in range(4)])
        sample = {"scan": given(scan), "labels": given(labels)}
        flip(sample, draws)
        turned = [axis for axis, draw in zip(axes, draws, strict=False) if draw < 0.5]
        assert np.array_equal(sample["scan"], np.flip(scan, tuple(turned)))
        assert np.array_equal(sample["labels"], np.flip(labels, tuple(turned)))


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"scan": np.zeros((4, 4))}, "no field 'labels', only scan"),
        ({"scan": np.zeros((4, 4)), "labels": b"x"}, "no array of 2 or more dimensions"),
        ({"scan": np.zeros((4, 4)), "labels": np.zeros((4, 5))}, r"scan \[4, 4\], labels \[4, 5\]"),
        ({"scan": np.zeros((4, 4)), "labels": np.zeros(4)}, "no array of 2 or more dimensions"),
    ],
)
def test_arrays_that_do_not_fit(sample: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        random_volume_crop(RandomVolumeCropArgs(size=(2, 2), fields=("scan", "labels")))(sample, np.zeros(6))


@pytest.mark.parametrize("executor", ["thread", "process", "inline"])
def test_from_files_to_batches(executor: str, tmp_path: Path, rng: random.Random) -> None:
    """Scans and labels of two folders, whoever loads them; large arrays are not read past the crop into their slots."""
    for folder in ("scans", "labels"):
        (tmp_path / folder).mkdir()
    shape = (48, 40, 36)
    for number in range(6):
        scan = drawn_array(rng, shape, "float32")
        np.save(tmp_path / f"labels/{number}.npy", (scan > 50).astype(np.uint8))
        nibabel.Nifti1Image(scan, np.eye(4)).to_filename(tmp_path / f"scans/{number}.nii.gz")
    pipeline = (
        Pipeline.files(tmp_path, fields={"scan": "scans/*.nii.gz", "mask": "labels/*.npy"})
        .shuffle(seed=2)
        .read()
        .decode()
        .random_volume_crop([16, 12, 8], ["scan", "mask"], foreground="mask")
        .random_volume_flip(["scan", "mask"])
        .batch(3)
    )
    with loaderkit.build(pipeline, overrides={"prefetch.executor": executor}) as loader:
        batches = [batch for _ in range(2) for batch in loader]
    assert sum(len(batch["scan"]) for batch in batches) == 12
    for batch in batches:
        assert batch["scan"].shape[1:] == (16, 12, 8)
        assert torch.equal(batch["mask"].bool(), batch["scan"] > 50)
        assert batch["scan"].dtype == torch.float32
    if executor != "inline":
        with loaderkit.build(pipeline, overrides={"prefetch.executor": "inline"}) as loader:
            for one, other in zip(batches, [batch for _ in range(2) for batch in loader], strict=True):
                assert torch.equal(one["scan"], other["scan"])
                assert one["__key__"] == other["__key__"]


# -------------------------------------------------------------------------------------------------------------- NIfTI


def drawn_nifti(rng: random.Random, *, packed: bool) -> tuple[bytes, Any]:
    """The bytes of a file, and what nibabel reads of it."""
    kind = rng.choice([nibabel.Nifti1Image, nibabel.Nifti2Image])
    values = drawn_array(rng, tuple(rng.randrange(1, 9) for _ in range(rng.randrange(3, 6))), rng.choice(DTYPES))
    header = kind.header_class(endianness=rng.choice("<>"))
    header.set_data_dtype(values.dtype)
    image = kind(values, np.eye(4), header)
    if rng.random() < 0.5:
        image.header.set_slope_inter(rng.choice([0.5, 2.0, 0.1]), rng.choice([0.0, -1024.0]))
    if rng.random() < 0.3:
        image.header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", b"of a scan"))
    data = image.to_bytes()
    found = kind.from_bytes(data).dataobj
    return (gzip.compress(data) if packed else data), np.asanyarray(found)


@pytest.mark.parametrize("packed", [False, True])
def test_as_nibabel_reads_it(packed: bool, rng: random.Random) -> None:
    for _ in range(40):
        data, expected = drawn_nifti(rng, packed=packed)
        values = read_nifti(memoryview(data))
        native = expected.dtype.newbyteorder("=")
        assert values.dtype == (np.float32 if native == np.float64 and values.dtype != np.float64 else native)
        assert values.dtype.isnative
        assert values.flags.c_contiguous
        assert np.array_equal(values, expected.astype(values.dtype))


@pytest.mark.parametrize("packed", [False, True])
def test_cut_anywhere(packed: bool, rng: random.Random) -> None:
    data, _ = drawn_nifti(rng, packed=packed)
    ends = {0, 1, 2, 3, 4, 10, 347, 348, 352, len(data) - 1, *(rng.randrange(len(data)) for _ in range(60))}
    for end in ends & {*range(len(data))}:
        with pytest.raises(FormatError, match=r"cut|no NIfTI|damaged"):
            read_nifti(memoryview(data[:end]))


def test_flipped_bytes_of_a_packed_one_are_noticed(rng: random.Random) -> None:
    """Its checksum covers all of it."""
    data, expected = drawn_nifti(rng, packed=True)
    for _ in range(150):
        place = rng.randrange(10, len(data))  # behind gzip's own header, which says nothing of the values
        damaged = bytearray(data)
        damaged[place] ^= 1 << rng.randrange(8)
        with pytest.raises(FormatError):
            read_nifti(memoryview(bytes(damaged)))
    assert read_nifti(memoryview(data)).shape == expected.shape


def test_absurd_headers_take_no_memory(rng: random.Random) -> None:
    """Whatever bytes are changed: an error, or the values of another header."""
    for _ in range(300):
        data, _ = drawn_nifti(rng, packed=False)
        damaged = bytearray(data)
        for _ in range(rng.randrange(1, 9)):
            damaged[rng.randrange(min(544, len(data)))] = rng.randrange(256)
        try:
            found = read_nifti(memoryview(bytes(damaged)))
        except FormatError:
            continue
        assert found.nbytes <= 8 * len(data)


def test_more_than_it_says(rng: random.Random) -> None:
    data = nibabel.Nifti1Image(np.zeros((3, 3, 3), np.uint8), np.eye(4)).to_bytes()
    for more in (bytes(10**6), b"x"):
        for packed in (data + more, gzip.compress(data + more), gzip.compress(data) + bytes(512)):
            assert read_nifti(memoryview(packed)).shape == (3, 3, 3)
    damaged = bytearray(data)
    damaged[108:112] = np.float32(348).tobytes()
    with pytest.raises(FormatError, match="begin at byte 348, inside of it"):
        read_nifti(memoryview(bytes(damaged)))


def test_a_damaged_scan_is_a_bad_sample(tmp_path: Path) -> None:
    stream = io.BytesIO(nibabel.Nifti1Image(np.zeros((3, 3, 3), np.uint8), np.eye(4)).to_bytes())
    (tmp_path / "good.nii").write_bytes(stream.getvalue())
    (tmp_path / "half.nii").write_bytes(stream.getvalue()[:360])
    pipeline = Pipeline.files(tmp_path, include="*.nii").shuffle("none").read().decode().batch(1)
    with loaderkit.build(pipeline) as loader, pytest.raises(StageError, match=r"half\.nii.*it is cut"):
        list(loader)
