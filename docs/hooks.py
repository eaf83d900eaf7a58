"""Hooks of mkdocs, which builds the site from docs/ (mkdocs.yml names this file).

They add README.md as the first page, SECURITY.md, CONTRIBUTING.md, CHANGELOG.md, and a page with
all results. Links to other files outside docs/, of which the site has no copy, become text.
"""

import importlib.util
import os
import re
from pathlib import Path

from mkdocs.structure.files import File

DOCS = Path(__file__).resolve().parent
#: Files outside docs/ that are pages of the site -> the names of these pages.
OUTSIDE = {
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
#: Page of the site -> the file outside docs/ of which it is made.
_SOURCES = {page: name for name, page in OUTSIDE.items()}
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def _load_generate():
    """Return docs/generate.py as a module: it is a script in a folder that is no package."""
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_files(files, config):
    """Add the pages that are no files of docs/: those of OUTSIDE, and the page of all results.

    mkdocs calls this with the files that it has found.
    """
    for name, page in OUTSIDE.items():
        content = (DOCS.parent / name).read_text()
        files.append(File.generated(config, page, content=content))
    files.append(File.generated(config, "results.md", content=_load_generate().tables.results()))
    return files


def on_page_markdown(markdown, page, config, files):
    """Return a page's Markdown without links to files outside docs/, which the site does not have.

    A link to a file of OUTSIDE becomes one to its page. Any other link to a file outside docs/
    becomes its text and the path of the file. mkdocs calls this for each page.

    Raises:
        AssertionError: A link names a file that does not exist.
    """
    place = page.file.src_path  # in the site
    source = _SOURCES.get(place, f"docs/{place}")  # in the repository

    def link_in_site(match):
        """Return the Markdown that replaces one link of the page in the built site.

            in docs/other.md       [a](plan.md)           -> [a](plan.md)
            in docs/other.md       [a](../README.md#b)    -> [a](index.md#b)     a page of OUTSIDE
            in docs/other.md       [a](../lab/x.py)       -> a (`lab/x.py`)      the site has no such file
            in README.md           [a](docs/plan.md)      -> [a](plan.md)

        Args:
            match: Match of _LINK: group 1 is the text of the link, group 2 its target.
        """
        text = match[1]
        path, hash_sign, anchor = match[2].partition("#")
        if "://" in path or not path:
            return match[0]
        name = os.path.normpath(os.path.join(os.path.dirname(source), path))
        if name in OUTSIDE:
            target = OUTSIDE[name]
        elif name.startswith("docs/"):
            target = name.removeprefix("docs/")
        else:
            assert (DOCS.parent / name).exists(), f"{source}: {path}"
            return f"{text} (`{name}`)"
        target = os.path.relpath(target, os.path.dirname(place) or ".")
        return f"[{text}]({target}{hash_sign}{anchor})"

    if source == "README.md":
        markdown = markdown.replace('="docs/pictures/', '="pictures/')  # in <picture>
    return _LINK.sub(link_in_site, markdown)
