"""Pipelines whose parts are right one by one and do not fit together.

"<<" marks the line that the error must name. Then: the key it must name, and what else it must say.
"""

from __future__ import annotations

WRONG_STRUCTURES: dict[str, tuple[str, str, list[str]]] = {
    "batch stage before batch": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - decode
  - normalize  # <<
  - batch: {size: 4}
""",
        "stages.2",
        ["`normalize`", "after `batch`"],
    ),
    "sample stage after batch": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - decode
  - batch: {size: 4}
  - resize: {size: 3}  # <<
""",
        "stages.3",
        ["`resize`", "before `batch`"],
    ),
    "no batch": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - decode  # <<
""",
        "stages.1",
        ["no `batch`"],
    ),
    "no read": (
        """\
source: {kind: files, url: data}
stages:
  - decode  # <<
  - batch: {size: 4}
""",
        "stages.0",
        ["`read`", "missing"],
    ),
    "read not first": (
        """\
source: {kind: files, url: data}
stages:
  - decode
  - read  # <<
  - batch: {size: 4}
""",
        "stages.1",
        ["`read` must be the first"],
    ),
    "second batch": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - batch: {size: 4}
  - batch: {size: 4}  # <<
""",
        "stages.2",
        ["second `batch`"],
    ),
    "normalize on text": (
        """\
source: {kind: files, url: data, include: "**/*.txt"}
stages:
  - read
  - decode
  - batch: {size: 4}
  - normalize  # <<
""",
        "stages.3",
        ["`normalize` acts on images", "text"],
    ),
    "normalize on a text field": (
        """\
source: {kind: tar, url: data, fields: {image: "jpg;png", caption: txt}}
stages:
  - read
  - decode
  - batch: {size: 4}
  - normalize: {fields: [caption]}  # <<
""",
        "stages.3",
        ["'caption' is text"],
    ),
    "a field that does not exist": (
        """\
source: {kind: tar, url: data, fields: {image: "jpg;png", caption: txt}}
stages:
  - read
  - decode
  - resize: {size: 3, fields: [imgae]}  # <<
  - batch: {size: 4}
""",
        "stages.2",
        ["'imgae'", "did you mean 'image'?"],
    ),
    "images that are still encoded": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - resize: {size: 3}  # <<
  - batch: {size: 4}
""",
        "stages.1",
        ["`resize` needs images", "`decode`"],
    ),
    "block order of an object": (
        """\
source: {kind: dataset, object: "config_cases:Letters"}
order:
  shuffle: block  # <<
stages: [read, batch: {size: 4}]
""",
        "order.shuffle",
        ["bytes", "global or none"],
    ),
    "value next to one of a fixed list": (
        """\
source:
  kind: array
  url: tokens.bin
  dtype: unit16  # <<
stages: [read, batch: {size: 4}]
""",
        "source.dtype",
        ["or 'complex128', not 'unit16'; did you mean 'uint16'?"],
    ),
    "number for a list": (
        """\
source:
  kind: array
  url: tokens.bin
  dtype: uint16
  shape: 4  # <<
stages: [read, batch: {size: 4}]
""",
        "source.shape",
        ["expected a list, not 4"],
    ),
    "list that is too short": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - decode
  - resize:
      size: [3]  # <<
  - batch: {size: 4}
""",
        "stages.2.resize.size",
        ["expected a valid integer or a list of 2 items, not [3]"],
    ),
    "list that is empty": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - decode
  - resize:
      size: []  # <<
  - batch: {size: 4}
""",
        "stages.2.resize.size",
        ["expected a valid integer or a list of 2 items, not []"],
    ),
    "list that is too long": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - decode
  - resize:
      size: [3, 4, 5]  # <<
  - batch: {size: 4}
""",
        "stages.2.resize.size",
        ["expected a valid integer or a list of at most 2 items"],
    ),
    "one bound of two": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - decode
  - color_jitter:
      brightness: [1]  # <<
  - batch: {size: 4}
