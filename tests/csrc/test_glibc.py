"""The built modules ask for no glibc and no libstdc++ newer than those that torch's wheels run
with, or a wheel made of them would not be manylinux_2_28. Nor do they take from torch's libraries
what these happen to export of newer ones: other builds of torch export other parts."""

from __future__ import annotations

import platform
import re
import shutil

import pytest

from mirrored.native import torch_release
from tests.csrc.compiling import ROOT, run

NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}
MODULES = sorted(
    path
    for package in ("consistent", "mirrored")  # not the copies that a build leaves in build/
    for path in (ROOT / package).rglob(f"torch{torch_release().replace('.', '_')}/_C.*.so")
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


# Parts of std::exception_ptr, which torch's headers use: no exported function of older releases
# stands for them that a compiler might not emit in the module itself.
LEFT = {
    "_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv",
    "_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv",
}


def _newer_than_wheels(library: str) -> set[str]:
    """Names that this libstdc++ exports and that of the oldest system does not."""
    exported = re.findall(
        r"([^\s@]+)@@?(GLIBCXX|CXXABI)_([\d.]+)$", run("nm", "-D", "--defined-only", library), re.M
    )
    return {name for name, kind, version in exported if _numbers(version) > NEWEST[kind]}


def _without_version(module: str) -> set[str]:
    """Names that the module takes from whichever library exports them."""
    lines = run("nm", "-D", "--undefined-only", module).splitlines()
    return {line.split()[-1] for line in lines if line.strip() and "@" not in line}


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
def test_modules_take_no_part_of_libstdcxx_from_torch() -> None:
    newer = _newer_than_wheels(run("g++", "-print-file-name=libstdc++.so.6").strip())
    assert LEFT <= newer
    for module in MODULES:
        found = _without_version(str(module)) & newer
        assert found <= LEFT, f"{module.parts[-4:]}: define these in csrc/glibc/older.cpp: {found}"
