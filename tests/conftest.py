"""What all tests share: pools of processes end with the session; GPU tests skip without a GPU."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from consistent.auto.machines.measurement_cache import MeasurementCache
from consistent.auto.machines.this_machine import measurements_path
from mirrored.transports.tuning import table
from tests.launch import import_too
from tests.ranks import close_pools

_CACHE = "XDG_CACHE_HOME"


MESSAGES = table.Table(latency_s=30e-6, bytes_per_s=1.5e9)  # between any hosts
FIXED_CALLS_S = 3e-3  # what they take on the host of the other figures


def pytest_configure(config: pytest.Config) -> None:
    """Make all ranks use the built-in tables. One measured now, beside other load on the machine,
    could send moves another way, so that tests would test other code."""
    config.stash[_FOLDER] = os.environ[_CACHE] = tempfile.mkdtemp(prefix="consistent-tests-")
    for ranks in range(2, 9):
        table.save(table.Table(), ranks, table.cpu_device_name())
        table.save(MESSAGES, ranks, table.MESSAGES)
    # The pace of this host too, for which all of its cores would be busy for eight seconds.
    MeasurementCache(measurements_path()).get("fixed calls s", lambda: FIXED_CALLS_S)


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_FOLDER], ignore_errors=True)


_FOLDER = pytest.StashKey[str]()


# The longest files, those with most to do first: each takes ten seconds of processor time or more,
# test_emulated.py where nothing is kept in build/. Paths below tests/.
LONGEST = (
    "csrc/test_emulated.py", "consistent/compiled/test_sizes.py", "faults/test_faults.py",
    "examples/test_seed_programs.py", "consistent/rules/test_rows.py",
    "models/test_flex_attention.py",
    "consistent/auto/simulation/test_stages.py", "streams/test_orders.py", "docs/test_pages.py",
    "consistent/torch_patches/test_plain_programs.py", "consistent/nn/moving/test_move.py",
    "consistent/boxing/test_exchange.py", "consistent/pipeline/test_transformers.py",
    "consistent/pipeline/test_pipeline.py", "consistent/compiled/test_settled.py",
    "examples/test_examples.py", "consistent/compiled/test_steps.py", "csrc/test_peer.py",
    "consistent/doctor/test_copied_trees.py", "consistent/compiled/test_by_values.py",
    "consistent/nn/owned/test_matrix_step.py", "consistent/autograd/test_gradients_of_leaves.py",
    "models/test_programs.py", "consistent/rules/test_cuts.py", "models/test_others.py",
    "mirrored/transports/several_hosts/test_transport.py", "examples/test_train_gpt.py",
    "consistent/nn/planners/test_written_in_place.py", "consistent/islands/test_islands.py",
    "consistent/nn/test_pretrained.py", "models/test_plans.py", "gpu/test_checks.py",
    "consistent/nn/planners/test_found_plans.py", "consistent/compiled/test_overlap.py",
    "consistent/nn/moving/test_odd_jobs.py", "consistent/verification/test_verify.py",
    "csrc/test_sass.py", "consistent/integrations/test_examples.py",
    "consistent/elastic/test_elastic.py",
)  # fmt: skip

# What the ranks of a folder's tests import, seconds in each of them, if each does so by itself.
IMPORTED_FOR = {
    "compiled": ("tests.inductor",),
    "examples": ("sklearn.datasets", "matplotlib.pyplot"),
    "integrations": ("transformers.trainer", "lightning"),
    "models": ("transformers.models.llama.modeling_llama",),
    "pipeline": ("transformers.models.llama.modeling_llama",),
    "streams": ("transformers.models.llama.modeling_llama",),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # First, so that no worker is alone with a long file in the end.
    turns = {Path(__file__).parent / name: turn for turn, name in enumerate(LONGEST)}
    items.sort(key=lambda item: turns.get(item.path, len(turns)))
    folders = {item.path.parent.name for item in items}
    for folder in sorted(folders & set(IMPORTED_FOR)):
        for module in IMPORTED_FOR[folder]:
            import_too(module)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # not a keyword: those include the names of folders
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """Let no collection of garbage look at all tests and modules again: each takes a second."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _pools_end_with_the_session() -> Iterator[None]:
    yield
    close_pools()
