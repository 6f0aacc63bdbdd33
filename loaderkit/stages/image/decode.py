"""`decode`: turns encoded bytes into images, numbers, text and arrays, by extension.

JPEG is decoded by libjpeg-turbo, with Pillow's DCT and upsampling: before a crop only the crop's pixels (by `native/_jpeg`, if
it was built), else all of them (by simplejpeg). What these refuse (CMYK, unusual markers), and every other format, goes
through Pillow (`formats.py`). A truncated JPEG is an error in each of them, wherever the crop lies; warnings that leave the
picture whole are not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, PositiveInt

from loaderkit import native
from loaderkit._internal.config.settings import as_tuple
from loaderkit.engine.work import Stage
from loaderkit.errors import USER_ERRORS, FormatError, printable
from loaderkit.samples.chunk import SampleChunk
from loaderkit.samples.pictures import FORMATS, Format
from loaderkit.samples.sample import Sample
from loaderkit.samples.values import Clip, Encoded, FieldGroup, GpuDecoded, Image, InPlace, Pictures
from loaderkit.sources.fields import AUDIO_EXTENSIONS, IMAGE_EXTENSIONS, VIDEO_EXTENSIONS, last_extension
from loaderkit.sources.formats.npy import view_npy
from loaderkit.sources.formats.npz import view_npz
from loaderkit.sources.formats.texts import read_class, read_json, read_text
from loaderkit.stages.base import FieldNames, StageArgs, StageConfig
from loaderkit.stages.context import CompileContext, StageKind
from loaderkit.stages.image.arrays import mask_of, picture_of
from loaderkit.stages.image.boxes import Annotations, BoxFields, refuse_unnamed
from loaderkit.stages.image.checks import check_decode
from loaderkit.stages.image.formats import (
    MOST_PIXELS,
    check_size,
    converted,
    decode_jpeg,
    decode_picture,
    jpeg_size,
    seems_a_picture,
)
from loaderkit.stages.image.levels import Depth, deepened
from loaderkit.stages.image.ops import EVERYTHING, Crop, DecodeHint, Needs, hint_for
from loaderkit.stages.image.resize import reduced_box
from loaderkit.stages.media.audio import AudioArgs
from loaderkit.stages.media.decoding import MediaDecoder
from loaderkit.stages.media.video import VideoArgs
from loaderkit.stages.runner import each_sample
from loaderkit.stages.values import channels_last, describe, is_pillow
from loaderkit.stages.volume.nifti import read_nifti

logger = logging.getLogger("loaderkit")
_JPEG_EXTENSIONS = frozenset({"jpg", "jpeg", "jpe", "jfif"})
_LEVELS = frozenset({"1", "L", "P", "I;16"})  # Pillow's modes of one channel
_DECODED: frozenset[type] = frozenset({Image, Clip, Pictures, FieldGroup, InPlace, GpuDecoded})


class DecodeArgs(StageArgs):
    """Decode images to RGB, `cls` to int, `txt` to text, `json` and `npy` to what they hold; the rest stays bytes.

    A list of pictures, as a column of Parquet or of Hugging Face's datasets holds it, becomes a list of images of any sizes.
    The stages that follow act on each, all with the draws of the one sample. In `call` and in a batch it is a list of tensors
    uint8 [C, H, W], or with `ragged` one tensor [N, C, H, W] a sample. A list that begins with no picture, and is not named,
    stays.

    Of the items of a data set, encoded bytes that begin like an image, Pillow's images and those of Hugging Face's datasets
    (`{"bytes": ..., "path": ...}`) are decoded like files. A uint8 array or tensor of three dimensions is an image, its
    channels the end that is 1, 3 or 4 long; if both are, a tensor's are the first, and an array is an error. A fourth channel
    is dropped, as a PNG's. What `fields` or `masks` name has to be an image, and may be [H, W].

    With `channels` or `depth: 16`, arrays of `npy` and `npz` files are images as well, of uint8 or uint16, whose channels are
    the end that is `channels` long: any number of them passes through every stage that moves pixels. Arrays that `masks` name
    are class numbers [H, W] of any integer type.

    With `video` a video (mp4, mov, mkv, webm, avi, gif) becomes a clip, uint8 [T, 3, H, W]; with `audio` a sound (wav, flac,
    mp3, ogg, m4a) a window, float32 [channels, samples]; without them they stay bytes.

    An `npz` becomes one field for every array in it, named as in the archive. A `nii` or `nii.gz` is the array of a scan.

    If a `random_resized_crop`, or a `random_crop` without padding, comes next, no more of a JPEG is made into pixels than it
    will show.

    What `boxes` and `keypoints` name, in pixels of the decoded image, follows it through every stage that moves its pixels, and
    becomes float32. Boxes are clipped to the image (`sanitize_boxes` drops boxes of which nothing is left), keypoints
    (x, y) are not. What `instance_masks` names becomes bool [N, H, W], a mask for each box: of the nearest pixels, as
    masks are, and 0 where a stage adds pixels. A `call` behind `decode` may make these fields, too.

    Which format an image has is told by its bytes, not by its name, and only `formats` are opened: nothing that starts a
    program, as PostScript does, or reads another file. Of several pictures in a file (GIF, TIFF, MPO, animations) the first
    counts. A damaged image is a bad sample, with an error that says what is wrong with it.

    A JPEG that lacks blocks or its end marker is truncated, wherever it was cut and whatever crop comes next. Pillow reads some
    of these: cut and closed again by an end marker (it makes the rest grey), or without an end marker and with other bytes
    in its place. What cannot be told from a whole one is read, as by Pillow: arithmetic coding that was cut and closed again,
    and a progressive file closed between two scans. Bytes behind the end, EXIF that cannot be read and other warnings of
    libjpeg's are harmless.
    """

    device: Literal["cpu", "gpu", "dali-cpu"] = Field(
        "cpu",
        description="where images are decoded, and all that follows up to `normalize` is done: gpu and dali-cpu by NVIDIA DALI",
    )
    fields: FieldNames = Field(None, description="decode only these; default: all")
    masks: FieldNames = Field(None, description="images of labels: kept as one channel of class numbers")
    channels: PositiveInt = Field(
        3,
        description="of images: 3, RGB; 1, grey; 4, RGBA, opaque where a file does not say; or, of arrays only, any number",
    )
    depth: Depth = Field(
        8,
        description="bits of a level: 8, uint8, to which 16 are reduced by v >> 8; or 16, uint16, as grey pictures and masks "
        "have them (8 bits become v * 257, class numbers stay)",
    )
    scaled: bool = Field(
        False,
        description="decode JPEGs at 1/2, 1/4 or 1/8 where the `resize` or `random_resized_crop` that follows shrinks them "
        "further: faster, and pixels differ by a few levels",
    )
    formats: Annotated[
        tuple[Format, ...],
        BeforeValidator(as_tuple),
        Field(min_length=1),
    ] = Field(
        FORMATS, description="open only these, told by a file's bytes, not its name; Pillow's other formats stay shut"
    )
    exif_orientation: bool = Field(
        False,
        description="turn images upright as their EXIF tag says; TIFF always is, and EXIF that cannot be read says nothing",
    )
    max_pixels: int = Field(
        MOST_PIXELS,
        ge=1,
        le=MOST_PIXELS,
        description="refuse larger images (decompression bombs); Pillow allows no more",
    )
    boxes: BoxFields = Field(
        {}, description="fields that are boxes [N, 4], each with its format, as in {boxes: xyxy} (or xywh, cxcywh)"
    )
    keypoints: FieldNames = Field(
        None, description="fields that are keypoints [N, 2], [N, K, 2] or [N, K, 3], whose third number stays as it is"
    )
    instance_masks: FieldNames = Field(
        None,
        description="fields that are masks of instances, one for each box: bool or uint8 [N, H, W], or a mask [H, W] in which "
        "each number but 0 is one, in ascending order",
    )
    regions: Literal["auto"] | bool = Field(
        "auto",
        description="decode only the pixels of a crop that comes next, or (false) whole JPEGs, and crop then; auto: not with "
        "`device: gpu` where that fails in a trial, made in another process once a GPU and version",
    )
    on_gpu_error: Literal["raise", "cpu"] = Field(
        "raise",
        description="where DALI fails whatever the images are: end with its error, or decode on the CPU from then on",
    )
    video: VideoArgs | None = Field(None, description="which frames of a video make a clip")
    audio: AudioArgs | None = Field(None, description="which part of a sound is decoded, and how it is sampled")

    @property
    def has_media(self) -> bool:
        """True if videos or sounds are decoded."""
        return self.video is not None or self.audio is not None

    @property
    def annotations(self) -> Annotations:
        """The fields that are boxes, keypoints and masks of instances."""
        return Annotations(self.boxes, self.keypoints or (), self.instance_masks or ())

    @property
    def takes_arrays(self) -> bool:
        """True if arrays may be images, because images need not be like a JPEG's, with three channels of 8 bits."""
        return self.channels != 3 or self.depth == 16


