"""One op on global tensors: a key finds a plan, and the plan is run."""

from mirrored.native import not_loaded

try:
    from . import _C  # noqa: F401
except ImportError as error:
    raise not_loaded("consistent.dispatch._C", error) from error
