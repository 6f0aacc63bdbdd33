"""What fsspec lists below a folder, and the keys of it: paths, or links on the index pages of a web server."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

from loaderkit.connectors.directory import OF_SYSTEMS

UNUSUAL_PART_OF_LINK = re.compile(r"(?:\A|/)(?:\.|%2e){0,2}(?:/|\Z)", re.IGNORECASE)  # %2e is a dot in a link
_MEANT_IN_LINKS = re.compile("(%(?:0.|1.|2[35BF]|3F|7F))", re.IGNORECASE)  # controls, # % + / ?; some read + as a space


def found_below(system: Any, folder: str) -> tuple[dict[str, Any], list[str]]:
    """The details of all files below a folder, by path, and the folders that were listed and are missing. Raises
    FileNotFoundError if `folder` is missing.

    Where a filesystem has no `find` of its own, fsspec's leaves out folders that it fails to list: a lost connection
    would look like fewer files. So the folders are listed one by one here.
    """
    from fsspec import AbstractFileSystem
    from fsspec.asyn import AsyncFileSystem

    kind = type(vars(system).get("fs") or system)  # a cache asks the one that it wraps
    is_usual = getattr(kind, "_find", AsyncFileSystem._find) is AsyncFileSystem._find
    if not is_usual or kind.find is not AbstractFileSystem.find:
        return system.find(folder, detail=True), []
    top = system._strip_protocol(folder)
    found: dict[str, Any] = {}
    missing: list[str] = []
    folders = [top]
    while folders:
        here = folders.pop()
        try:
            listed = system.ls(here, detail=True)
        except FileNotFoundError:
            if here == top:
                raise
            missing.append(here)
            continue
        except PermissionError:
            if here == top or not OF_SYSTEMS.search(f"{here}/"):
                raise
            continue  # as in a local directory
        for details in listed:
            path = details["name"].rstrip("/")
            if details["type"] == "directory" and path != here:
                if not UNUSUAL_PART_OF_LINK.search(path.removeprefix(top).strip("/")):  # a page's link to one above it
                    folders.append(path)
            else:
                found[details["name"]] = details
    return found, missing


def key_below(root: str, path: str) -> str:
    """The key of a path; "" for one that is not below `root`, as a link of a web page may be."""
    if not root:
        return path.lstrip("/")
    return path[len(root) + 1 :] if path.startswith(f"{root}/") else ""


def name_of_link(root: str, link: str) -> str:
    """The key of a link: "" for one that is not below `root`, and otherwise what stands behind it, without percent-encoding up
    to a query, which is part of a request."""
    link, mark, query = link.partition("?")
    folders, parts = root.split("/"), link.split("/")
    if [*map(_decoded, folders)] != [*map(_decoded, parts[: len(folders)])]:
        return ""
    return "/".join(map(_decoded, parts[len(folders) :])) + mark + query


def _decoded(part: str) -> str:
    """A part of a link without percent-encoding, but for characters that mean something in a link; as it is where its bytes
    are no UTF-8. A request encodes it again."""
    pieces = _MEANT_IN_LINKS.split(part)
    try:
        pieces[::2] = [unquote(piece, errors="strict") for piece in pieces[::2]]
    except UnicodeDecodeError:
        return part
    return "".join(pieces)
