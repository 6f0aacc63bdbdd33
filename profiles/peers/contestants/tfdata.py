"""tf.data: everything in TensorFlow's own operations, parallel calls and prefetching left to its autotuner, 2 threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import tensorflow as tf

from profiles.peers.places import Places, labelled

PACKAGE = "tensorflow-cpu"
_SIZE = 224
_MEAN = [[[0.485 * 255]], [[0.456 * 255]], [[0.406 * 255]]]
_STD = [[[0.229 * 255]], [[0.224 * 255]], [[0.225 * 255]]]


def _augmented(path: Any, label: Any, *, antialias: bool, fused: bool) -> tuple[Any, Any]:
    encoded = tf.io.read_file(path)
    whole = tf.constant([0, 0, 1, 1], tf.float32, [1, 1, 4])
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        tf.io.extract_jpeg_shape(encoded),
        whole,
        min_object_covered=0.0,
        aspect_ratio_range=[3 / 4, 4 / 3],
        area_range=[0.08, 1.0],
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
    )
    window = [begin[0], begin[1], size[0], size[1]]
    if fused:
        image = tf.io.decode_and_crop_jpeg(encoded, tf.stack(window), channels=3)
    else:
        image = tf.image.crop_to_bounding_box(tf.io.decode_jpeg(encoded, channels=3), *window)
    image = tf.image.resize(image, [_SIZE, _SIZE], antialias=antialias)
    image = tf.transpose(tf.image.random_flip_left_right(image), [2, 0, 1])
    return (image - _MEAN) / _STD, label


def _photos(places: Places, settings: dict[str, Any], *, antialias: bool) -> Iterable[Any]:
    """Setting `fused`: decode no more than the crop."""
    samples = labelled(places.photos)
    dataset = tf.data.Dataset.from_tensor_slices(([str(path) for path, _ in samples], [label for _, label in samples]))
    dataset = dataset.shuffle(len(samples)).repeat()
    augment = partial(_augmented, antialias=antialias, fused=settings.get("fused", False))
    dataset = dataset.map(augment, num_parallel_calls=tf.data.AUTOTUNE, deterministic=False)
    options = tf.data.Options()
    options.threading.private_threadpool_size = 2
    found: Iterable[Any] = (
        dataset.batch(64, drop_remainder=True, num_parallel_calls=tf.data.AUTOTUNE)
        .prefetch(tf.data.AUTOTUNE)
        .with_options(options)
        .as_numpy_iterator()
    )
    return found


WORKS: dict[str, Callable[[Places, dict[str, Any]], Iterable[Any]]] = {
    "files": partial(_photos, antialias=True),
    "files-no-antialias": partial(_photos, antialias=False),
}
