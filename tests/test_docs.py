"""README.md, CONTRIBUTING.md and docs/: links, paths, commands, length, and the index."""

import re
from functools import cache
from itertools import cycle

import pytest

from tests import ROOT

DOCS = ROOT / "docs"

MOST_WORDS = 32_000  # of README.md and docs/
README_LINES = 90
COLUMNS = 140
# Of MindSpeed-RL and MindSpeed.
UPSTREAM_FILES = {"cli/preprocess_data.py", "docs/faq/torch_extensions.md"}
UPSTREAM = ROOT / "requirements" / "upstream.txt"
FOLDERS = "benchmarks|cli|configs|docs|examples|mindspeed_qerl|requirements|tests|tools"

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def without_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(page):
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text()))
    for link in links:
        if link.startswith(("http:", "https:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@each_page
def test_paths_of_the_repository_exist(page):
    """In code spans and in commands."""
    names = re.findall(rf"(?<![\w./-])((?:{FOLDERS})/[\w./-]*[\w/])", page.read_text())
    missing = {name for name in names if not (ROOT / name).exists()}
    assert missing <= UPSTREAM_FILES


@each_page
def test_commands_name_configs_and_targets_that_exist(page):
    text = page.read_text()
    for config in re.findall(r"--config-name ([a-z]\w+)", text):
        assert (ROOT / "configs" / f"{config}.yaml").is_file(), config
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([a-z][\w-]*)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@each_page
def test_paragraphs_are_wrapped(page):
    """Tables, lists and output may be wider."""
    for line in without_code(page.read_text()).splitlines():
        assert len(line) <= COLUMNS or line.startswith(("|", "- ")), line


def test_the_documentation_is_short():
    pages = [ROOT / "README.md", *DOCS.glob("*.md")]
    words = sum(len(page.read_text().split()) for page in pages)
    assert words <= MOST_WORDS
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_versions_are_those_of_the_lists():
    """Of NPUs; torch has a stand-in there, and ms-swift a list of its own."""
    listed = dict(re.findall(r"^([\w-]+)==(\S+)", UPSTREAM.read_text(), re.MULTILINE))
    pages = [page.read_text() for page in PAGES if page.stem != "integrations"]
    named = re.findall(r"([\w-]+)==([\d.]+\w)", "\n".join(pages))
    rows = r"^\| ([a-z_, ]+) \| (\d+\.\d+\.\d+[\d., ]*) \|"
    for names, versions in re.findall(rows, "\n".join(pages), re.MULTILINE):
        named += zip(names.split(", "), cycle(versions.split(", ")))
    others = {pair for pair in named if listed.get(pair[0]) != pair[1]}
    assert others == {("torch", "2.7.1"), ("torch_npu", "2.7.1")}
    assert {"ray", "transformers"} <= dict(named).keys()


def test_the_index_has_every_page():
    index = (DOCS / "README.md").read_text()
    linked = set(re.findall(r"\]\((\w+)\.md\)", index))
    pages = {page.stem for page in DOCS.glob("*.md")} - {"README"}
    assert linked == pages


def test_code_names_pages_that_exist():
    """Messages, comments and configs say `docs/NAME.md` of our own pages."""
    for folder in FOLDERS.split("|"):
        if folder in ("docs", "tests"):
            continue
        for file in (ROOT / folder).rglob("*"):
            if file.suffix not in (".py", ".sh", ".yaml"):
                continue
            names = re.findall(r"(?<![\w/])docs/([a-z_]+)\.md", file.read_text())
            unknown = {name for name in names if not (DOCS / f"{name}.md").exists()}
            assert not unknown, f"{file}: {unknown}"
