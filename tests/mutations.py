"""Plants faults in the library, one at a time, and says whether the tests nearest to each find it.

    python -m tests.mutations               # all, some seconds each: ten minutes
    python -m tests.mutations gather mean   # those that have one of the words in their line
    python -m tests.mutations --none        # the same tests without a fault: all pass

Each runs in a copy of the tree and in a fork of a process that has imported torch. A fault counts
as found where a test fails; where the tests do not end, or cannot be collected, it is said.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("consistent", "mirrored", "tests", "benchmarks", "examples", "docs", "pyproject.toml")
LIMIT_S = 240.0
ROWS = "tests/consistent/rules/test_rows.py"
MOVES = "tests/consistent/movement/test_run.py"
DERIVED = "tests/consistent/rules/notation/test_derive.py"
BACKWARD, OPS = "tests/consistent/autograd", "tests/consistent/dispatch"
LISTS = f"{OPS}/planning/lists"
ACCEPTED = "tests/consistent/graph/test_accepted.py"
PROGRAMS = "tests/consistent/compiled/test_passes.py tests/consistent/compiled/test_steps.py"


class Fault(NamedTuple):
    what: str
    file: str  # in consistent/
    is_: str  # occurs in it; its first place is changed
    was: str  # what a mistake would make of it
    tests: str  # pytest's words, split at blanks; a word in [ ] is its -k, with _ for blanks


REDUCE, FORMS = "rules/families/reductions/reduce.py", "forms/families/reductions/reduce.py"
POINTWISE, PLANNING = "rules/families/elementwise/pointwise.py", "dispatch/planning/planning.py"
LINALG, RUN = "rules/families/matrices/linalg.py", "movement/run.py"
DERIVE, PASSES = "rules/notation/derive.py", "compiled/passes/"

FAULTS = (
    # -- rules and the forms that they name
    Fault(
        "addends pass beside an infinite weight", "rules/families/reductions/losses.py",
        'if call.get("weight") is None or notation', "if True or notation",
        "tests/consistent/rules/test_addends.py",
    ),
    Fault(
        "amax gives P(min)", REDUCE, 'Row("amax", "max(...D)', 'Row("amax", "min(...D)',
        f"{ROWS} [reduce]",
    ),
    Fault(
        "a mean of a split dim is a sum", REDUCE, "...D -> ...; D by mean", "...D -> ...",
        f"{ROWS} [reduce]",
    ),
    Fault(
        "a softmax along a split dim is local", REDUCE, "f(...D) -> ...D; D by softmax",
        "f(...D) -> ...D", f"{ROWS} [reduce]",
    ),
    Fault(
        "a cross product may be split along its vectors", LINALG,
        '"cross", "...[D], ...[D] -> ...[D]"', '"cross", "...D, ...D -> ...D"', f"{ROWS} [linalg]",
    ),
    Fault(
        "solving is linear in the matrix", LINALG, '"f(...[km]), ...[m] -> ...[k]"',
        '"...[km], ...[m] -> ...[k]"', f"{ROWS} [linalg]",
    ),
    Fault(
        "kron of uneven pieces", LINALG,
        "if a.shape[d] % size == 0 or other_size == 1:", "if True:",
        f"{ROWS} [linalg]",
    ),
    Fault(
        "a transform along a split dim is local", "rules/families/matrices/fft.py",
        '"...![D] -> ...![E]"', '"...D -> ...D"', f"{ROWS} [fft]",
    ),
    Fault(
        "a split of the wrong dim", DERIVE, "!= self.sizes[name] else S(dim)",
        "!= self.sizes[name] else S(0)", DERIVED,
    ),
    Fault(
        "a summed letter gives B", DERIVE,
        "self._output_sbps(P), form", "self._output_sbps(B), form", DERIVED,
    ),
    Fault(
        "trace takes the wrong diagonal", FORMS, "diagonal(top - left)", "diagonal(left - top)",
        f"{ROWS} [linalg]",
    ),
    Fault(
        "a variance without its correction", FORMS, "/ max(n - correction, 0)", "/ n",
        f"{ROWS} [reduce]",
    ),
    Fault(
        "log_softmax with a wrong sign", FORMS, "shifted - total.log()", "shifted + total.log()",
        f"{ROWS} [reduce]",
    ),
    Fault(
        "cosine_similarity by one length", FORMS, "lengths[0] * lengths[1]",
        "lengths[0] * lengths[0]", f"{ROWS} [reduce]",
    ),
    Fault(
        "maximum gives P(min)", POINTWISE, '"max(..., ...) -> ..."', '"min(..., ...) -> ..."',
        f"{ROWS} [pointwise]",
    ),
    Fault(
        "erfc rises", POINTWISE, 'erfc", "f(...) -> ...; falls', 'erfc", "f(...) -> ...; rises',
        f"{ROWS} [pointwise]",
    ),
    Fault(
        "where takes a whole operand for an addend", POINTWISE, "signature({1: P, 2: P}, P)",
        "signature({1: P}, P)", f"{ROWS} [pointwise]",
    ),
    Fault(
        "filling addends fills each", POINTWISE, 'if call.name == "zero" else EXTREMES',
        "if call.name else EXTREMES", f"{ROWS} [pointwise]",
    ),
    Fault(
        "dims before a reduced one are counted with it", REDUCE,
        "S(d if keepdim else d - sum(r < d for r in dims))", "S(d)",
        f"{ROWS} [reduce] [ordering]",
    ),
    Fault(
        "lengths of parts are added up", REDUCE, "order in (0, 1) and", "order in (0, 1, 2) and",
        f"{ROWS} [reduce]",
    ),
    Fault(
        "tensordot keeps the wrong dims", "rules/families/matrices/matmul.py",
        "enumerate(right) if d not in summed_b", "enumerate(right) if d not in summed_a",
        f"{ROWS} [matmul]",
    ),
    # -- specs and boxing
    Fault(
        "uneven pieces overlap", "spec/cut.py", "index * q + min(index, r)", "index * q",
        "tests/consistent/spec/test_tensor_spec.py",
    ),
    Fault(
        "coordinates in the wrong order", "spec/grid.py", "return tuple(reversed(coordinate))",
        "return tuple(coordinate)", "tests/consistent/spec",
    ),
    Fault(
        "a split appears on an outer axis", "boxing/plan.py",
        "for e in (current, entry)):", "for e in (current,)):",
        f"{MOVES} tests/consistent/boxing/test_plan.py",
    ),
    Fault(
        "the costliest path", "boxing/plan.py", "picoseconds = cost +", "picoseconds = cost -",
        "tests/consistent/boxing/test_plan.py",
    ),
    Fault(
        "all_to_all with its dims swapped", RUN,
        "split_dim=j, split_sizes=cut, concat_dim=i, concat_sizes=joined",
        "split_dim=i, split_sizes=joined, concat_dim=j, concat_sizes=cut", MOVES,
    ),
    Fault(
        "every rank keeps the addend", RUN, "return _unchanged if index == 0 else _zeros_like",
        "return _unchanged", MOVES,
    ),
    Fault(
        "all_reduce left out", RUN,
        "return partial(collectives.all_reduce, ranks=ranks, op=_reduce_op(move))",
        "return _unchanged", MOVES,
    ),
    Fault(
        "padding at the wrong place", RUN,
        "            runs = src.runs(whole[src.dim], parts, index)\n",
        "            runs = src.runs(whole[src.dim], parts, 0)\n", MOVES,
    ),
    Fault(
        "every rank has the whole value as its addend", "boxing/steps.py",
        '"keep" if dst.is_extreme else "keep_first"', '"keep"', MOVES,
    ),
    Fault(
        "an exchange sends each addend to all", "boxing/exchange.py",
        "for k in range(len(box_holders)) if routing.slots[k] == slot]",
        "for k in range(len(box_holders))]",
        "tests/consistent/movement/test_between.py tests/consistent/boxing/test_exchange.py",
    ),
    Fault(
        "the largest of pieces and zeros", RUN,
        "fill = identity(state.dtype, _reduce_op(move))", "fill = 0",
        f"{MOVES} tests/consistent/spec",
    ),
    Fault(
        "sizes of a shard are taken for those of the whole", RUN, "entries[axis] = B\n",
        "pass\n", MOVES,
    ),
    Fault(
        "a cut shard begins anew at each run", "movement/recut.py", "offset + start - held[i][0]",
        "start - held[i][0]", f"{MOVES} tests/consistent/boxing tests/consistent/movement",
    ),
    Fault(
        "gradients of several tensors go the way of the values", "movement/boxed.py",
        "tuple((dst.dual, src.dual) for src, dst in routes)",
        "tuple((src.dual, dst.dual) for src, dst in routes)",
        f"tests/consistent/movement/test_differentiable.py {OPS}/running",
    ),
    # -- gradients
    Fault(
        "gradients of a grid are not summed along its second axis", "dispatch/plans/gradients.py",
        "entry is B and shape[axis] > 1", "entry is B and axis == 0",
        f"{BACKWARD}/test_gradients_of_leaves.py tests/consistent/tensor/test_leaves.py",
    ),
    Fault(
        "a whole gradient becomes an addend on all ranks", "autograd/unsummed.py",
        "run(plain(held_grad).detach(), held_grad._spec, spec)", "plain(held_grad).detach()",
        f"{BACKWARD}/test_unsummed.py {BACKWARD}/test_gradients_of_leaves.py",
    ),
    Fault(
        "gradients are subtracted in no_sync", "autograd/scattering.py", "return total.add_(grad)",
        "return total.sub_(grad)", f"{BACKWARD}/test_unsummed.py",
    ),
    Fault(
        "gradients are summed over the first axis alone", "autograd/buckets.py",
        "for ranks in self.rest:", "for ranks in ():",
        f"{BACKWARD}/test_buckets.py {BACKWARD}/test_gradients_of_leaves.py",
    ),
    # -- dispatch
    Fault(
        "a norm of a list without its sum", "dispatch/planning/lists/list_norms.py",
        "return sum_over(norms**ord, placement, axes) ** (1 / ord)", "return norms",
        f"{LISTS}/test_list_norms.py",
    ),
    Fault(
        "the smallest of a list is its largest", "dispatch/planning/lists/list_norms.py",
        "max_over if ord > 0 else min_over", "max_over", f"{LISTS}/test_list_norms.py",
    ),
    Fault(
        "what was written to a boxed copy is lost", "dispatch/running/on_shards.py",
        "_Tensor.copy_(original, box(", "(original, box(",
        f"{OPS}/planning/test_writes.py",
    ),
    Fault(
        "an op in place on a copy is lost", "dispatch/running/on_shards.py",
        "_Tensor.copy_(target, new_shard)", "pass",
        f"{OPS}/running/test_written_views.py {OPS}/planning/functions/test_outs.py",
    ),
    Fault(
        "an error stays on its rank", "dispatch/running/agreed.py",
        "    raise_first_error(notes, ranks, error)", "    pass", f"{OPS}/running/test_agreed.py",
    ),
    Fault(
        "an op in place lays its operand anew", PLANNING,
        "self.specs[0].sbp if self.call.inplace else None", "None", f"{ROWS} {OPS}/planning",
    ),
    Fault(
        "autocast rounds addends", PLANNING,
        "any(e.is_partial for s in self.specs for e in s.sbp)", "False",
        f"{OPS}/planning/test_autocast.py",
    ),
    Fault(
        "writes that moved views ask for are not counted", "dispatch/running/writes.py",
        "if storage is not None:", "if storage is None:", f"{OPS}/running",
    ),
    # -- nn
    Fault(
        "a parameter that was written keeps its old master copy", "nn/sharded/master_weights.py",
        "if self.copies[param][1] != param._version:", "if False:",
        "tests/consistent/nn/sharded/test_master_weights.py",
    ),
    Fault(
        "uneven parts of a batch overlap", "nn/uneven.py",
        "held[me][0], stop - start)",
        "held[me][0] * 0, stop - start)",
        "tests/consistent/nn/test_inputs.py tests/consistent/data",
    ),
    Fault(
        "a step sees the gradient of another part", "nn/sharded/step.py",
        "local.narrow(dim, first - start, size)", "local.narrow(dim, 0, size)",
        "tests/consistent/nn/sharded/test_step.py",
    ),
    Fault(
        "what a step made is not gathered", "nn/sharded/step.py",
        "gather_into([new_value", "([new_value",
        "tests/consistent/nn/sharded/test_step.py",
    ),
    Fault(
        "state that was loaded stays as it lay", "nn/sharded/step.py",
        "if value._spec is not target:", "if False:", "tests/consistent/nn/sharded/test_step.py",
    ),
    # -- programs that are followed
    Fault(
        "a known value outlives a write", "graph/known_values.py",
        "known.version != version(x)", "False", f"{ACCEPTED} [unknown]",
    ),
    Fault(
        "shapes by values are those of the first batch", "graph/record.py",
        "self._add_function_question(shapes_by_values, (func, *refs), shapes(*tensors_in(out)))",
        "pass",
        f"{ACCEPTED} [pipeline_asks]",
    ),
    # -- compiled
    Fault(
        "ranks do not wait for the one that compiles their graph",
        "compiled/backends/graph_cache.py",
        "                fcntl.flock(lock, fcntl.LOCK_SH)\n", "",
        "tests/consistent/compiled/test_graph_cache.py",
    ),
    Fault(
        "a number that has changed is taken for the same", "compiled/guards.py",
        "type(now) is type(before) and bool(now == before)", "type(now) is type(before)",
        "tests/consistent/compiled/test_by_values.py tests/consistent/compiled/test_steps.py",
    ),
    Fault(
        "tensors that share memory now are taken for others", "compiled/guards.py",
        "return _memory_sharing([*tensors, *given]) == self._recorded_sharing", "return True",
        f"{PROGRAMS} tests/consistent/compiled/test_what_steps_change.py",
    ),
    Fault(
        "a norm over dims that are not the last", f"{PASSES}norms.py",
        "if normalized_dims != list(range(ndim - len(normalized_dims), ndim)):", "if False:",
        "tests/consistent/compiled/test_fuse.py",
    ),
    Fault(
        "a value is made again of what was overwritten", f"{PASSES}rematerialization.py",
        "or not memory_use.is_unchanged(memory, first, last)", "",
        "tests/consistent/compiled/test_bounded.py tests/consistent/compiled/test_budget.py",
    ),
    Fault(
        "what the program keeps is taken for the step's own", f"{PASSES}trace.py",
        "return not memories & escaped and not any", "return not any",
        f"{PROGRAMS} tests/consistent/compiled/test_what_steps_change.py",
    ),
    Fault(
        "one addend twice", f"{PASSES}reassociate_all_reduce.py", "(node.target, (x, y))",
        "(node.target, (x, x))",
        PROGRAMS,
    ),
    Fault(
        "messages of other tensors are merged", f"{PASSES}merge_equal.py",
        "return tuple(inputs), call.number, i", "return call.number, i",
        PROGRAMS,
    ),
    Fault(
        "a message is merged across a write", f"{PASSES}merge_equal.py",
        "return not trace.is_written(input_memories, before, node) and", "return",
        PROGRAMS,
    ),
    Fault(
        "a norm over one dim less", f"{PASSES}norms.py",
        'Norm("layer_norm", out, {node, out}, len(shape)',
        'Norm("layer_norm", out, {node, out}, len(shape) + 1',
        "tests/consistent/compiled/test_fuse.py",
    ),
)  # fmt: skip


def copied(to: Path) -> None:
    """The tree without what is built for other releases of torch."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, to / name)


