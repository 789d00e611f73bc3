"""Named faults, each put onto the optimized engine from outside, and how soon they are found."""

from fuzz.mutants.registry import Mutant, UnknownFunction, UnknownMutant, find, names

__all__ = ["Mutant", "UnknownFunction", "UnknownMutant", "find", "names"]
