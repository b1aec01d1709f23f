"""Dispatch of one op on global tensors: find the plan for the call's key, then run the plan."""

from mirrored.native import load_build

load_build(__name__)