def planted(fault: Fault, tree: Path) -> str:
    """What the tests say of a fault: "found", or what happened instead."""
    path = tree / "consistent" / fault.file
    text = path.read_text()
    assert fault.is_ in text, f"{fault.what}: {fault.file} has no {fault.is_!r} any more"
    path.write_text(text.replace(fault.is_, fault.was, 1))
    try:
        return _judged(fault, tree)
    finally:
        path.write_text(text)


def _judged(fault: Fault, tree: Path) -> str:
    words = fault.tests.split()
    chosen = [word.strip("[]") for word in words if word.startswith("[")]
    given = [word for word in words if not word.startswith("[")]
    given += ["-k", " or ".join(chosen)] if chosen else []
    pid = os.fork()
    if pid == 0:
        os.setsid()
        _test(tree, given)
    end = time.monotonic() + LIMIT_S
    status = 0
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        time.sleep(0.05)
    else:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return f"the tests have not ended after {LIMIT_S:g} s"
    said = {0: "NOT FOUND", 1: "found"}
    code = os.waitstatus_to_exitcode(status)
    return said.get(code, f"the tests ended with {code}")


def _test(tree: Path, words: list[str]) -> None:
    """In the fork: run pytest in the tree, and end with its status."""
    for name in list(sys.modules):
        if name.split(".")[0] in ("tests", "consistent", "mirrored"):
            del sys.modules[name]
    os.chdir(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
    os.environ["PYTHONPATH"] = str(tree)
    sys.dont_write_bytecode = True
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    import pytest

    options = ["-q", "-x", "-n0", "-p", "no:cacheprovider", f"--rootdir={tree}"]
    status = pytest.main([*options, *words])
    os._exit(int(status))


def main(words: list[str]) -> int:
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch._dynamo.utils
    import torch.distributed
    import torch.fx.experimental.symbolic_shapes

    torch.set_num_threads(1)
    wanted = "NOT FOUND" if "--none" in words else "found"
    words = [word for word in words if word != "--none"]
    faults = [f for f in FAULTS if not words or any(word in " ".join(f) for word in words)]
    if wanted != "found":  # the tests of each, once
        faults = [
            f._replace(what=f.tests, was=f.is_) for f in {f.tests: f for f in faults}.values()
        ]
    good = 0
    with tempfile.TemporaryDirectory(prefix="consistent-mutations-") as folder:
        copied(Path(folder))
        for fault in faults:
            start = time.monotonic()
            said = planted(fault, Path(folder))
            good += said == wanted
            print(
                f"{said:12} {time.monotonic() - start:5.1f} s  {fault.file}: {fault.what}",
                flush=True,
            )
    print(f"{good} of {len(faults)} are {wanted}")
    return int(good < len(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
