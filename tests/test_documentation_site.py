"""docs/ as a site: complete, searchable, and served from local files only."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

ROOT = Path(__file__).parents[1]
SITE = OmegaConf.load(ROOT / "mkdocs.yml")


@pytest.fixture(scope="module")
def site() -> Path:
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    environment = {**os.environ, "PYTHONPATH": str(Path(sys.prefix) / "docs_only")}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stdout + built.stderr
    return ROOT / SITE.site_dir


def test_every_page_is_in_the_navigation():
    listed = [page for section in SITE.nav for pages in section.values() for page in pages]
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_the_search_knows_every_page(site):
    found = {item["location"].partition("#")[0] for item in json.loads((site / "search.json").read_text())["items"]}
    assert {path.with_suffix(".html").name for path in (ROOT / "docs").glob("*.md")} <= {
        location or "index.html" for location in found
    }


def test_nothing_is_loaded_from_elsewhere(site):
    for page in site.glob("*.html"):
        loaded = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"?(https?://[^\"> ]+)", page.read_text())
        assert loaded == [], page.name