""",
        "stages.2.color_jitter.brightness",
        ["expected a list of 2 items, not [1]"],
    ),
    "one name for two fields of an object": (
        """\
source:
  kind: dataset
  object: "config_cases:Letters"
  fields: [x, y, x]  # <<
stages: [read, batch: {size: 4}]
""",
        "source.fields",
        ["expected distinct names", "'y'"],
    ),
    "two stages of one name": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - decode
  - resize: {size: 3, name: center_crop}
  - center_crop: {size: 3}  # <<
  - batch: {size: 4}
""",
        "stages.3",
        ["two stages are called 'center_crop'"],
    ),
    "missing variable": (
        """\
source:
  kind: files
  url: ${LOADERKIT_TEST_NOTHING}  # <<
stages: [read, batch: {size: 4}]
""",
        "source.url",
        ["no variable LOADERKIT_TEST_NOTHING", "${LOADERKIT_TEST_NOTHING:-default}"],
    ),
    "missing stages": ("source: {kind: files, url: data}  # <<\n", "stages", ["`stages` is missing"]),
    "no stages": (
        """\
source: {kind: files, url: data}
stages: []  # <<
""",
        "stages",
        ["`stages` is empty"],
    ),
    "missing source": ("stages: [read, batch: {size: 4}]  # <<\n", "source", ["`source` is missing"]),
    "source that is text": (
        """\
source: data  # <<
stages: [read, batch: {size: 4}]
""",
        "source",
        ["`source` is 'data'", "kind"],
    ),
    "section that is a list": (
        """\
source: {kind: files, url: data}
stages: [read, batch: {size: 4}]
prefetch: [4]  # <<
""",
        "prefetch",
        ["expected a mapping", "batches"],
    ),
    "another version": (
        """\
version: 2  # <<
source: {kind: files, url: data}
stages: [read, batch: {size: 4}]
""",
        "version",
        ["version 1", "not 2"],
    ),
    "name that is a number": (
        """\
source: {kind: files, url: data}
name: 7  # <<
stages: [read, batch: {size: 4}]
""",
        "name",
        ["text", "7"],
    ),
    "output that is text": (
        """\
source: {kind: files, url: data}
stages: [read, batch: {size: 4}]
output: image  # <<
""",
        "output",
        ["list of fields", "'image'"],
    ),
    "no process": (
        """\
source: {kind: files, url: data}
stages: [read, batch: {size: 4}]
prefetch:
  processes: 0  # <<
""",
        "prefetch.processes",
        ["greater than 0", "not 0"],
    ),
    "function without a module": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - call: {function: cutout}  # <<
  - batch: {size: 4}
""",
        "stages.1.call.function",
        ["package.module:function", "'cutout'"],
    ),
    "field with two extensions' owners": (
        """\
source:
  kind: tar
  url: data
  fields: {a: jpg, b: "png;jpg"}  # <<
stages: [read, batch: {size: 4}]
""",
        "source.fields",
        ["expected each extension once, not 'jpg' for both 'a' and 'b'"],
    ),
    "label twice": (
        """\
source: {kind: files, url: data, label: parent, fields: {label: cls, image: jpg}}  # <<
stages: [read, batch: {size: 4}]
""",
        "source",
        ["label"],
    ),
    "seeded in threads": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - call: {function: "config_cases:double", seeded: true}  # <<
  - batch: {size: 4}
prefetch: {executor: thread}
""",
        "stages.1.call.seeded",
        ["prefetch: {executor: process}", "`rng`"],
    ),
    "seeded with a timeout": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - call: {function: "config_cases:double", seeded: true, timeout: 1 s}  # <<
  - batch: {size: 4}
prefetch: {executor: process}
""",
        "stages.1.call.seeded",
        ["not with `timeout`", "abandoned"],
    ),
    "seeded in the process that trains": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - batch: {size: 4}
  - transfer
  - call: {function: "config_cases:double", seeded: true}  # <<
prefetch: {executor: process}
""",
        "stages.3.call.seeded",
        ["not after `transfer`", "`rng`"],
    ),
}
