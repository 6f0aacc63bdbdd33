"""Pipelines with one wrong key or value.

"<<" marks the line that the error must name. Then: the key it must name, and what else it must say.
"""

from __future__ import annotations

WRONG_VALUES: dict[str, tuple[str, str, list[str]]] = {
    "unknown section": (
        """\
source: {kind: files, url: data}
stage: [read]  # <<
stages: [read, batch: {size: 4}]
""",
        "stage",
        ["unknown key 'stage'", "did you mean 'stages'?"],
    ),
    "unknown section, unlike any": (
        """\
source: {kind: files, url: data}
stages: [read, batch: {size: 4}]
xyzzy: 1  # <<
""",
        "xyzzy",
        [
            "unknown key 'xyzzy'",
            "expected one of version, name, source, sources, mix, order, stages, prefetch, errors, ranks, metrics, output",
        ],
    ),
    "unknown key of a section": (
        """\
source: {kind: files, url: data}
stages: [read, batch: {size: 4}]
prefetch:
  batches: 2
  memroy: 1GiB  # <<
""",
        "prefetch.memroy",
        ["unknown key 'memroy'", "did you mean 'memory'?"],
    ),
    "unknown key of a part of a section": (
        """\
source: {kind: files, url: data}
order:
  shuffle: block
  block:
    lane: 3  # <<
stages: [read, batch: {size: 4}]
""",
        "order.block.lane",
        ["unknown key 'lane'", "did you mean 'lanes'?"],
    ),
    "unknown key of the source": (
        """\
source:
  kind: files
  url: data
  lable: parent  # <<
stages: [read, batch: {size: 4}]
""",
        "source.lable",
        ["unknown key 'lable'", "did you mean 'label'?"],
    ),
    "unknown kind": (
        """\
source:
  kind: file  # <<
  url: data
stages: [read, batch: {size: 4}]
""",
        "source.kind",
        ["unknown kind 'file'", "did you mean 'files'?"],
    ),
    "missing kind": (
        """\
source:  # <<
  url: data
stages: [read, batch: {size: 4}]
""",
        "source.kind",
        ["`kind` is missing", "files", "tar"],
    ),
    "missing url": (
        """\
source:  # <<
  kind: files
stages: [read, batch: {size: 4}]
""",
        "source",
        ["'url' is missing", "folder"],
    ),
    "unknown stage": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - decod  # <<
  - batch: {size: 4}
""",
        "stages.1",
        ["unknown stage 'decod'", "did you mean 'decode'?"],
    ),
    "unknown argument of a stage": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - decode
  - random_crop:
      size: 3
      paddin: 4  # <<
  - batch: {size: 4}
""",
        "stages.2.random_crop.paddin",
        ["unknown key 'paddin'", "did you mean 'padding'?"],
    ),
    "wrong type": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - batch:
      size: "64"  # <<
""",
        "stages.1.batch.size",
        ["a valid integer", "'64'"],
    ),
    "boolean for a number": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - batch:
      size: true  # <<
""",
        "stages.1.batch.size",
        ["integer", "True"],
    ),
    "bad value": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - batch:
      size: 0  # <<
""",
        "stages.1.batch.size",
        ["greater than 0", "not 0"],
    ),
    "bad choice": (
        """\
source: {kind: files, url: data}
order:
  shuffle: globl  # <<
stages: [read, batch: {size: 4}]
""",
        "order.shuffle",
        ["'global', 'block' or 'none'", "'globl'"],
    ),
    "bad size in bytes": (
        """\
source: {kind: files, url: data}
stages: [read, batch: {size: 4}]
prefetch:
  memory: lots  # <<
""",
        "prefetch.memory",
        ["2GiB", "'lots'"],
    ),
    "size of nothing": (
        """\
source: {kind: files, url: data}
stages: [read, batch: {size: 4}]
prefetch:
  memory: 0MiB  # <<
""",
        "prefetch.memory",
        ["greater than 0"],
    ),
    "bad duration": (
        """\
source: {kind: files, url: data}
stages: [read, batch: {size: 4}]
prefetch:
  timeout: 5 fortnights  # <<
""",
        "prefetch.timeout",
        ["60s", "'5 fortnights'"],
    ),
    "bad probability": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - decode
  - random_horizontal_flip: {p: 1.5}  # <<
  - batch: {size: 4}
""",
        "stages.2.random_horizontal_flip.p",
        ["less than or equal to 1", "1.5"],
    ),
    "bad pattern of a device": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - batch: {size: 4}
  - transfer:
      device: gpu0  # <<
""",
        "stages.2.transfer.device",
        ["'gpu0'", "cuda"],
    ),
    "missing argument": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - batch: {drop_last: true}  # <<
""",
        "stages.1.batch",
        ["'size' is missing"],
    ),
    "stage without its argument": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - batch  # <<
""",
        "stages.1.batch",
        ["'size' is missing"],
    ),
    "arguments without names": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - batch: 64  # <<
""",
        "stages.1.batch",
        ["arguments by name", "size", "64"],
    ),
    "two stages in one item": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - {decode: {}, batch: {size: 4}}  # <<
""",
        "stages.1",
        ["a stage is a name"],
    ),
    "duplicated key": (
        """\
source: {kind: files, url: data}
stages: [read, batch: {size: 4}]
order:
  seed: 1
  seed: 2  # <<
""",
        "order.seed",
        ["twice"],
    ),
    "duplicated section": (
        """\
source: {kind: files, url: data}
stages: [read, batch: {size: 4}]
source: {kind: tar, url: data}  # <<
""",
        "source",
        ["twice"],
    ),
    "key that is no text": (
        """\
source: {kind: files, url: data}
stages: [read, batch: {size: 4}]
3: 4  # <<
""",
        "",
        ["key 3 is not text"],
    ),
}