def decode(args: DecodeArgs) -> Callable[..., Any]:
    """A function `(sample, draws, scratch)` that decodes whole images; see `Decoder.begin`."""
    return Decoder(args).begin


class PartialImage(NamedTuple):
    """A part of a JPEG to be decoded: `window` of the picture decoded at 1/`step`, into `buffer`. `box` is the same part of the
    whole picture, of `size` = (height, width)."""

    data: memoryview
    step: int
    window: tuple[int, int, int, int]
    buffer: NDArray[np.uint8]
    box: Crop
    size: tuple[int, int]
    field: str
    scratch: dict[str, Any] | None

    def image(self, first_column: int, num_columns: int) -> Image:
        """The part, from the rows in the buffer, which begin with `first_column`."""
        top, left, height, width = self.window
        strides = (3 * num_columns, 3, 1)
        pixels: NDArray[np.uint8] = np.ndarray(
            (height, width, 3), np.uint8, self.buffer, 3 * (left - first_column), strides
        )
        return Image(pixels, False, self.step, self.size, (top, left), self.box)


class Decoder:
    """Decodes samples. With `scratch`, JPEGs are decoded into its memory, which the next sample with that scratch overwrites,
    and arrays are views of the bytes read; without, all values own their memory.

    `needs(height, width, draws)` is the part that the next stage needs, from that stage's draws, of the fields `needed`
    (None means all). The parts of a whole chunk are decoded together in `finish`: Python code between two decodes finds
    the CPU's caches cold and takes twice as long.
    """

    def __init__(self, args: DecodeArgs, needs: Needs | None = None, needed: tuple[str, ...] | None = None) -> None:
        self._args = args
        self._needs = needs
        self._needed = needed
        self._masks = frozenset((*(args.masks or ()), *(args.instance_masks or ())))
        self._instances = frozenset(args.instance_masks or ())
        self._annotations, self._annotated = args.annotations, args.annotations.names
        self._left = _DECODED if args.fields or args.masks else _DECODED | {int, float, bool, str}
        self._max_pixels = args.max_pixels
        self._is_new = True
        is_plain = not args.exif_orientation and not args.takes_arrays
        self._takes_jpegs = "jpeg" in args.formats and is_plain
        jpeg = self._jpeg if self._takes_jpegs else self._picture
        pictures = dict.fromkeys(IMAGE_EXTENSIONS, self._picture) | dict.fromkeys(_JPEG_EXTENSIONS, jpeg)
        self._readers = _READERS | pictures | {"npy": self._npy}
        self._media = MediaDecoder(args.video, args.audio) if args.has_media else None
        if self._media is not None:
            self._readers |= self._media.readers

    def begin(self, sample: Sample, draws: Any = None, scratch: dict[str, Any] | None = None) -> list[PartialImage]:
        """Decode the fields of a sample, except the partial images, which are returned. Raises ValueError."""
        partial_images = []
        given = {**sample} if self._is_new else None
        named = self._args.fields
        if named is not None and self._annotations:
            named = (*named, *self._annotations.names.intersection(sample))
        for field in named or tuple(sample):
            value = sample.get(field)
            try:
                if type(value) is Encoded:
                    read = self._readers.get(last_extension(value.extension), _read_bytes)
                    value = read(value.data, field, draws, scratch)
                elif type(value) not in self._left:
                    value = self._value(value, field, draws, scratch)
                if type(value) is PartialImage:
                    partial_images.append(value)
                else:
                    sample[field] = value
                if type(value) is FieldGroup:
                    for name in _unpack(sample, field, value, scratch):
                        sample[name] = self._of_file(sample[name], name)
            except ValueError as error:
                raise _named(sample, field, error) from error
        if self._annotated:
            self._annotations.convert(sample)
        if given is not None:
            self._is_new = False
            _say_if_unused(given, sample, partial_images)
            decoded = given if named is None else {name: given[name] for name in named if name in given}
            _say_if_masks(decoded, self._masks)
        return partial_images

    def finish(
        self,
        chunk: SampleChunk,
        jobs: list[tuple[int, PartialImage]],
        failed: Callable[[SampleChunk, int, BaseException], None],
    ) -> None:
        """Decode the partial images of a chunk: (row, image) of each, with the images of one sample next to each other."""
        longest_s, slowest = chunk.slowest or (0.0, 0)
        decoded = native.decode_pieces([partial for _, partial in jobs])
        before, seconds = -1, 0.0
        for (row, partial), (first_column, num_columns, took_s) in zip(jobs, decoded, strict=True):
            seconds = took_s if row != before else seconds + took_s
            before = row
            sample = chunk.samples[row]
            if sample is not None and num_columns:
                sample[partial.field] = partial.image(first_column, num_columns)
            elif sample is not None:
                seconds += self._decode_whole(chunk, row, partial, failed)
            if seconds > longest_s:
                longest_s, slowest = seconds, row
        chunk.slowest = longest_s, slowest

    def _decode_whole(
        self,
        chunk: SampleChunk,
        row: int,
        partial: PartialImage,
        failed: Callable[[SampleChunk, int, BaseException], None],
    ) -> float:
        """Decode the whole of a JPEG that could not be decoded in part; returns the seconds taken."""
        sample = chunk.samples[row]
        assert sample is not None
        chunk.current = row
        begin_s = perf_counter()
        try:
            sample[partial.field] = self._whole(
                partial.data, partial.field, partial.size, partial.step, partial.scratch
            )
        except USER_ERRORS as error:
            failed(chunk, row, _named(sample, partial.field, error) if isinstance(error, ValueError) else error)
        return perf_counter() - begin_s

    def _value(self, value: Any, field: str, draws: Any, scratch: dict[str, Any] | None) -> Any:
        """A field of a source of objects. Unless the field is named, a value that is no image stays as it is."""
        if field in self._annotated and (field not in self._instances or not _is_encoded(value)):
            return value
        is_mask = field in self._masks
        is_named = is_mask or self._args.fields is not None
        if not is_named:
            refuse_unnamed(value)
        elif value is None:
            raise ValueError("the sample has no such field")
        if type(value) is list:
            return self._list(value, field, scratch, is_named=is_named)
        data, is_picture = value, is_named
        if _is_file(value):
            data = _bytes_of(value)
            is_picture = is_named or Path(value["path"] or "").suffix[1:].lower() in IMAGE_EXTENSIONS
        if isinstance(data, (bytes, bytearray, memoryview)):
            data = memoryview(data)
            of_media = None if self._media is None else self._media.reader_of(data, is_named=is_named)
            if of_media is not None:
                return of_media(data, field, draws)
            if is_picture or seems_a_picture(data):
                read = self._readers["jpg"] if bytes(data[:2]) == b"\xff\xd8" else self._picture
                return read(data, field, draws, scratch)
            return value
        image = self._of_pillow(value, is_mask) if is_pillow(value) else self._of_array(value, is_mask, is_named)
        if image is None and is_named:
            kinds = "encoded bytes, Pillow's, or uint8 [C, H, W], [H, W, C] or [H, W]"
            also = f" with {self._args.channels} channels, as `channels` says" if self._args.channels != 3 else ""
            raise ValueError(f"cannot decode {describe(value)}: an image is {kinds}{also}")
        return value if image is None else image

    def _list(self, values: list[Any], field: str, scratch: dict[str, Any] | None, *, is_named: bool) -> Any:
        """A list of pictures; unless it is named, one that does not begin with a picture stays as it is."""
        if not is_named and not (values and _is_picture(values[0])):
            return values
        images = []
        for number, value in enumerate(values):
            memory = None if scratch is None else scratch.setdefault(f"picture {number}", {})
            try:
                images.append(self._listed(value, field, memory))
            except ValueError as error:
                raise ValueError(f"picture {number} of the {len(values)} in its list: {error}") from error
        return Pictures(tuple(images))

    def _listed(self, value: Any, field: str, scratch: dict[str, Any] | None) -> Image:
        """A picture of a list, as a whole."""
        if value is None:
            raise ValueError("it is null: leave it out of the list, or embed the file if there is only its path")
        data = _bytes_of(value) if _is_file(value) else value
        if isinstance(data, (bytes, bytearray, memoryview)):
            data = memoryview(data)
            size = jpeg_size(data) if self._takes_jpegs and field not in self._masks else None
            if size is None:
                return self._picture(data, field)
            check_size(*size, self._max_pixels)
            return self._whole(data, field, size, 1, scratch)
        is_mask = field in self._masks
        image = self._of_pillow(value, is_mask) if is_pillow(value) else self._of_array(value, is_mask, True)
        if image is None:
            raise ValueError(f"cannot decode {describe(value)}: it is no picture")
        return image

    def _of_pillow(self, value: Any, is_mask: bool) -> Image:
        args = self._args
        check_size(value.height, value.width, self._max_pixels)
        return converted(
            value, is_mask=is_mask, upright=args.exif_orientation, depth=args.depth, num_channels=args.channels
        )

    def _of_array(self, value: Any, is_mask: bool, is_named: bool) -> Image | None:
        """An array or tensor as an image; None if it is none."""
        args = self._args
        if is_mask and isinstance(value, (np.ndarray, torch.Tensor)):
            return mask_of(value, args.depth)
        image = picture_of(value, args.channels, args.depth, is_named=is_named) if args.takes_arrays else None
        if image is not None or args.channels != 3:
            return image
        pixels = channels_last(value) if is_named or getattr(value, "ndim", 0) == 3 else None
        if pixels is None:
            return None
        return Image(pixels[:, :, :3] if args.depth == 8 else deepened(pixels[:, :, :3]))

    def _of_file(self, array: NDArray[Any], field: str) -> Any:
        """An array of a file: a picture or mask, if it is one."""
        args, is_mask = self._args, field in self._masks
        if field in self._annotated or not (is_mask or args.takes_arrays):
            return array
        is_named = args.fields is not None and field in args.fields
        image = (
            mask_of(array, args.depth) if is_mask else picture_of(array, args.channels, args.depth, is_named=is_named)
        )
        return array if image is None else image

    def _npy(self, data: memoryview, field: str, draws: Any, scratch: dict[str, Any] | None) -> Any:
        return self._of_file(_owned(view_npy(data), scratch), field)

    def _jpeg(self, data: memoryview, field: str, draws: Any, scratch: dict[str, Any] | None) -> Image | PartialImage:
        size = None if field in self._masks else jpeg_size(data)
        if size is None:
            return self._picture(data, field)
        check_size(*size, self._max_pixels)
        need = EVERYTHING
        if self._needs is not None and (self._needed is None or field in self._needed):
            need = self._needs(*size, draws)
        box, step = need
        if box is None or not native.HAS_JPEG:
            return self._whole(data, field, size, step, scratch)
        window = box if step == 1 else reduced_box(box, step)
        buffer = _memory(window[2] * (window[3] + native.SPARE_COLUMNS) * 3, scratch, field)
        return PartialImage(data, step, window, buffer, box, size, field, scratch)

    def _whole(
        self, data: memoryview, field: str, size: tuple[int, int], step: int, scratch: dict[str, Any] | None
    ) -> Image:
        """The whole JPEG at 1/step."""
        height, width = (-(-length // step) for length in size)
        buffer = None if scratch is None else _memory(height * width * 3, scratch, field).reshape(height, width, 3)
        image = decode_jpeg(data, size, step, buffer)
        return self._picture(data, field) if image is None else image

    def _picture(self, data: memoryview, field: str, *_: Any) -> Image:
        """A whole picture in any format, by Pillow."""
        if not data.nbytes:
            raise ValueError("the file is empty (0 bytes)")
        return decode_picture(
            data,
            formats=self._args.formats,
            is_mask=field in self._masks,
            upright=self._args.exif_orientation,
            max_pixels=self._max_pixels,
            depth=self._args.depth,
            num_channels=self._args.channels,
        )


def _is_file(value: Any) -> bool:
    """True for a picture as Hugging Face's datasets have it."""
    return isinstance(value, dict) and value.keys() == {"bytes", "path"}


def _is_picture(value: Any) -> bool:
    """True for a picture in a list that no argument names."""
    data = value["bytes"] if _is_file(value) else value
    if isinstance(data, (bytes, bytearray, memoryview)):
        return seems_a_picture(memoryview(data))
    return is_pillow(value) or (_is_file(value) and Path(value["path"] or "").suffix[1:].lower() in IMAGE_EXTENSIONS)


def _is_encoded(value: Any) -> bool:
    """True for a picture in a data set that is not decoded yet, or is one of Pillow's."""
    return isinstance(value, (bytes, bytearray, memoryview, dict)) or is_pillow(value)


def _say_if_unused(given: Sample, sample: Sample, partial_images: list[PartialImage]) -> None:
    """Warn if nothing of a sample was decoded."""
    is_decoded = [
        type(value) in _DECODED or (value is not given.get(name) and type(value) is not bytes)
        for name, value in sample.items()
    ]
    if not any(is_decoded) and not partial_images:
        left = ", ".join(f"{name} ({describe(value)})" for name, value in sample.items())
        logger.warning(
            "`decode` decodes nothing of %s: no bytes begin as a picture, and no extension is one of %s",
            left,
            ", ".join(sorted(_READERS.keys() | IMAGE_EXTENSIONS)),
        )
        if any(
            type(value) is Encoded and last_extension(value.extension) in VIDEO_EXTENSIONS | AUDIO_EXTENSIONS
            for value in given.values()
        ):
            logger.warning("`decode` decodes video with `video: {frames: ...}`, and sound with `audio: {seconds: ...}`")


def _say_if_masks(given: Sample, masks: Collection[str]) -> None:
    """Warn of pictures that are probably masks: of palette numbers or levels, each beside one in colour of the same size."""
    pictures = {name: value for name, value in given.items() if is_pillow(value)}
    in_colour = {picture.size for picture in pictures.values() if picture.mode in ("RGB", "RGBA")}
    for name, picture in pictures.items():
        if name not in masks and picture.mode in _LEVELS and picture.size in in_colour:
            logger.warning(
                "`decode` makes a picture in RGB of %s, of Pillow's mode %s: if it is the mask of another one, write "
                "decode: {masks: [%s]}, which keeps its numbers",
                *(printable(name), picture.mode, printable(name)),
            )


def _bytes_of(image: dict[str, Any]) -> Any:
    """The bytes of an image that Hugging Face's datasets have not decoded."""
    data, path = image["bytes"], image["path"]
    if data is not None:
        return data
    if not path or "://" in path:
        raise ValueError(
            f"an image of Hugging Face's datasets without bytes, whose path {path!r} is no local file: let `datasets` open "
            "it, by dataset.cast_column(name, datasets.Image())"
        )
    return Path(path).read_bytes()


def _named(sample: Sample, field: str, error: Exception) -> ValueError:
    named = ValueError(f"field {field!r}: {error}" if len(sample) > 1 else str(error))
    named.__cause__ = error
    return named


def _memory(num_bytes: int, scratch: dict[str, Any] | None, field: str) -> NDArray[np.uint8]:
    if scratch is None:
        return np.empty(num_bytes, np.uint8)
    memory: NDArray[np.uint8] | None = scratch.get(field)
    if memory is None or memory.size < num_bytes:
        memory = scratch[field] = np.empty(num_bytes + num_bytes // 4, np.uint8)
    return memory[:num_bytes]


def _owned(array: NDArray[Any], scratch: dict[str, Any] | None) -> NDArray[Any]:
    """The array itself if its memory belongs to the chunk; else a copy that the user may keep."""
    return array if scratch is not None else array.copy(order="K")


def _unpack(sample: Sample, field: str, group: FieldGroup, scratch: dict[str, Any] | None) -> tuple[str, ...]:
    """Replace a field by the fields that its archive holds, whose names it returns."""
    del sample[field]
    for name, value in group.fields.items():
        if name in sample:
            raise ValueError(
                f"the archive holds an array called {name!r}, and so is another field of the sample: rename one of them"
            )
        try:
            sample[name] = _owned(view_npy(value.data), scratch) if type(value) is Encoded else value
        except FormatError as error:
            raise FormatError(f"array {name!r}: {error}") from None
    return tuple(group.fields)


def _read_bytes(data: memoryview, *_: Any) -> bytes:
    return bytes(data)


def _read_npz(data: memoryview, field: str, draws: Any, scratch: dict[str, Any] | None) -> FieldGroup:
    return FieldGroup({name: _owned(array, scratch) for name, array in view_npz(data).items()})


def _read_nifti(data: memoryview, *_: Any) -> NDArray[Any]:
    return read_nifti(data)


_READERS: dict[str, Callable[..., Any]] = {
    "npz": _read_npz,
    "nii": _read_nifti,
    "nii.gz": _read_nifti,
    "cls": read_class,
    "txt": read_text,
    "text": read_text,
    "json": read_json,
}


def decode_hint(stage: StageConfig, context: CompileContext) -> tuple[StageConfig, DecodeHint | None]:
    """The stage after a `decode`, and its hint for JPEGs; None if it needs whole images."""
    args, behind = stage.args, context.behind(stage)
    assert isinstance(args, DecodeArgs)
    following = next(one for one in behind if not (args.scaled and context.kind_of(one).is_pointwise))
    ops, fields = context.kind_of(following).ops, getattr(following.args, "fields", None)
    is_apart = args.fields is not None and fields is not None and not {*args.fields} & {*fields}
    if ops is None or args.device != "cpu" or args.exif_orientation or args.takes_arrays or is_apart or args.has_media:
        return following, None
    takes_crop = following is behind[0] and args.regions is not False
    return following, hint_for(ops(following.args), is_next=takes_crop, scaled=args.scaled)


def _compile(stage: StageConfig, context: CompileContext) -> Stage:
    assert isinstance(stage.args, DecodeArgs)
    following, hint = decode_hint(stage, context)
    failed, reuse = context.failed(stage), context.may_reuse
    if hint is None:
        num_draws = 1 if stage.args.has_media else 0  # the start of a clip
        run = each_sample(decode(stage.args), num_draws, context.keys(stage), failed, reuse=reuse)
        return stage.ready("sample", run, content="media" if stage.args.has_media else "")
    decoder = Decoder(stage.args, hint.of, getattr(following.args, "fields", None))
    # Uses the draws of the stage that it decodes for.
    num_draws, keys = context.kind_of(following).num_draws, context.keys(following)
    run = each_sample(decoder.begin, num_draws, keys, failed, reuse=reuse, finish=decoder.finish)
    return stage.ready("sample", run)


DECODE = StageKind(
    DecodeArgs,
    "sample",
    compile=_compile,
    check=check_decode,
    is_single=True,
    decodes=True,
    only_computes=True,
    is_contained=True,
    args_of_speed=frozenset({"device", "regions", "on_gpu_error"}),
    args_of_refusal=frozenset({"max_pixels", "formats"}),
)
