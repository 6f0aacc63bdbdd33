"""A hook of MkDocs: what pages link to outside of docs/ (pipelines, examples, measurements) becomes part of the site.

Links stay as they are in the Markdown, so that they also lead somewhere in a clone of the repository.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()([^()\s#:]+)((?:#[^()\s]*)?\))")
SHOWN = {".py": "python", ".yaml": "yaml"}  # as pages, which the search finds, too; other files lie there as they are
NOT_SEARCHED = ("decisions/0", "repository/README", "repository/profiles", "repository/loaderkit")


def on_files(files: Files, config: Any) -> Files:
    """Add what is linked to, and what that links to in turn."""
    pages = [(f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    known: set[str] = set()
    while pages:
        place, markdown = pages.pop()
        for path in sorted({_target(place, link) for _, link, _ in LINK.findall(markdown)} - known):
            if path.startswith(("docs/", "../")) or not (ROOT / path).exists():
                continue  # of those that lead nowhere MkDocs tells
            known.add(path)
            content = _content(path)
            files.append(File.generated(config, _uri(path), content=content))
            pages.append((path, content if path.endswith(".md") else ""))
            pages += [(path, content)] * (ROOT / path).is_dir()
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Let links lead to where the files are in the site."""
    uri = page.file.src_uri
    place = _place(uri)
    if uri.startswith(NOT_SEARCHED):
        page.meta["search"] = {"exclude": True}

    def moved(match: re.Match[str]) -> str:
        path = _target(place, match[2])
        found = path.removeprefix("docs/") if path.startswith("docs/") else _uri(path)
        if files.get_file_from_path(found) is None:
            return match[0]
        return f"{match[1]}{relpath(found, dirname(uri) or '.')}{match[3]}"

    return LINK.sub(moved, markdown)


def _content(path: str) -> str:
    """The Markdown of a page that shows a file or lists a folder; of what is no text for a page, the file."""
    file = ROOT / path
    if file.is_dir():
        names = sorted(one.name for one in file.iterdir() if one.suffix in {*SHOWN, ".md", ".json", ".txt"})
        return f"# {path}\n\n" + "".join(f"- [{name}]({file.name}/{name})\n" for name in names)
    text = file.read_text()
    return f"# {path}\n\n````{SHOWN[file.suffix]}\n{text}````\n" if file.suffix in SHOWN else text


def _target(place: str, link: str) -> str:
    """Where a link of a file leads, as a path in the repository: of a folder to its README, if it has one."""
    path = normpath(os.path.join(dirname(place), link))
    return f"{path}/README.md" if (ROOT / path / "README.md").exists() else path


def _place(uri: str) -> str:
    """The path in the repository of a page of the site."""
    if not uri.startswith("repository/"):
        return f"docs/{uri}"
    path = uri.removeprefix("repository/")
    return path if (ROOT / path).exists() else path.removesuffix(".md")


def _uri(path: str) -> str:
    """The place in the site of a file of the repository."""
    is_page = (ROOT / path).suffix in SHOWN or (ROOT / path).is_dir()
    return f"repository/{path}" + ".md" * is_page
