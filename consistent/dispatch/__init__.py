"""Dispatch of an op on global tensors: find or make the plan of the call, and run it."""

from mirrored.native import load_build

load_build(__name__)
