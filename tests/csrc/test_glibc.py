"""The built modules ask for no glibc and no libstdc++ newer than those that torch's wheels run
with, or a wheel made of them would not be manylinux_2_28."""

from __future__ import annotations

import platform
import re
import shutil

import pytest

from mirrored.native import release
from tests.csrc.compiling import ROOT, run

NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}
MODULES = sorted(
    path
    for package in ("consistent", "mirrored")  # not the copies that a build leaves in build/
    for path in (ROOT / package).rglob(f"torch{release().replace('.', '_')}/_C.*.so")
)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _is_newer() -> bool:
    libc, version = platform.libc_ver()
    return libc != "glibc" or _numbers(version) > (2, 36)


@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed")
@pytest.mark.skipif(_is_newer(), reason="wheels are built beside glibc 2.36 and older")
def test_modules_ask_for_no_newer_names_than_torchs_wheels() -> None:
    assert len(MODULES) == 3
    newer = []
    for module in MODULES:
        for library, version, name in re.findall(
            r"\*UND\*.*\((GLIBC|GLIBCXX|CXXABI)_([\d.]+)\)\s+(\S+)", run("objdump", "-T", module)
        ):
            if _numbers(version) > NEWEST[library]:
                newer.append(f"{module.parts[-4:]}: {name} of {library} {version}")
    assert not newer, f"define these in csrc/glibc/older.cpp: {newer}"
