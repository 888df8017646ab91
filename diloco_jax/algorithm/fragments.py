"""Fragments: disjoint subsets of the parameter tensors."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import hashlib
import json
import math
from typing import Any

import jax

# Names that mark a tensor as an embedding, whose pseudo-gradients are merged
# by the plain mean: those of different islands are not near-orthogonal.
EMBEDDING_MARKS = ('embed', 'wte', 'wpe', 'lm_head')


@functools.lru_cache(maxsize=64)
def _names_of(structure: Any) -> tuple[str, ...]:
  numbered = jax.tree.unflatten(structure, range(structure.num_leaves))
  paths, _ = jax.tree_util.tree_flatten_with_path(numbered)
  return tuple(
    jax.tree_util.keystr(path, simple=True, separator='/') for path, _ in paths
  )


@functools.lru_cache(maxsize=64)
def _places(structure: Any) -> dict[str, int]:
  return {name: place for place, name in enumerate(_names_of(structure))}


def leaf_names(tree: Any) -> tuple[str, ...]:
  """The path of every leaf, in the order of the tree: 'layers/0/norm'."""
  return _names_of(jax.tree.structure(tree))


def looks_like_embedding(name: str) -> bool:
  """Whether a tensor's path has one of EMBEDDING_MARKS in it."""
  return any(mark in name.lower() for mark in EMBEDDING_MARKS)


@dataclasses.dataclass(frozen=True)
class Partition:
  """Which tensor belongs to which fragment.

  Attributes:
    names: for each fragment, the sorted names of its tensors.
    shapes: of every tensor, by name.
    dtypes: likewise, as strings.
    is_embedding: whether a tensor is merged by the plain mean, by name.
  """

  names: tuple[tuple[str, ...], ...]
  shapes: Mapping[str, tuple[int, ...]]
  dtypes: Mapping[str, str]
  is_embedding: Mapping[str, bool]

  @functools.cached_property
  def sizes(self) -> tuple[int, ...]:
    """Parameters in each fragment."""
    return tuple(
      sum(math.prod(self.shapes[name]) for name in names)
      for names in self.names
    )

  @functools.cached_property
  def fingerprint(self) -> str:
    """Hex SHA-256 of names, shapes, dtypes, assignment and embedding marks.

    Two participants whose fingerprints are equal mean the same by fragment p.
    """
    layout = [
      [
        [name, list(self.shapes[name]), self.dtypes[name],
         self.is_embedding[name]]
        for name in names
      ]
      for names in self.names
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(layout).encode()).hexdigest()

  def specs(self, fragment: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a fragment's tensors, all float32: what is exchanged."""
    return {
      name: jax.ShapeDtypeStruct(self.shapes[name], 'float32')
      for name in self.names[fragment]
    }

  def take(self, params: Any, fragment: int) -> dict[str, Any]:
    """The tensors of one fragment by name, in sorted order."""
    leaves, structure = jax.tree.flatten(params)
    places = _places(structure)
    return {name: leaves[places[name]] for name in self.names[fragment]}

  def put(self, params: Any, fragment: int, values: Mapping[str, Any]) -> Any:
    """The parameters with one fragment replaced; the inverse of `take`.

    Raises:
      ValueError: the names are not those of the fragment.
    """
    if tuple(sorted(values)) != self.names[fragment]:
      raise ValueError(
        f'fragment {fragment} has the tensors {self.names[fragment]}, got '
        f'{tuple(sorted(values))}'
      )
    leaves, structure = jax.tree.flatten(params)
    places = _places(structure)
    for name, value in values.items():
      leaves[places[name]] = value
    return jax.tree.unflatten(structure, leaves)


def partition(
  params: Any,
  num_fragments: int,
  strategy: str = 'balanced',
  is_embedding: Callable[[str], bool] | None = None,
) -> Partition:
  """Distribute whole tensors over fragments of nearly equal size.

  Greedy bin packing: tensors by falling size, ties by name, each into the
  fragment with the smallest total so far, ties by index. The largest fragment
  is at most 4/3 - 1/(3P) times the best possible. Deterministic, and the same
  on every participant that sees the same names, shapes and dtypes.

  Args:
    params: pytree of arrays or ShapeDtypeStructs.
    num_fragments: P.
    strategy: 'balanced'.
    is_embedding: tells by a tensor's path whether it is an embedding; None:
      by EMBEDDING_MARKS.

  Raises:
    ValueError: P is not between 1 and the number of tensors, or the strategy
      is unknown.

  Reference: Decoupled DiLoCo (arXiv 2604.21428), balanced tensor fragments.
  """
  if strategy != 'balanced':
    raise ValueError(f'strategy {strategy!r}, expected balanced')
  names = leaf_names(params)
  leaves = jax.tree.leaves(params)
  if not 1 <= num_fragments <= len(names):
    raise ValueError(
      f'{num_fragments} fragments, expected 1 to {len(names)}: the model has '
      f'{len(names)} tensors'
    )
  if len(set(names)) != len(names):
    raise ValueError('two tensors have the same path')
  marks = is_embedding or looks_like_embedding
  sizes = {
    name: math.prod(x.shape) for name, x in zip(names, leaves, strict=True)
  }
  totals = [0] * num_fragments
  parts: list[list[str]] = [[] for _ in range(num_fragments)]
  for name in sorted(names, key=lambda x: (-sizes[x], x)):
    # Empty tensors must still not leave a fragment without any.
    target = min(
      range(num_fragments), key=lambda p: (totals[p], len(parts[p]), p)
    )
    totals[target] += sizes[name]
    parts[target].append(name)
  return Partition(
    names=tuple(tuple(sorted(part)) for part in parts),
    shapes={
      name: tuple(x.shape) for name, x in zip(names, leaves, strict=True)
    },
    dtypes={name: str(x.dtype) for name, x in zip(names, leaves, strict=True)},
    is_embedding={name: bool(marks(name)) for name in names},
  )
