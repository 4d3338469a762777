"""Values of the program and of libraries that no type describes."""

from typing import Any, TypeAlias

Untyped: TypeAlias = Any
"""A value of which only the attributes that are read are known: of torch's private modules and its
C++ (nodes, meshes, groups, operators), of the program's loaders and samplers, of other libraries.

What is merely passed on is an `object`.
"""
