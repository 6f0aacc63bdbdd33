"""The reference's section on Python, for make_reference.py: what the code declares, and what it says of itself."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import loaderkit
from loaderkit import checkpoint, connectors, errors, extend, testing
from loaderkit.checkpoint.manager.saving import Saving
from loaderkit.connectors.base import GatherInto, Hashed, ReadHashed, ReadInto, ReadMany
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.integrations.ray import RayRows
from loaderkit.joint_start import Run
from loaderkit.metrics.writers import log
from loaderkit.pipeline.config.registry import SOURCES, STAGES
from loaderkit.pipeline.delivery.batch_numbers import DataLoaderParts
from loaderkit.pipeline.tensor_loader import TensorLoader
from loaderkit.profile.watched.watch import Watched

_SPECIAL = {"__iter__", "__len__"}


def render() -> str:
    """The whole section."""
    return f"""## Python

`import loaderkit` is quick: torch is imported with the first of these names that is used.

### `loaderkit.build`

{block(loaderkit.build)}
### `loaderkit.Loader`

{block(loaderkit.Loader, leave={"as_subject"})}
What it has of a `DataLoader`, for other loops:

{block(DataLoaderParts)}
For `source.kind: checkpoint`:

{block(TensorLoader)}
### `loaderkit.Pipeline`

