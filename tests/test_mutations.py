"""The faults of mutations.py are in the sources as they stand; to find them all takes too long."""

from __future__ import annotations

import ast

import pytest

from tests.mutations import FAULTS, ROOT, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_fault_can_be_planted(fault: Fault) -> None:
    text = (ROOT / "consistent" / fault.file).read_text()
    made = text.replace(fault.is_, fault.was, 1)
    assert made != text
    ast.parse(made)
    for word in fault.tests.split():
        assert word.startswith("[") or (ROOT / word).exists(), word
