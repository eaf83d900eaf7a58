"""Hooks of mkdocs, which builds the site from docs/ (mkdocs.yml names this file).

They add README.md as the first page, SECURITY.md, CONTRIBUTING.md, CHANGELOG.md, and a page with
all results. Links to other files outside docs/, of which the site has no copy, become text.
"""

import importlib.util
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
        content = _LINK.sub(_link_of_root_page, (DOCS.parent / name).read_text())
        files.append(File.generated(config, page, content=content))
    files.append(File.generated(config, "results.md", content=_load_generate().tables.results()))
    return files


def _link_of_root_page(match):
    """Return the Markdown that replaces one link of a page in the root folder, such as README.md.

    [a](docs/plan.md)   -> [a](plan.md)
    [a](SECURITY.md)    -> [a](security.md)   a page of OUTSIDE
    [a](lab/x.py)       -> a (`lab/x.py`)     text, because the site has no such file
    """
    text, target = match[1], match[2]
    path, hash_sign, anchor = target.partition("#")
    if "://" in target or not path:
        return match[0]
    if path in OUTSIDE:
        return f"[{text}]({OUTSIDE[path]}{hash_sign}{anchor})"
    if path.startswith("docs/"):
        return f"[{text}]({target.removeprefix('docs/')})"
    assert (DOCS.parent / path).exists(), path
    return f"{text} (`{path}`)"


def on_page_markdown(markdown, page, config, files):
    """Return a page's Markdown without links to files outside docs/, which the site does not have.

    A link to a file of OUTSIDE becomes one to its page. Any other link to a file outside docs/
    becomes its text and the path of the file. mkdocs calls this for each page.

    Raises:
        AssertionError: A link names a file that does not exist.
    """
    folder = (DOCS / page.file.src_path).parent

    def link_in_site(match):
        """Return the Markdown that replaces one link of the page in the built site.

            [a](other.md)          -> [a](other.md)       inside docs/: unchanged
            [a](../README.md#b)    -> [a](index.md#b)     README.md is the first page of the site (OUTSIDE)
            [a](../src/x.py)       -> a (`src/x.py`)      text, because the site has no such file

        Args:
            match: Match of _LINK: group 1 is the text of the link, group 2 its target.
        """
        text = match[1]
        target, _, anchor = match[2].partition("#")
        file = (folder / target).resolve()
        if not target.startswith("../") or file.is_relative_to(DOCS):
            return match[0]
        assert file.exists(), f"{page.file.src_path}: {target}"
        name = str(file.relative_to(DOCS.parent))
        if name in OUTSIDE:
            page_of_file = target.replace(f"../{name}", OUTSIDE[name])
            return f"[{text}]({page_of_file}#{anchor})" if anchor else f"[{text}]({page_of_file})"
        return f"{text} (`{name}`)"

    return _LINK.sub(link_in_site, markdown)
