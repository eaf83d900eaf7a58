"""The site that mkdocs builds from docs/, in a browser: no table is wider than a phone or a desk."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from browser import Browser, chromium

ROOT = Path(__file__).resolve().parents[1]
SEED = os.environ.get("HOLMES_TEST_SEED", "58")
#: Evaluates to the first words of each table that is wider than the text of the page around it.
WIDE_TABLES = """[...document.querySelectorAll('.md-content table')]
  .filter(table => table.scrollWidth > document.documentElement.clientWidth)
  .map(table => table.innerText.slice(0, 60))"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the folder with the built site."""
    if not chromium():
        pytest.skip("no Chromium: apt-get install chromium-headless-shell")
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir"]
    subprocess.run([*command, str(folder)], cwd=ROOT, check=True, timeout=300)
    return folder


@pytest.mark.parametrize("width", [390, 1280])
def test_tables_fit_the_page(site, width, tmp_path, exhaustive):
    """All pages in an exhaustive test, else every sixth one."""
    pages = sorted(site.rglob("*.html"))
    if not exhaustive:
        pages = pages[random.Random(SEED).randrange(6) :: 6]
    wide = {}
    with Browser(tmp_path / "profile") as browser:
        for page in pages:
            browser.load(page, width, dark=False)
            if tables := browser.evaluate(WIDE_TABLES):
                wide[str(page.relative_to(site))] = tables
    assert not wide


def test_every_picture_is_there(site):
    """The build checks links in Markdown, but not those in HTML, as <picture> has them."""
    named = {
        page.parent / source
        for page in site.rglob("*.html")
        for source in re.findall(r'(?:\bsrc|srcset)="([^":]+\.svg)"', page.read_text())
    }
    assert named >= {site / f"pictures/timeline{suffix}" for suffix in (".svg", ".narrow.svg")}
    assert not [path for path in named if not path.exists()]


def test_the_site_has_no_files_of_python(site):
    assert not [path for path in site.rglob("*") if path.suffix in (".py", ".pyc")]
    assert not list(site.rglob("__pycache__"))


@pytest.mark.skipif(not chromium(), reason="no Chromium: apt-get install chromium-headless-shell")
@pytest.mark.parametrize(
    "picture", sorted((ROOT / "docs/pictures").glob("*.svg")), ids=lambda path: path.name
)
def test_texts_of_a_picture_are_whole(picture, tmp_path):
    """No text is cut by the border of the picture, or covers another."""
    file = tmp_path / "page.html"
    file.write_text(f"<!doctype html><meta charset=utf-8><body>{picture.read_text()}</body>")
    with Browser(tmp_path / "profile") as browser:
        seen = browser.open(file, 1280, dark=False)
    assert seen["texts"] > 10 and not seen["found"]
