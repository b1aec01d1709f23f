"""The programs in the pages of docs/ run, and print what the pages say."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest
import torch

from tests.docs.blocks import not_run, outputs, programs
from tests.generated import DOCS, generator

MAKE = generator("make_pages")
PAGES = {path.relative_to(DOCS).as_posix(): path for path in MAKE.pages()}

# Languages of blocks that are shown and not run, and why.
SHOWN = {"sh": "lines for a shell", "text": "what is printed"}


@pytest.mark.parametrize("name", PAGES)
def test_the_programs_of_a_page_print_what_it_says(name: str) -> None:
    page = PAGES[name].read_text()
    for block, printed in outputs(page, f"{PAGES[name].stem}.md"):
        said, found = block.output.splitlines(), printed.rstrip().splitlines()
        if not re.match(r"2\.13\.", torch.__version__):
            continue  # the numbers and the bytes of the pages are those of this torch
        difference = "\n".join(difflib.unified_diff(said, found, "the page", "now", lineterm=""))
        assert not difference, f"{name}:{block.line}, run python docs/make_pages.py\n{difference}"


@pytest.mark.parametrize("name", PAGES)
def test_a_block_that_is_not_run_says_why(name: str) -> None:
    for language, reason in not_run(PAGES[name].read_text()):
        assert reason or language in SHOWN, f"a block of {language or 'no language'} in {name}"


def test_each_tutorial_is_written_from_its_program() -> None:
    for path, page in MAKE.tutorials().items():
        assert [each.text for p in programs(path.read_text()) for each in p.blocks] == [
            each.text for p in programs(page) for each in p.blocks
        ], f"{path.name} is not its program: run python docs/make_pages.py"
        assert _prose(path.read_text()) == _prose(page), f"{path.name}: python docs/make_pages.py"


def _prose(page: str) -> list[str]:
    return re.sub(r"```.*?```", "", page, flags=re.DOTALL).split()


def test_pictures_are_what_their_program_draws() -> None:
    pictures = generator("make_drawings")
    for name, draw in pictures.PICTURES.items():
        drawn = (DOCS / "pictures" / f"{name}.svg").read_text()
        assert drawn == draw(), "run python docs/make_drawings.py"
    used = "".join(path.read_text() for path in PAGES.values())
    assert all(f"pictures/{name}.svg" in used for name in pictures.PICTURES)


def test_the_drawing_of_the_folders_is_made_from_the_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawing = generator("make_folders")
    drawn = drawing.imported()
    monkeypatch.setattr(drawing, "imported", lambda: drawn)  # which reads all sources
    assert (DOCS / "pictures/folders.svg").read_text() == drawing.folders(), (
        "run python docs/make_folders.py"
    )
    folders = {path.parent.name for path in (DOCS.parent / "consistent").glob("*/__init__.py")}
    assert set(drawn) == folders - {"doctor"} | {"mirrored"}


def test_arrows_that_follow_from_others_are_left_out() -> None:
    edges = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert generator("make_folders").skeleton(edges) == [("a", "b"), ("b", "c")]


def test_every_page_is_in_the_navigation() -> None:
    navigation = Path(DOCS.parent / "mkdocs.yml").read_text()
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    left_out = {page for page in pages if not page.startswith("seeds/") and page not in navigation}
    assert not left_out, f"put {sorted(left_out)} into nav, in mkdocs.yml"


def test_files_that_a_page_names_are_there() -> None:
    path = r"`((?:consistent|mirrored|csrc|tests|examples|benchmarks|docs)/[\w/.]+)`"
    pages = [*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")]
    named = {(each.name, found) for each in pages for found in re.findall(path, each.read_text())}
    missing = sorted(each for each in named if not (DOCS.parent / each[1]).exists())
    assert len(named) > 50 and not missing
