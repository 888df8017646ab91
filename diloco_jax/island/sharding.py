"""Meshes, and from parameter names to mesh axes."""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import re
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from diloco_jax.errors import Problem
from diloco_jax.errors import UserError

AXES = ('data', 'fsdp', 'tensor', 'expert')
BATCH_AXES = ('data', 'fsdp')

Rules = Mapping[str, tuple[str | None, ...]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeshOptions:
  """Devices of one island along each axis; -1: all the others."""

  data: int = -1  # the batch is split
  fsdp: int = 1  # the batch and the parameters are split
  tensor: int = 1  # matrices are split
  expert: int = 1

  @property
  def sizes(self) -> tuple[int, ...]:
    return (self.data, self.fsdp, self.tensor, self.expert)


def axis_sizes(options: MeshOptions, devices: int) -> tuple[int, ...]:
  """The size of every axis, for a number of devices.

  Raises:
    UserError: the mesh does not divide the devices.
  """
  given = [size for size in options.sizes if size != -1]
  open_axes = len(options.sizes) - len(given)
  fixed = math.prod(given)
  possible = all(size >= 1 for size in given) and open_axes <= 1
  whole = possible and devices % fixed == 0
  if not whole or (open_axes == 0 and fixed != devices):
    shape = ' x '.join(
      f'{axis}={size}' for axis, size in zip(AXES, options.sizes, strict=True)
    )
    raise UserError(
      [
        Problem(
          'mesh',
          shape,
          f'sizes whose product is the {devices} devices of an island',
          'change the sizes; one of them may be -1 for all the others',
        )
      ]
    )
  rest = devices // fixed
  return tuple(rest if size == -1 else size for size in options.sizes)


def make_mesh(
  options: MeshOptions, devices: Sequence[Any] | None = None
) -> Mesh:
  """The mesh of one island. Raises UserError where sizes do not fit."""
  chosen = list(devices) if devices is not None else jax.devices()
  sizes = axis_sizes(options, len(chosen))
  # In the order in which the devices are wired, where that is known.
  wired = mesh_utils.create_device_mesh(
    sizes, chosen, allow_split_physical_axes=True
  )
  return Mesh(wired, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _spec(name: str, rank: int, rules: Rules) -> PartitionSpec:
  for pattern, axes in rules.items():
    if re.search(pattern, name):
      if len(axes) != rank:
        raise ValueError(
          f'rule {pattern!r} has {len(axes)} axes, {name!r} has rank {rank}'
        )
      return PartitionSpec(*axes)
  return PartitionSpec()  # no rule: every device holds the whole


def _indivisible(
  name: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh
) -> list[Problem]:
  return [
    Problem(
      f'mesh.{axis}',
      str(mesh.shape[axis]),
      f'a divisor of {size}, a dimension of {name} {tuple(shape)}',
      f'choose another mesh.{axis}, or another width of the model',
    )
    for size, axis in zip(shape, spec, strict=False)
    if axis is not None and size % mesh.shape[axis]
  ]


def param_shardings(shapes: Any, mesh: Mesh, rules: Rules) -> Any:
  """A NamedSharding for every parameter.

  Args:
    shapes: pytree of arrays or ShapeDtypeStructs.
    mesh: of the island.
    rules: pattern of a parameter's path -> mesh axis of each dimension. The
      first pattern that is found in the path counts.

  Raises:
    UserError: a dimension is not divisible by its axis, all of them named.
  """
  problems = []

  def choose(path: Any, leaf: Any) -> NamedSharding:
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    spec = _spec(name, len(leaf.shape), rules)
    problems.extend(_indivisible(name, leaf.shape, spec, mesh))
    return NamedSharding(mesh, spec)

  chosen = jax.tree_util.tree_map_with_path(choose, shapes)
  if problems:
    raise UserError(problems)
  return chosen


def like_params(tree: Any, params: Any, shardings: Any, mesh: Mesh) -> Any:
  """Shardings of an optimizer's state: moments as their parameters.

  A leaf whose path ends in the path of a parameter of the same shape is
  sharded as that parameter; every other leaf is replicated.
  """
  by_path = {}
  for (path, leaf), (_, sharding) in zip(
    jax.tree_util.tree_flatten_with_path(params)[0],
    jax.tree_util.tree_flatten_with_path(shardings)[0],
    strict=True,
  ):
    by_path[jax.tree_util.keystr(path)] = (leaf.shape, sharding)
  replicated = NamedSharding(mesh, PartitionSpec())

  def choose(path: Any, leaf: Any) -> NamedSharding:
    for start in range(len(path)):
      shape, sharding = by_path.get(
        jax.tree_util.keystr(path[start:]), (None, None)
      )
      if shape == leaf.shape:
        return sharding
    return replicated

  return jax.tree_util.tree_map_with_path(choose, tree)


def gather_fsdp(params: Any, shardings: Any) -> Any:
  """Inside jit: parameters whole along `fsdp`, as a layer needs them.

  Said aloud, because the partitioner may choose otherwise: to split the
  features of activations as the parameters are, and gather the whole batch.
  The gradient of a gathered parameter is summed over the batch's parts.
  """

  def gather(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    if 'fsdp' not in sharding.spec:
      return x
    spec = [None if axis == 'fsdp' else axis for axis in sharding.spec]
    return jax.lax.with_sharding_constraint(
      x, NamedSharding(sharding.mesh, PartitionSpec(*spec))
    )

  return jax.tree.map(gather, params, shardings)


def put(values: Any, shapes: Any, shardings: Any) -> Any:
  """Host or device arrays onto a mesh, as fresh buffers that may be donated.

  Without `may_alias` the array could be a view of the caller's memory.
  """

  def place(x: Any, like: Any, sharding: NamedSharding) -> jax.Array:
    assert np.shape(x) == like.shape, (np.shape(x), like.shape)
    value = x if isinstance(x, jax.Array) else np.asarray(x, like.dtype)
    return jax.device_put(value, sharding, may_alias=False)

  return jax.tree.map(place, values, shapes, shardings)


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """The leading dimension over the data axes."""
  return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def check_batch(batch: int, accumulate: int, mesh: Mesh) -> None:
  """Raises UserError where a batch does not divide over the data axes."""
  parts = mesh.shape['data'] * mesh.shape['fsdp'] * accumulate
  if batch % parts:
    raise UserError(
      [
        Problem(
          'data.batch',
          str(batch),
          f'a multiple of {parts} = data x fsdp x accumulate',
          'change data.batch, the mesh or inner.accumulate',
        )
      ]
    )


def fit(
  shapes: Any, mesh: Mesh, rules: Rules, batch: int, accumulate: int
) -> Any:
  """`param_shardings` and `check_batch`, with the problems of both at once."""
  problems: list[Problem] = []
  try:
    check_batch(batch, accumulate, mesh)
  except UserError as e:
    problems.extend(e.problems)
  try:
    chosen = param_shardings(shapes, mesh, rules)
  except UserError as e:
    problems.extend(e.problems)
  if problems:
    raise UserError(problems)
  return chosen
