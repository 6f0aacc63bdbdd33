"""Made from the settings of sources and stages by docs/make_stubs.py; a test keeps it true."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

from loaderkit._internal.config.settings import Model

def source_method(kind: str, args: type[Model]) -> Any: ...
def stage_method(kind: str, args: type[Model]) -> Callable[..., Any]: ...
def plain(values: Mapping[str, Any]) -> dict[str, Any]: ...

class KindMethods:
    @classmethod
    def files(
        cls,
        url: str | os.PathLike[str],
        *,
        include: str | tuple[str, ...] | list[str] | None = None,
        label: Literal["parent", "top", "none"] = "none",
        labels: Mapping[str, Any] | None = None,
        classes: tuple[str, ...] | list[str] | Mapping[str, int] | None = None,
        fields: Mapping[str, str] | None = None,
        optional: tuple[str, ...] | list[str] = ...,
        listing: Literal["fresh", "keep"] | float | str = "fresh",
        limit: int | None = None,
        s3: Mapping[str, Any] = ...,
        retry: Mapping[str, Any] = ...,
        cache: Mapping[str, Any] = ...,
        read_ahead: Mapping[str, Any] = ...,
    ) -> Self:
        """Every matching file below `url` is a sample.

        url: the folder: a path, file:// or memory://; or, with a glob, the files
        include: which files, relative to url: globs with **, and braces; default: images, or all files if
            none of the first 10,000 is an image
        label: parent: the class is the index of the file's folder in the sorted folder names; top: that of
            the first folder below `url`, as torchvision's ImageFolder has it
        labels: `label` from a table instead, as in {file: train.csv, key: name, value: class}: whole
            numbers, numbers, or texts, which become classes
        classes: with `label`, the folders' names in the order of their class numbers, or {folder: number};
            with `labels`, its texts; default: all there are, sorted
        fields: field -> extensions, as in {image: 'jpg;png'}; or field -> pattern, as in {image:
            images/*.jpg, mask: masks/*.png}: files with one stem are one sample; default: images are
            `image`
        optional: fields whose file may be missing: it is then read as an empty one, so a text is empty
        listing: keep: the listing is kept on this machine and used while no folder has changed, of local
            folders; a duration, as 1d: used for that long, whatever has changed; fresh: listed at every
            start
        limit: only the first N samples of the canonical order
        s3: for `s3://`: `source.s3`
        retry: when the store fails for a while: `source.retry`
        cache: of slow stores, on local disk: `source.cache`
        read_ahead: of slow stores, into memory: `source.read_ahead`
        """

    @classmethod
    def tar(
        cls,
        url: str | os.PathLike[str],
        *,
        include: str | tuple[str, ...] | list[str] = "*.tar",
        fields: Mapping[str, str] | None = None,
        optional: tuple[str, ...] | list[str] = ...,
        limit: int | None = None,
        s3: Mapping[str, Any] = ...,
        retry: Mapping[str, Any] = ...,
        cache: Mapping[str, Any] = ...,
        read_ahead: Mapping[str, Any] = ...,
    ) -> Self:
        """The samples in the tar archives below `url`.

        url: the folder of the archives, or one archive (also with braces)
        include: which archives: globs, and braces such as "shard-{000..099}.tar"
        fields: field -> extensions; default: images are `image`, cls is `label`, others keep their name
        optional: fields whose file may be missing: it is then read as an empty one, so a text is empty
        limit: only the first N samples of the canonical order
        s3: for `s3://`: `source.s3`
        retry: when the store fails for a while: `source.retry`
        cache: of slow stores, on local disk: `source.cache`
        read_ahead: of slow stores, into memory: `source.read_ahead`
        """

    @classmethod
    def array(
        cls,
        url: str | os.PathLike[str],
        *,
        dtype: Literal[
            "bool",
            "uint8",
            "uint16",
            "uint32",
            "uint64",
            "int8",
            "int16",
            "int32",
            "int64",
            "float16",
            "bfloat16",
            "float32",
            "float64",
            "complex64",
            "complex128",
        ]
        | None = None,
        shape: Sequence[int] | None = None,
        window: int | None = None,
        field: str = "data",
        limit: int | None = None,
        s3: Mapping[str, Any] = ...,
        retry: Mapping[str, Any] = ...,
        cache: Mapping[str, Any] = ...,
        read_ahead: Mapping[str, Any] = ...,
    ) -> Self:
        """The records of one file: an array's rows, or all windows of them.

        url: the file: .npy, or raw records (with `dtype`)
        dtype: of a raw file, little-endian; an .npy file states it
        shape: of one record of a raw file; default: [], single numbers
        window: samples are all windows of this many consecutive records, [window, ...]; default: the
            records
        field: its name in the batch
        limit: only the first N samples of the canonical order
        s3: for `s3://`: `source.s3`
        retry: when the store fails for a while: `source.retry`
        cache: of slow stores, on local disk: `source.cache`
        read_ahead: of slow stores, into memory: `source.read_ahead`
        """

    @classmethod
    def tokens(
        cls,
        url: str | os.PathLike[str] | tuple[str, ...] | list[str] | Sequence[os.PathLike[str]],
        *,
        include: str | tuple[str, ...] | list[str] | None = None,
        dtype: Literal["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"] | None = None,
        end: int | None = None,
        column: str = "input_ids",
        field: str = "tokens",
        memory: int | str = 2147483648,
        limit: int | None = None,
        s3: Mapping[str, Any] = ...,
        retry: Mapping[str, Any] = ...,
        cache: Mapping[str, Any] = ...,
        read_ahead: Mapping[str, Any] = ...,
    ) -> Self:
        """The documents of files of tokens: Megatron's `.bin` and `.idx`, `.npy`, raw numbers, `input_ids` in Arrow or Parquet.

        url: the folder of the files, or one file, or a list (also with globs and braces): .bin with its
            .idx beside it (without `dtype`), .npy, .arrow, .parquet, or raw (with `dtype`)
        include: which files of the folder `url`: globs and braces, or a list; default: all of the form that
            is there
        dtype: of raw files, little-endian; .npy and .idx state it
        end: of .npy and raw files: the token that ends a document and is its last; other files say where
            they end
        column: of Arrow and Parquet files: the lists of tokens
        field: its name in the batch
        memory: of Parquet files: bound on the decoded row groups that each loading process holds
        limit: only the first N samples of the canonical order
        s3: for `s3://`: `source.s3`
        retry: when the store fails for a while: `source.retry`
        cache: of slow stores, on local disk: `source.cache`
        read_ahead: of slow stores, into memory: `source.read_ahead`
        """

    @classmethod
    def parquet(
        cls,
        url: str | os.PathLike[str],
        *,
        include: str | tuple[str, ...] | list[str] = "*.parquet",
        columns: tuple[str, ...] | list[str] | None = None,
        fields: Mapping[str, str] | None = None,
        memory: int | str = 2147483648,
        limit: int | None = None,
        s3: Mapping[str, Any] = ...,
        retry: Mapping[str, Any] = ...,
        cache: Mapping[str, Any] = ...,
        read_ahead: Mapping[str, Any] = ...,
    ) -> Self:
        """The rows of the Parquet files below `url`.

        url: the folder of the files, or one .parquet file (also with braces)
        include: which files: globs (`**/*.parquet` for folders in folders), and braces, as
            "part-{00..99}.parquet"
        columns: read only these columns; default: those of `fields`, or all
        fields: field -> its column, as in {image: jpg, label: fine_label}; a column that is not named keeps
            its name
        memory: bound on the decoded row groups that each loading process holds; one is held whatever its
            size
        limit: only the first N samples of the canonical order
        s3: for `s3://`: `source.s3`
        retry: when the store fails for a while: `source.retry`
        cache: of slow stores, on local disk: `source.cache`
        read_ahead: of slow stores, into memory: `source.read_ahead`
        """

    @classmethod
    def huggingface(
        cls,
        *,
        url: str | os.PathLike[str] | None = None,
        name: str | None = None,
        config: str | None = None,
        split: str | None = None,
        columns: tuple[str, ...] | list[str] | None = None,
        fields: Mapping[str, str] | None = None,
        memory: int | str = 2147483648,
        limit: int | None = None,
        s3: Mapping[str, Any] = ...,
        retry: Mapping[str, Any] = ...,
        cache: Mapping[str, Any] = ...,
        read_ahead: Mapping[str, Any] = ...,
    ) -> Self:
        """A data set of Hugging Face's datasets on disk: saved by `save_to_disk`, or in the cache that `load_dataset` leaves.

        url: the folder that `save_to_disk` wrote, or one with the .arrow files of the cache
        name: or the name by which `load_dataset` has prepared it on this machine: it is looked up in the
            cache of datasets ($HF_DATASETS_CACHE), and nothing is downloaded
        config: with `name`: which configuration, if the cache has several
        split: which split, as train; default: the only one
        columns: only these columns; default: those of `fields`, or all
        fields: field -> its column, as in {image: img, label: fine_label}; a column that is not named keeps
            its name
        memory: bound on the record batches that each loading process holds of a remote store; files on disk
            are mapped
        limit: only the first N samples of the canonical order
        s3: for `s3://`: `source.s3`
        retry: when the store fails for a while: `source.retry`
        cache: of slow stores, on local disk: `source.cache`
        read_ahead: of slow stores, into memory: `source.read_ahead`
        """

    @classmethod
    def zarr(
        cls,
        url: str | os.PathLike[str],
        samples: Literal["rows", "whole"],
        fields: Mapping[str, str],
        *,
        memory: int | str = 1073741824,
        limit: int | None = None,
        s3: Mapping[str, Any] = ...,
        retry: Mapping[str, Any] = ...,
        cache: Mapping[str, Any] = ...,
        read_ahead: Mapping[str, Any] = ...,
    ) -> Self:
        """Arrays in Zarr stores, of version 3 or 2. A chunk that is not there holds the fill value.

        A store that is one array, as `zarr.save_array` writes it, has the path "/". Numbers only, and packings of bytes (blosc,
        zstd, gzip, lz4, shards and the like); objects and pickles are errors. Of a folder that does not hold the arrays itself all
        objects are listed to find the stores. Needs `loaderkit[volumes]`.

        url: the file or store; or a folder, of which all below are read
        samples: rows: each index of the arrays' first dimension is a sample; whole: each file or store is
            one
        fields: field -> path of its array, as in {image: images, label: meta/labels}
        memory: of rows: how much of chunks that several rows share is held unpacked in one process, so that
            they are unpacked once
        limit: only the first N samples of the canonical order
        s3: for `s3://`: `source.s3`
        retry: when the store fails for a while: `source.retry`
        cache: of slow stores, on local disk: `source.cache`
        read_ahead: of slow stores, into memory: `source.read_ahead`
        """

    @classmethod
    def hdf5(
        cls,
        url: str | os.PathLike[str],
        samples: Literal["rows", "whole"],
        fields: Mapping[str, str],
        *,
        memory: int | str = 1073741824,
        include: str | tuple[str, ...] | list[str] | None = None,
        limit: int | None = None,
        s3: Mapping[str, Any] = ...,
        retry: Mapping[str, Any] = ...,
        cache: Mapping[str, Any] = ...,
        read_ahead: Mapping[str, Any] = ...,
    ) -> Self:
        """Data sets in HDF5 files (.h5, .hdf5, .hdf, and .mat of MATLAB 7.3). h5py reads one at a time in a process, whatever the
        threads.

        Nothing but the file itself is read, and no plugin is loaded: links to other files, external storage, virtual data sets and
        filters other than gzip, lzf, szip, shuffle, fletcher32, n-bit and scale-offset are errors. Needs `loaderkit[volumes]`.

        url: the file or store; or a folder, of which all below are read
        samples: rows: each index of the arrays' first dimension is a sample; whole: each file or store is
            one
        fields: field -> path of its array, as in {image: images, label: meta/labels}
        memory: of rows: how much of chunks that several rows share is held unpacked in one process, so that
            they are unpacked once
        include: which files of a folder, relative to url: globs with **, and braces; default: all that end
            in .h5, .hdf5, .hdf or .mat
        limit: only the first N samples of the canonical order
        s3: for `s3://`: `source.s3`
        retry: when the store fails for a while: `source.retry`
        cache: of slow stores, on local disk: `source.cache`
        read_ahead: of slow stores, into memory: `source.read_ahead`
        """

    @classmethod
    def lines(
        cls,
        url: str | os.PathLike[str],
        *,
        include: str | tuple[str, ...] | list[str] | None = None,
        format: Literal["json", "text"] = "json",
        fields: Mapping[str, str] | None = None,
        limit: int | None = None,
        s3: Mapping[str, Any] = ...,
        retry: Mapping[str, Any] = ...,
        cache: Mapping[str, Any] = ...,
        read_ahead: Mapping[str, Any] = ...,
    ) -> Self:
        """The lines of text files, or the objects of JSON Lines.

        url: the folder of the files, or one file (also with globs and braces)
        include: which files of the folder `url`: globs and braces; default: *.jsonl, of text *.txt
        format: json: a line is an object, whose keys become fields; text: a line is the field `text`
        fields: field -> key of the object, or keys of nested ones with dots between, as in {label:
            meta.label}; or its type, as in {x: float32} or {label: meta.label int64}; default: all keys
        limit: only the first N samples of the canonical order
        s3: for `s3://`: `source.s3`
        retry: when the store fails for a while: `source.retry`
        cache: of slow stores, on local disk: `source.cache`
        read_ahead: of slow stores, into memory: `source.read_ahead`
        """

    @classmethod
    def tfrecord(
        cls,
        url: str | os.PathLike[str],
        *,
        include: str | tuple[str, ...] | list[str] | None = None,
        format: Literal["example", "bytes"] = "example",
        fields: Mapping[str, str] | None = None,
        verify: Literal["full", "length"] = "full",
        limit: int | None = None,
        s3: Mapping[str, Any] = ...,
        retry: Mapping[str, Any] = ...,
        cache: Mapping[str, Any] = ...,
        read_ahead: Mapping[str, Any] = ...,
    ) -> Self:
        """The records of TFRecord files: tf.train.Example, or any bytes.

        url: the folder of the files, or one file (also with globs and braces)
        include: which files of the folder `url`: globs and braces; default: *.tfrec*
        format: example: a tf.train.Example, whose features become fields; bytes: a record is the field
            `data`
        fields: field -> feature, as in {image: image/encoded, label: image/class/label}; with [] behind its
            name it is a list also where it has one value, as in {tokens: 'tokens[]'}, or none; or its type,
            as in {x: float32} or {boxes: 'boxes[] float32'}; default: all features
        verify: full: compare the checksum of every record's data; length: only that of its length
        limit: only the first N samples of the canonical order
        s3: for `s3://`: `source.s3`
        retry: when the store fails for a while: `source.retry`
        cache: of slow stores, on local disk: `source.cache`
        read_ahead: of slow stores, into memory: `source.read_ahead`
        """

    @classmethod
    def mds(
        cls,
        url: str | os.PathLike[str],
        *,
        split: str | None = None,
        fields: Mapping[str, str] | None = None,
        limit: int | None = None,
        s3: Mapping[str, Any] = ...,
        retry: Mapping[str, Any] = ...,
        cache: Mapping[str, Any] = ...,
        read_ahead: Mapping[str, Any] = ...,
    ) -> Self:
        """The samples of MDS shards, by the index.json beside them.

        url: the folder with index.json, or with folders of splits that have one
        split: the folder of the split, as train
        fields: field -> column, as in {image: x, label: y}; or its type, as in {y: int64} or {label: y
            int64}; default: all columns
        limit: only the first N samples of the canonical order
        s3: for `s3://`: `source.s3`
        retry: when the store fails for a while: `source.retry`
        cache: of slow stores, on local disk: `source.cache`
        read_ahead: of slow stores, into memory: `source.read_ahead`
        """

    @classmethod
    def dataset(
        cls,
        object: Any,
        *,
        args: Mapping[str, Any] = ...,
        fields: tuple[str, ...] | list[str] | Mapping[str, str] | None = None,
        thread_safe: bool | Literal["auto"] = "auto",
        limit: int | None = None,
    ) -> Self:
        """A Python object with `__len__` and `__getitem__`.

        object: "package.module:name" of the object or of a function that returns it, or the object
        args: keyword arguments, if `object` names a function or class
        fields: names for the items of a tuple or list; or field -> key, path of keys, or type, as in
            {label: target.label, x: float32, y: target.y int64}: then these are the sample
        thread_safe: true: several threads of a process may take items at once; else one does at a time;
            auto: true for lists, arrays, tensors and a TensorDataset
        limit: only the first N samples of the canonical order
        """

    @classmethod
    def iterable(
        cls,
        object: Any,
        *,
        args: Mapping[str, Any] = ...,
        fields: tuple[str, ...] | list[str] | Mapping[str, str] | None = None,
        thread_safe: bool | Literal["auto"] = "auto",
        length: int | None = None,
        resume: Literal["auto", "skip"] = "auto",
        limit: int | None = None,
    ) -> Self:
        """A Python object that can only be iterated over.

        For every epoch a copy of it, or what the function makes, is iterated over in its own order (`shuffle: none`), after
        `set_epoch(epoch)` if it has that. Every rank and every loading process iterates over all of it and keeps its share, so give
        it whole, not split by rank or worker.

        object: "package.module:name" of the iterable or of a function that returns it, or the iterable or
            function
        args: keyword arguments, if `object` names a function or class
        fields: names for the items of a tuple or list; or field -> key, path of keys, or type, as in
            {label: target.label, x: float32, y: target.y int64}: then these are the sample
        thread_safe: one thread at a time iterates in any case; false: and no function of the pipeline's
            that is not declared runs meanwhile, for what shares something with them
        length: items of an epoch, over all ranks: gives the loader its length; fewer are an error, more are
            left out, with a warning unless `limit` is that number, too
        resume: auto: by its `state_dict` and `load_state_dict`, if it has them; skip: by iterating up to
            the position
        limit: only the first N samples of the canonical order
        """

    @classmethod
    def checkpoint(
        cls,
        url: str | os.PathLike[str],
        *,
        keys: str | tuple[str, ...] | list[str] | None = None,
        dtype: str | None = None,
        verify: Literal["auto"] | bool = "auto",
        limit: int | None = None,
    ) -> Self:
        """The tensors of a checkpoint: safetensors, torch.save or torch.distributed.checkpoint.

        url: a file, a directory, or either in a tar
        keys: only names that match one of these globs; default: all
        dtype: cast floating-point tensors to this: bfloat16, float16, float32, ...
        verify: auto: compare with the manifest if there is one; true: demand one; false: do not look
        limit: only the first N samples of the canonical order
        """

    def read(self, *, name: str | None = None, workers: int | Literal["auto"] = "auto") -> Self:
        """Read each sample from its source.

        name: default: its kind; a second stage of a kind is kind-2
        workers: dedicated threads, or auto: share the automatic pool with adjacent stages
        """

    def decode(
        self,
        device: Literal["cpu", "gpu", "dali-cpu"] = "cpu",
        fields: tuple[str, ...] | list[str] | None = None,
        masks: tuple[str, ...] | list[str] | None = None,
        channels: int = 3,
        depth: Literal[8, 16] = 8,
        scaled: bool = False,
        formats: Sequence[Literal["jpeg", "png", "webp", "gif", "bmp", "tiff", "ppm", "avif", "jpeg2000"]] = ...,
        exif_orientation: bool = False,
        max_pixels: int = 178956970,
        boxes: Mapping[str, Literal["xyxy", "xywh", "cxcywh"]] = ...,
        keypoints: tuple[str, ...] | list[str] | None = None,
        instance_masks: tuple[str, ...] | list[str] | None = None,
        regions: Literal["auto"] | bool = "auto",
        on_gpu_error: Literal["raise", "cpu"] = "raise",
        video: Mapping[str, Any] | None = None,
        audio: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        workers: int | Literal["auto"] = "auto",
    ) -> Self:
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

        device: where images are decoded, and all that follows up to `normalize` is done: gpu and dali-cpu
            by NVIDIA DALI
        fields: decode only these; default: all
        masks: images of labels: kept as one channel of class numbers
        channels: of images: 3, RGB; 1, grey; 4, RGBA, opaque where a file does not say; or, of arrays only,
            any number
        depth: bits of a level: 8, uint8, to which 16 are reduced by v >> 8; or 16, uint16, as grey pictures
            and masks have them (8 bits become v * 257, class numbers stay)
        scaled: decode JPEGs at 1/2, 1/4 or 1/8 where the `resize` or `random_resized_crop` that follows
            shrinks them further: faster, and pixels differ by a few levels
        formats: open only these, told by a file's bytes, not its name; Pillow's other formats stay shut
        exif_orientation: turn images upright as their EXIF tag says; TIFF always is, and EXIF that cannot
            be read says nothing
        max_pixels: refuse larger images (decompression bombs); Pillow allows no more
        boxes: fields that are boxes [N, 4], each with its format, as in {boxes: xyxy} (or xywh, cxcywh)
        keypoints: fields that are keypoints [N, 2], [N, K, 2] or [N, K, 3], whose third number stays as it
            is
        instance_masks: fields that are masks of instances, one for each box: bool or uint8 [N, H, W], or a
            mask [H, W] in which each number but 0 is one, in ascending order
        regions: decode only the pixels of a crop that comes next, or (false) whole JPEGs, and crop then;
            auto: not with `device: gpu` where that fails in a trial, made in another process once a GPU and
            version
        on_gpu_error: where DALI fails whatever the images are: end with its error, or decode on the CPU
            from then on
        video: which frames of a video make a clip
        audio: which part of a sound is decoded, and how it is sampled
        name: default: its kind; a second stage of a kind is kind-2
        workers: dedicated threads, or auto: share the automatic pool with adjacent stages
        """

    def resize(
        self,
        size: int | tuple[int, int] | list[int],
        interpolation: Literal["bilinear", "bicubic", "nearest"] = "bilinear",
        antialias: bool = True,
        fields: tuple[str, ...] | list[str] | None = None,
        *,
        name: str | None = None,
        workers: int | Literal["auto"] = "auto",
    ) -> Self:
        """Resize to [height, width], or the shorter edge to `size`, keeping the shape.

        size: [height, width], or the length of the shorter edge
        interpolation: the filter; masks always take the nearest pixel
        antialias: widen the filter when shrinking, as Pillow does
        fields: images to act on; default: all of them
        name: default: its kind; a second stage of a kind is kind-2
        workers: dedicated threads, or auto: share the automatic pool with adjacent stages
        """

    def center_crop(
        self,
        size: int | tuple[int, int] | list[int],
        fields: tuple[str, ...] | list[str] | None = None,
        *,
        name: str | None = None,
        workers: int | Literal["auto"] = "auto",
    ) -> Self:
        """Cut the middle out; an image that is too small is padded with zeros.

        size: [height, width], or one number for both
        fields: images to act on; default: all of them
        name: default: its kind; a second stage of a kind is kind-2
        workers: dedicated threads, or auto: share the automatic pool with adjacent stages
        """

    def random_crop(
        self,
        size: int | tuple[int, int] | list[int],
        padding: int = 0,
        pad_if_needed: bool = False,
        fill: int = 0,
        fields: tuple[str, ...] | list[str] | None = None,
        *,
        name: str | None = None,
        workers: int | Literal["auto"] = "auto",
    ) -> Self:
        """Crop a random window.

        size: [height, width], or one number for both
        padding: pixels of `fill` added on every side first
        pad_if_needed: pad an image that is smaller than `size` instead of refusing it
        fill: the level of added pixels
        fields: images to act on; default: all of them
        name: default: its kind; a second stage of a kind is kind-2
        workers: dedicated threads, or auto: share the automatic pool with adjacent stages
        """

    def random_resized_crop(
        self,
        size: int | tuple[int, int] | list[int],
        scale: tuple[float, float] | list[float] = ...,
        ratio: tuple[float, float] | list[float] = ...,
        interpolation: Literal["bilinear", "bicubic", "nearest"] = "bilinear",
        antialias: bool = True,
        fields: tuple[str, ...] | list[str] | None = None,
        *,
        name: str | None = None,
        workers: int | Literal["auto"] = "auto",
    ) -> Self:
        """Crop a window of random area and aspect ratio, and resize it.

        size: [height, width], or one number for both
        scale: bounds of the crop's share of the image's area
        ratio: bounds of width / height
        interpolation: the filter; masks always take the nearest pixel
        antialias: widen the filter when shrinking, as Pillow does
        fields: images to act on; default: all of them
        name: default: its kind; a second stage of a kind is kind-2
        workers: dedicated threads, or auto: share the automatic pool with adjacent stages
        """

    def random_horizontal_flip(
        self,
        p: float = 0.5,
        fields: tuple[str, ...] | list[str] | None = None,
        *,
        name: str | None = None,
        workers: int | Literal["auto"] = "auto",
    ) -> Self:
        """Mirror left and right with probability `p`.

        p: probability
        fields: images to act on; default: all of them
        name: default: its kind; a second stage of a kind is kind-2
        workers: dedicated threads, or auto: share the automatic pool with adjacent stages
        """

    def random_vertical_flip(
        self,
        p: float = 0.5,
        fields: tuple[str, ...] | list[str] | None = None,
        *,
        name: str | None = None,
        workers: int | Literal["auto"] = "auto",
    ) -> Self:
        """Mirror top and bottom with probability `p`.

        p: probability
        fields: images to act on; default: all of them
        name: default: its kind; a second stage of a kind is kind-2
        workers: dedicated threads, or auto: share the automatic pool with adjacent stages
        """

    def random_rotation(
        self,
        degrees: float | tuple[float, float] | list[float],
        interpolation: Literal["bilinear", "bicubic", "nearest"] = "nearest",
        expand: bool = False,
        fill: int = 0,
        fields: tuple[str, ...] | list[str] | None = None,
        *,
        name: str | None = None,
        workers: int | Literal["auto"] = "auto",
    ) -> Self:
        """Rotate about the middle by a random angle.

        degrees: bounds of the angle, counter-clockwise; x stands for [-x, x]
        interpolation: the filter; masks always take the nearest pixel
        expand: enlarge the image so that nothing is cut off
        fill: the level of pixels from outside the image, in masks as well
        fields: images to act on; default: all of them
        name: default: its kind; a second stage of a kind is kind-2
        workers: dedicated threads, or auto: share the automatic pool with adjacent stages
        """

    def sanitize_boxes(
        self,
        labels: tuple[str, ...] | list[str],
        min_size: float = 1.0,
        min_area: float = 1.0,
        boxes: str | None = None,
        *,
        name: str | None = None,
        workers: int | Literal["auto"] = "auto",
    ) -> Self:
        """Clip boxes to the image, and drop those that are too small, together with what belongs to them.

        labels: fields with one entry for each box (classes, keypoints, ...), of which the same ones are
            dropped; [] if there are none. Masks of instances that `decode` names are among them anyway, if
            it names one field of boxes
        min_size: the least width and height, in pixels
        min_area: the least width x height
        boxes: the field of boxes; default: the one that `decode` names
        name: default: its kind; a second stage of a kind is kind-2
        workers: dedicated threads, or auto: share the automatic pool with adjacent stages
        """

    def color_jitter(
        self,
        brightness: float | tuple[float, float] | list[float] = ...,
        contrast: float | tuple[float, float] | list[float] = ...,
        saturation: float | tuple[float, float] | list[float] = ...,
        hue: float | tuple[float, float] | list[float] = ...,
        fields: tuple[str, ...] | list[str] | None = None,
        *,
        name: str | None = None,
        workers: int | Literal["auto"] = "auto",
    ) -> Self:
        """Change brightness, contrast, saturation and hue by random factors, in random order.

        brightness: bounds of the factor; x stands for [max(0, 1 - x), 1 + x]
        contrast: likewise
        saturation: likewise
        hue: bounds of the shift, in turns of the colour circle; x stands for [-x, x]
        fields: images to act on; default: all of them
        name: default: its kind; a second stage of a kind is kind-2
        workers: dedicated threads, or auto: share the automatic pool with adjacent stages
        """

    def random_grayscale(
        self,
        p: float = 0.1,
        fields: tuple[str, ...] | list[str] | None = None,
        *,
        name: str | None = None,
        workers: int | Literal["auto"] = "auto",
    ) -> Self:
        """Take the colours away with probability `p`; the image keeps its three channels.

        p: probability
        fields: images to act on; default: all of them
        name: default: its kind; a second stage of a kind is kind-2
        workers: dedicated threads, or auto: share the automatic pool with adjacent stages
        """

    def gaussian_blur(
        self,
        kernel_size: int,
        sigma: float | tuple[float, float] | list[float] = ...,
        fields: tuple[str, ...] | list[str] | None = None,
        *,
        name: str | None = None,
        workers: int | Literal["auto"] = "auto",
    ) -> Self:
        """Blur with a Gaussian of random width.

        kernel_size: height and width of the window in pixels, an odd number
        sigma: bounds of the standard deviation in pixels; x stands for [x, x]
        fields: images to act on; default: all of them
        name: default: its kind; a second stage of a kind is kind-2
        workers: dedicated threads, or auto: share the automatic pool with adjacent stages
        """

    def random_erasing(
        self,
        p: float = 0.5,
        scale: tuple[float, float] | list[float] = ...,
        ratio: tuple[float, float] | list[float] = ...,
        value: int | tuple[int, int, int] | list[int] | Literal["random"] = 0,
        fields: tuple[str, ...] | list[str] | None = None,
        *,
        name: str | None = None,
        workers: int | Literal["auto"] = "auto",
    ) -> Self:
        """Overwrite a random rectangle with probability `p`.

        p: probability
        scale: bounds of the rectangle's share of the image's area
        ratio: bounds of height / width
        value: the level, one for red, green and blue each, or `random`: another for every pixel and channel
        fields: images to act on; default: all of them
        name: default: its kind; a second stage of a kind is kind-2
        workers: dedicated threads, or auto: share the automatic pool with adjacent stages
        """

    def random_volume_crop(
        self,
        size: Sequence[int],
        fields: tuple[str, ...] | list[str],
        foreground: str | None = None,
        p: float = 0.4,
        pad_if_needed: bool = False,
        fill: int | float = 0,
        labels: tuple[str, ...] | list[str] = ...,
        *,
        name: str | None = None,
        workers: int | Literal["auto"] = "auto",
    ) -> Self:
        """Cut one random window out of arrays or tensors, such as a scan and its labels.

        size: of the window along the last dimensions, as in [128, 128, 128]
        fields: the arrays to cut, which are alike in these dimensions
        foreground: a field of labels: the window holds one of its values that are not 0, as often as `p`
            says
        p: the probability of that; at other times, and without any, it is anywhere
        pad_if_needed: pad what is smaller than `size` at its ends instead of refusing it
        fill: the value of what is padded; labels are padded with 0
        labels: fields of class numbers, which are padded with 0; `foreground` is one of them
        name: default: its kind; a second stage of a kind is kind-2
        workers: dedicated threads, or auto: share the automatic pool with adjacent stages
        """

    def random_volume_flip(
        self,
        fields: tuple[str, ...] | list[str],
        axes: Sequence[int] = ...,
        p: float = 0.5,
        *,
        name: str | None = None,
        workers: int | Literal["auto"] = "auto",
    ) -> Self:
        """Mirror arrays or tensors alike, along each axis by itself.

        fields: the arrays to mirror, which are alike along these axes
        axes: counted from the last one, -1
        p: the probability for each axis
        name: default: its kind; a second stage of a kind is kind-2
        workers: dedicated threads, or auto: share the automatic pool with adjacent stages
        """

    def call(
        self,
        function: str | Callable[..., Any],
        args: Mapping[str, Any] = ...,
        timeout: float | str | None = None,
        thread_safe: bool | Literal["auto"] = "auto",
        seeded: bool = False,
        *,
        name: str | None = None,
        workers: int | Literal["auto"] = "auto",
    ) -> Self:
        """Call a user's function with the sample, or behind `batch` with the batch: a dict, field -> value.

        It changes the dict in place, or returns a dict that is merged into it: fields it names are set, the others stay as
        they are. `del sample["field"]` drops a field; leaving it out of the returned dict does not.

        function: "package.module:function", or in Python the function itself; of a class with `__call__`
            one object is made in each process, and called
        args: keyword arguments for every call; of a class: to make its object with
        timeout: time limit of a call; after it the sample (or batch) fails, and the call is abandoned: it
            may run on, and unless the function is `thread_safe` the next call waits for it, as long as for
            itself
        thread_safe: true: several threads of a process may call it at once; else, and with auto, one does
            at a time, in which no other function or data set runs that is not declared
        seeded: seed the global generators of torch, NumPy and Python for every call; not with `executor:
            thread`
        name: default: its kind; a second stage of a kind is kind-2
        workers: dedicated threads, or auto: share the automatic pool with adjacent stages
        """

    def filter(
        self,
        function: str | Callable[..., Any],
        args: Mapping[str, Any] = ...,
        timeout: float | str | None = None,
        thread_safe: bool | Literal["auto"] = "auto",
        seeded: bool = False,
        on_empty_batch: Literal["raise", "skip"] = "raise",
        *,
        name: str | None = None,
        workers: int | Literal["auto"] = "auto",
    ) -> Self:
        """Drop the samples for which a user's function returns False.

        It gets a sample as `call` does, and returns True to keep it, or False. It must change no value in place, such as the pixels
        of an image, since it is given the values themselves: `call` is for that. A batch is shorter by the samples that are
        dropped. A dropped sample does not count as bad; a sample for which the function fails does.

        function: "package.module:function", or in Python the function itself; of a class with `__call__`
            one object is made in each process, and called
        args: keyword arguments for every call; of a class: to make its object with
        timeout: time limit of a call; after it the sample (or batch) fails, and the call is abandoned: it
            may run on, and unless the function is `thread_safe` the next call waits for it, as long as for
            itself
        thread_safe: true: several threads of a process may call it at once; else, and with auto, one does
            at a time, in which no other function or data set runs that is not declared
        seeded: seed the global generators of torch, NumPy and Python for every call; not with `executor:
            thread`
        on_empty_batch: a batch of which nothing is left is an error; or it is skipped, with one warning:
            then how many batches come shows at the end of the epoch, so len(loader) is a TypeError. For one
            rank. Several filters must all say skip
        name: default: its kind; a second stage of a kind is kind-2
        workers: dedicated threads, or auto: share the automatic pool with adjacent stages
        """

    def expand(
        self,
        function: str | Callable[..., Any],
        num: int,
        args: Mapping[str, Any] = ...,
        timeout: float | str | None = None,
        thread_safe: bool | Literal["auto"] = "auto",
        seeded: bool = False,
        *,
        name: str | None = None,
        workers: int | Literal["auto"] = "auto",
    ) -> Self:
        """Make `num` samples of one by a user's function, as patches of a volume; they are neighbours in the order.

        The function gets a sample as `call` does, and returns a list of `num` dicts; or, if it has a second parameter, it gets
        the number of one of them, from 0, and returns that. Each is merged into the sample, as `call` does it. It must change no
        array or tensor in place, as all are made of the same: crops may be views.

        function: "package.module:function", or in Python the function itself; of a class with `__call__`
            one object is made in each process, and called
        num: how many samples are made of one
        args: keyword arguments for every call; of a class: to make its object with
        timeout: time limit of a call; after it the sample (or batch) fails, and the call is abandoned: it
            may run on, and unless the function is `thread_safe` the next call waits for it, as long as for
            itself
        thread_safe: true: several threads of a process may call it at once; else, and with auto, one does
            at a time, in which no other function or data set runs that is not declared
        seeded: seed the global generators of torch, NumPy and Python for every call; not with `executor:
            thread`
        name: default: its kind; a second stage of a kind is kind-2
        workers: dedicated threads, or auto: share the automatic pool with adjacent stages
        """

    def tokenize(
        self,
        tokenizer: str | os.PathLike[str],
        chat: str | tuple[str, ...] | list[str] | None = None,
        text: str | tuple[str, ...] | list[str] | None = None,
        prompt: str | None = None,
        tools: str | None = None,
        mask: Literal["prompt", "none"] | None = None,
        template: str | os.PathLike[str] | None = None,
        max_length: int | None = None,
        too_long: Literal["cut", "bad"] = "cut",
        special_tokens: bool = True,
        eos: bool = False,
        *,
        name: str | None = None,
        workers: int | Literal["auto"] = "auto",
    ) -> Self:
        """Make tokens of chats or texts, by a tokenizer of transformers'.

        Fields: `input_ids` and, with `mask`, `labels`, int64 [tokens] both; of several fields, such as preference pairs have, with
        the field's name before each, `chosen_input_ids`. The fields they are made of are left out. No code of a tokenizer's is run.

        tokenizer: a folder, as `save_pretrained` writes it, relative to the file; or its name on the hub
        chat: the field with a list of messages, {role: ..., content: ...}, written by the chat template; or
            several, each a sequence of its own, as in [chosen, rejected]
        text: or the field with plain text, or several
        prompt: a field of the same kind that comes before each, and is not to be learned
        tools: of `chat`: the field with the functions that it may call, a list of JSON schemas, or null
        mask: labels for the loss; prompt: -100 for all but what the assistant says, or, of text, what
            follows `prompt`; none: the tokens themselves; default: no labels
        template: a file with a chat template (Jinja), in the place of the tokenizer's own
        max_length: tokens of a sequence, at most
        too_long: longer ones are cut, at the tokenizer's `truncation_side`, and a warning says so once; or
            are bad samples
        special_tokens: of `text`: with the tokens that the tokenizer puts around one; chats have those of
            the template
        eos: of `text`: with the token that ends a text behind it, unless it ends so already
        name: default: its kind; a second stage of a kind is kind-2
        workers: dedicated threads, or auto: share the automatic pool with adjacent stages
        """

    def pack(
        self,
        length: int,
        window: int = 20000,
        split: Literal["long", "never"] = "long",
        cost: Literal["attention", "none"] = "attention",
        field: str = "tokens",
        pad_value: Mapping[str, float] = ...,
        *,
        name: str | None = None,
        workers: int | Literal["auto"] = "auto",
    ) -> Self:
        """Pack documents of unequal length into sequences of one length, the samples from here on; directly before `batch`.

        Their fields: `input_ids`, `position_ids` (int32, from 0 in every piece), `document_ids` (int32, the number in the sequence,
        -1 in the padding), each [B, length]; and `cu_seqlens`, int32, where pieces and paddings begin in all sequences of the batch
        laid end to end, and last B x length. Of several sources also `source_ids`, int32 [B, length]: the place of each token's
        source in `loader.sources`, -1 in the padding.

        length: tokens of a sequence, the padding included
        window: documents, consecutive in the order, that are packed together
        split: cut documents that are longer than `length` into pieces; never: they are an error
        cost: neighbouring sequences, and so the ranks of a step, have about the same sum of squares of
            pieces; none: a random order
        field: of the documents' tokens: whole numbers, [n]; others are left out
        pad_value: other fields that have a number for each token, as in {labels: -100}: they are packed as
            the tokens are, and hold this in the padding; `input_ids` gives that of the tokens, which is 0
        name: default: its kind; a second stage of a kind is kind-2
        workers: dedicated threads, or auto: share the automatic pool with adjacent stages
        """

    def batch(
        self,
        size: int | None = None,
        drop_last: bool = False,
        ragged: Mapping[str, Literal["list", "pad"]] = ...,
        pad_value: float | Mapping[str, float] = 0.0,
        padding_side: Literal["right", "left"] = "right",
        pad_to_multiple_of: int | None = None,
        attention_mask: str | Mapping[str, str] | None = None,
        tokens: int | None = None,
        window: int = 20000,
        cost: Literal["attention", "none"] = "attention",
        field: str = "tokens",
        *,
        name: str | None = None,
        workers: int | Literal["auto"] = "auto",
    ) -> Self:
        """Gather samples into batches, of `size` samples or of `tokens` tokens.

        size: samples per batch; or give `tokens`
        drop_last: drop samples that do not fill a batch on every rank; with `tokens`, batches
        ragged: fields whose tensors differ in shape: delivered as a list, or padded to the largest
        pad_value: the value of the padding; or field -> its value, as in {input_ids: 0, labels: -100}:
            these are padded
        padding_side: where the padding of a field's first dimension is
        pad_to_multiple_of: pad the first dimension on, to a multiple of this: what fast kernels ask for
        attention_mask: its name in the batch: int64, 1 where there is a sample's own value and 0 in the
            padding, of all fields that are padded; or, if these differ in length, name -> field
        tokens: per batch, at most: of a padded `field` the longest sample times the number of samples, of a
            list the sum; behind `pack`, whose sequences are all of one length, their number is `tokens` /
            `length`, rounded down
        window: samples, consecutive in the order, that are batched by length; 0: in order, without regard
            to it
        cost: neighbouring batches, and so the ranks of a step, have about the same sum of squares of
            lengths; none: a random order
        field: that of which `tokens` are counted: its first dimension
        name: default: its kind; a second stage of a kind is kind-2
        workers: dedicated threads, or auto: share the automatic pool with adjacent stages
        """

    def normalize(
        self,
        mean: Sequence[float] | Literal["imagenet"] = "imagenet",
        std: Sequence[float] | Literal["imagenet"] = "imagenet",
        dtype: Literal["float32", "float16", "bfloat16", "float64"] = "float32",
        fields: tuple[str, ...] | list[str] | None = None,
        *,
        name: str | None = None,
        workers: int | Literal["auto"] = "auto",
    ) -> Self:
        """Turn uint8 images into floats: (x / 255 - mean) / std per channel; images of `decode: {depth: 16}` are divided by
        65535.

        mean: of x / 255: one number a channel, one for all, or imagenet
        std: of x / 255: one number a channel, one for all, or imagenet
        dtype: of the result
        fields: images to act on; default: all of them
        name: default: its kind; a second stage of a kind is kind-2
        workers: dedicated threads, or auto: share the automatic pool with adjacent stages
        """

    def transfer(
        self,
        device: str = "auto",
        channels_last: bool = False,
        dtype: Literal["float32", "float16", "bfloat16", "float64"] | None = None,
        *,
        name: str | None = None,
        workers: int | Literal["auto"] = "auto",
    ) -> Self:
        """Copy the batch to a device.

        device: auto, cpu, cuda or cuda:N
        channels_last: convert images and other [B, C, H, W] to torch.channels_last on the device
        dtype: cast floating-point tensors to this on the device; uint8 stays uint8
        name: default: its kind; a second stage of a kind is kind-2
        workers: dedicated threads, or auto: share the automatic pool with adjacent stages
        """

    def prefetch(
        self,
        *,
        batches: int | Literal["auto"] = 4,
        memory: int | str = 2147483648,
        concurrency: int | Literal["auto"] = "auto",
        executor: Literal["auto", "inline", "thread", "process", "ray"] = "auto",
        ray: Mapping[str, Any] = ...,
        processes: int | Literal["auto"] = 1,
        max_processes: int | None = None,
        restarts: int = 3,
        timeout: float | str = 60.0,
        on_timeout: Literal["warn", "raise"] = "warn",
    ) -> Self:
        """How far and how fast to work ahead.

        batches: batches being made or ready while the consumer works on another; auto: 4 to begin with,
            then measured
        memory: bound on the memory of those batches
        concurrency: worker threads in all; auto: one a CPU to begin with, then measured
        executor: auto: threads here, and worker processes once the loop waits for user code that is not
            `thread_safe`; inline: none, next() does the work; process: threads of other processes; ray: of
            actors of a Ray cluster
        ray: for `executor: ray`, below
        processes: how many, with `executor: process` or `ray`; they share `batches`, `memory` and all
            workers out evenly; auto: one to begin with, then measured, and `batches` is auto as well unless
            it is given
        max_processes: the most that `processes: auto` comes to; default: a process a CPU of this rank (with
            `ray` what the cluster has room for), and as many as `batches`, if that is a number
        restarts: with `executor: process` or `ray`: how often, in all, one that died is started again, and
            its batches are made again; one death more, or a second one at the same batch, raises
            WorkerDiedError; 0: the first does
        timeout: a wait this long is reported with the stage, the sample and stacks; first at a quarter of
            it
        on_timeout: after `timeout`: keep waiting, or raise StallTimeout (not with `executor: inline`)
        """

    def errors(
        self,
        *,
        on_bad_sample: Literal["raise", "skip", "replace"] = "raise",
        max_bad_samples: int = 100,
        on_bad_shard: Literal["raise", "skip"] = "raise",
        max_bad_shards: int = 1,
        quarantine: str | os.PathLike[str] | None = None,
    ) -> Self:
        """What to do with samples that cannot be read, decoded or transformed, and with shards that are damaged or missing.

        on_bad_sample: stop; make the batch shorter; or put another sample, drawn from the seed, in its
            place
        max_bad_samples: per rank and epoch; one more raises
        on_bad_shard: of archives and files of many samples, one that is cut, damaged or missing: stop; or
            leave it out (of a tar and an array what is behind the damage)
        max_bad_shards: in all sources together; one more raises, and names all
        quarantine: a file that gets one JSON line for every bad sample and shard
        """

    def ranks(self, *, share: Literal["read", "broadcast"] = "read") -> Self:
        """How ranks of a mesh that need the same batches get them: those behind tensor, pipeline and context parallelism.
        Without such ranks it has no effect.

        share: each reads for itself; broadcast: the first of them reads, and passes batches on to the
            others
        """

    def metrics(self, *, prometheus: int | str | None = None) -> Self:
        """Where other programs read what the loader counts.

        prometheus: the port at which Prometheus reads it, on this machine; HOST:PORT, as in 0.0.0.0:9431,
            for others; with LOCAL_RANK n (torchrun) it is the port + n; the loaders of one process share it
        """
