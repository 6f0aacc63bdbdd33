"""Checks whether the images of a sample lie on one another, as a mask on its picture or a depth map on its colours.

Pixels of one crop need images of one size. A resize, a flip or a rotation also keeps images of one shape together, such as a
mask of half the size; not a mask that was drawn upright on a picture which lies on its side (EXIF).
"""

from __future__ import annotations

from collections.abc import Sequence

from loaderkit.samples.values import Image

Named = Sequence[tuple[str, Image]]
_TURNED = ". `decode: {exif_orientation: true}` turns a picture that lies on its side, where masks were drawn upright"


def check_sizes(images: Named) -> None:
    """Raise ValueError unless all images have one size, as a shared crop needs it."""
    if len(images) > 1 and len({image.size for _, image in images}) > 1:
        raise ValueError(
            f"its images differ in size ({_listed(images)}) and cannot share a crop: `resize` them first, or name one of them "
            f"in `fields`{_TURNED if not _are_alike(images) else ''}"
        )


def check_shapes(images: Named) -> None:
    """Raise ValueError unless all images have one shape, height to width, but for a pixel."""
    if len(images) > 1 and not _are_alike(images):
        raise ValueError(
            f"its images differ in shape ({_listed(images)}) and would not be moved alike: name one of them in "
            f"`fields`{_TURNED}"
        )


def check_masks(images: Named) -> None:
    """Raise ValueError unless every mask has the shape of an image, if there are any."""
    if len(images) < 2:
        return
    pictures = [named for named in images if not named[1].mask]
    if not pictures or len(pictures) == len(images):
        return
    for mask in images:
        if mask[1].mask and not any(_are_alike((picture, mask)) for picture in pictures):
            raise ValueError(
                f"its mask {mask[0]} has the shape of no image ({_listed(images)}), so it lies on none: name masks in `fields` "
                f"apart if that is meant{_TURNED}"
            )


def _are_alike(images: Named) -> bool:
    height, width = images[0][1].size
    for _, image in images[1:]:
        other_height, other_width = image.size
        # Of a side that was divided and rounded a pixel more or less.
        if abs(height * other_width - width * other_height) > max(height, width, other_height, other_width):
            return False
    return True


def _listed(images: Named) -> str:
    return ", ".join(f"{name} {image.size[1]} x {image.size[0]}" for name, image in images)