{block(loaderkit.Pipeline, more={"__init__"})}
and these, whose arguments are those of [sources](#sources), [stages](#stages), [prefetch](#prefetch) and [errors](#errors). Before `*` they
may be given by position; those that need not be given are in brackets.

{made_methods()}
### `loaderkit.watch`

{block(loaderkit.watch)}
{block(Watched, only={"stats", "profile", "close"})}
### `loaderkit.restore`

{block(loaderkit.restore)}
### `loaderkit.start`

{block(loaderkit.start)}
{block(Run)}
### `loaderkit.CheckpointManager`

{block(loaderkit.CheckpointManager, more={"__init__"})}
What `save` returns:

{block(Saving, leave={"join", "start"})}
### `loaderkit.checkpoint`

{block(checkpoint.RngState, more={"__init__"})}
{block(checkpoint.PerRank, more={"__init__"}, leave={"rank_keys"})}
{block(checkpoint.latest)}
{block(checkpoint.write_manifest)}
{block(checkpoint.dequantize)}
{block(checkpoint.StreamReader, more={"__init__"}, only={"__init__", "stats"})}
{block(checkpoint.StreamWriter, more={"__init__"}, only={"__init__", "stats", "stage", "close"})}
### `loaderkit.connectors`

A connector reads objects of a store. `build` and `restore` take one for a scheme of URLs: `connectors={{"zip": ZipConnector("zip://photos.zip")}}` serves
`zip://` ([recipe](jobs/own-store.md)). These five calls are all that it needs:

{block(connectors.Connector)}
{block(connectors.ObjectInfo)}
What a subclass of `BulkConnector` may declare besides:

{block(connectors.BulkConnector)}
{block(connectors.ConnectorTraits)}
{block(connectors.BulkReads)}
{"".join(block(protocol, more={"__call__"}) + chr(10) for protocol in (ReadInto, ReadMany, GatherInto, ReadHashed))}
{block(Hashed)}
The writing side, which `BulkConnector.writes` returns; `loaderkit index` and `loaderkit manifest` write through it:

{block(connectors.Writes)}
{block(connectors.ObjectWriter)}
Objects in memory, for tests (`loaderkit.connectors.memory`):

{block(MemoryConnector, more={"__init__"}, only={"__init__"})}
### `loaderkit.extend`

Kinds of sources and stages, and connectors, of your own: [Extending loaderkit](extending.md).

{block(extend.register)}
A source:

{block(extend.SourceKind, leave={"open_with", "is_elsewhere"})}
{block(extend.Source)}
{block(extend.Reader)}
{block(extend.ReadContext)}
{block(extend.SampleReader, more={"__init__"}, only={"__init__"})}
A stage:

{block(extend.StageKind)}
What `draws` and the values of a sample are is in [Extending loaderkit](extending.md#a-stage). An image between stages:

{block(extend.Image)}
{block(extend.Encoded)}
A connector is what a class or function `(url: str, settings: StoreArgs) -> Connector` makes, with the calls of
[`loaderkit.connectors`](#loaderkitconnectors). What else the modules of ours use is there, too: {other_names()}.

### `loaderkit.testing`

The contract suites, as classes of pytest tests; a subclass gives what their docstrings name.

{block(testing.ConnectorContract, only={"letters", "unusual_keys", "make_store", "num_examples"})}
{block(testing.Store, only={"connector", "place", "replace", "is_sent"})}
{block(testing.SourceContract, only={"num_samples", "stages", "described", "pipeline"})}
{block(testing.StageContract, only={"stage", "batch", "samples"})}
### `loaderkit.integrations`

Ray Data ([guide](guide/iterables.md#ray-data)), `from loaderkit.integrations.ray import RayRows`:

{block(RayRows, more={"__init__"}, only={"__init__"})}
### `loaderkit.metrics`

{block(log)}
### `loaderkit.errors`

```text
{textwrap.dedent((errors.__doc__ or "").partition(chr(10) * 2)[2].rpartition(chr(10) * 2)[0])}
```

{(errors.__doc__ or "").rpartition(chr(10) * 2)[2].strip()}
"""


def block(of: Any, *, more: set[str] | None = None, only: set[str] | None = None, leave: set[str] | None = None) -> str:
    """A function or class as it is declared: signature and docstring; of a class also its public methods and values.

    `more`: special methods to show besides; `only`: no other members; `leave`: members to leave out.
    """
    lines = textwrap.dedent(inspect.getsource(of)).splitlines()
    (node,) = ast.parse("\n".join(lines)).body
    assert isinstance(node, (ast.FunctionDef, ast.ClassDef))
    if isinstance(node, ast.FunctionDef):
        node.decorator_list = []  # of a method they say how it is called
    shown = _declared(node, lines)
    if isinstance(node, ast.ClassDef):
        was_method = True
        for member in node.body[1:]:
            name = _name(member)
            is_public = not name.startswith("_") or name in _SPECIAL | (more or set())
            if not is_public or name in (leave or set()) or (only is not None and name not in only):
                continue
            is_method = isinstance(member, ast.FunctionDef)
            shown += [""] if is_method or was_method else []
            shown += _declared(member, lines) if is_method else lines[member.lineno - 1 : member.end_lineno]
            was_method = is_method
    return "\n".join(["```python", *shown, "```", ""])


def _declared(node: Any, lines: list[str]) -> list[str]:
    """The lines of a declaration, from its decorators to the end of its docstring, or `...` for a body without one."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    body = node.body[0]
    if ast.get_docstring(node) is not None or (isinstance(body, ast.Expr) and isinstance(body.value, ast.Constant)):
        return lines[first - 1 : body.end_lineno]  # the constant is `...`
    *signature, last = lines[first - 1 : body.lineno - 1]
    return [*signature, f"{last} ..."]


def _name(member: ast.stmt) -> str:
    if isinstance(member, ast.FunctionDef):
        return member.name
    target = (
        member.target
        if isinstance(member, ast.AnnAssign)
        else member.targets[0]
        if isinstance(member, ast.Assign)
        else None
    )
    return target.id if isinstance(target, ast.Name) else "_"


def other_names() -> str:
    """The names of `loaderkit.extend` that the section does not show."""
    shown = {
        "register",
        "SourceKind",
        "Source",
        "Reader",
        "ReadContext",
        "SampleReader",
        "StageKind",
        "Image",
        "Encoded",
    }
    return ", ".join(f"`{name}`" for name in extend.__all__ if name not in shown)


def made_methods() -> str:
    """The methods of `Pipeline` that are made from settings: names of arguments, the others' meaning stands elsewhere."""
    lines = []
    for name in [*SOURCES.ours, *STAGES.ours, "prefetch", "errors"]:
        arguments, is_by_name = [], False
        for parameter in inspect.signature(getattr(loaderkit.Pipeline, name)).parameters.values():
            if parameter.name == "self":
                continue
            if parameter.kind is parameter.KEYWORD_ONLY and not is_by_name:
                arguments, is_by_name = [*arguments, "*"], True
            is_needed = parameter.default is parameter.empty
            arguments.append(parameter.name if is_needed else f"[{parameter.name}]")
        lines += textwrap.wrap(
            f"{'Pipeline' if name in SOURCES else 'pipeline'}.{name}({', '.join(arguments)})",
            120,
            subsequent_indent="    ",
        )
    return "\n".join(["```text", *lines, "```", ""])
