"""Files that others' programs read: workflows, forms, the citation, the recipe, the changelog."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def targets() -> set[str]:
    """Targets of the Makefile, with `$(VENV)` as it is."""
    text = (ROOT / "Makefile").read_text().replace("$(VENV)", ".venv")
    return set(re.findall(r"^([\w./-]+)(?: [\w./-]+)*:(?!=)", text, re.M))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_commands_that_are_there(workflow: Path) -> None:
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands
    for program, *rest in map(str.split, commands):
        if program == "make":
            assert set(rest) <= targets()
        elif not program.startswith(".venv/"):
            assert (ROOT / program).exists()


def test_forms_of_issues_have_fields() -> None:
    forms = [yaml.safe_load(p.read_text()) for p in ROOT.glob(".github/ISSUE_TEMPLATE/[!c]*.yml")]
    assert len(forms) == 2 and all(form["name"] and form["body"] for form in forms)


def test_all_name_the_same_version_and_licence() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    recipe = (ROOT / "conda" / "recipe.yaml").read_text()
    released = re.findall(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert citation["version"] == PROJECT["version"] == released[0]
    assert f'version: "{PROJECT["version"]}"' in recipe
    assert citation["license"] == PROJECT["license"] and f"license: {citation['license']}" in recipe


def test_what_test_fast_runs_is_there() -> None:
    """pytest runs nothing at all where one of its paths is missing."""
    show = ["make", "--silent", "--eval=show: ; @echo $(FAST)", "show"]
    paths = subprocess.run(show, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert paths.split() and all((ROOT / "tests" / path).exists() for path in paths.split())
