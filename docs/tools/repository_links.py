"""A hook of mkdocs: files of the repository that the pages link to become files of the site.

The pages are read as plain Markdown as well, where a link such as `../examples/train.py` leads to that file. The site
has no such folder. So each file outside of `docs/` that a page links to is put into the site under `repository/`, and
the link leads there. A file that is Markdown becomes a page, and its own links are followed in the same way.
"""

from __future__ import annotations

import os.path
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
PLACE = "repository"
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def target_of(source: Path, link: str) -> Path | None:
    """The file of the repository, outside of `docs/`, to which a link leads that stands in the file `source`."""
    if "://" in link or link.startswith("mailto:"):
        return None
    target = Path(os.path.normpath(source.parent / link))
    if target.is_relative_to(DOCS) or not target.is_relative_to(ROOT) or not target.is_file():
        return None
    return target


def uri_in_site(path: Path) -> str:
    """Where the site has a file of the repository."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    # mkdocs takes README.md for the index of its folder, which may have an index.md as well.
    return f"{PLACE}/{path.relative_to(ROOT).as_posix()}"


def linked_from(source: Path) -> set[Path]:
    """The files outside of `docs/` to which a page of Markdown links."""
    targets = (target_of(source, link) for _, link, _ in LINK.findall(source.read_text()))
    return {target for target in targets if target is not None}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Puts the linked files into the site."""
    pending = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    seen: set[Path] = set()
    while pending:
        for target in linked_from(pending.pop()) - seen:
            seen.add(target)
            files.append(
                File.generated(
                    config, uri_in_site(target), abs_src_path=str(target), inclusion=InclusionLevel.NOT_IN_NAV
                )
            )
            if target.suffix == ".md":
                pending.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Has the links of a page lead to where the site has their files."""
    if page.file.abs_src_path is None:
        return markdown
    source = Path(page.file.abs_src_path)
    here = os.path.dirname(page.file.src_uri)

    def lead(match: re.Match[str]) -> str:
        before, link, after = match.groups()
        target = None if "://" in link else Path(os.path.normpath(source.parent / link))
        if target is None or not target.is_relative_to(ROOT) or not target.is_file():
            return match[0]
        return before + os.path.relpath(uri_in_site(target), here) + after

    return LINK.sub(lead, markdown)
