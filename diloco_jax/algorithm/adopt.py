"""Putting a received fragment in place of the local one."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def adopt_overwrite(local: Any, theta: Any) -> Any:
  """local <- Θ, in the dtypes of `local`. The paper's way (2604.21428)."""
  return jax.tree.map(lambda x, y: y.astype(x.dtype), local, theta)


def adopt_blend(local: Any, theta: Any, alpha: float) -> Any:
  """local <- α local + (1 - α) Θ, in f32, then in the dtypes of `local`.

  Reference: Streaming DiLoCo (arXiv 2501.18512), algorithm 2.
  """

  def blend(x: jax.Array, y: jax.Array) -> jax.Array:
    mixed = alpha * x.astype(jnp.float32) + (1 - alpha) * y
    return mixed.astype(x.dtype)

  return jax.tree.map(blend, local, theta)


def adopt_rebase(
  local: Any, theta: Any, anchor: Any, delta_c: Any = None
) -> Any:
  """local <- Θ + (local - anchor) + Δ_c: no step since the anchor is lost.

  Args:
    local: the fragment as trained.
    theta: Θ, the received value.
    anchor: the value received before.
    delta_c: Δ that this island sent and that Θ includes; None: none does.

  Returns:
    The rebased fragment, in the dtypes of `local`.
  """

  def rebase(x: Any, y: Any, z: Any, *c: Any) -> Any:
    moved = y + (x.astype(jnp.float32) - z)
    if c:
      moved = moved + c[0]
    return moved.astype(x.dtype)

  rest = () if delta_c is None else (delta_c,)
  return jax.tree.map(rebase, local, theta, anchor, *rest)


def rebase_shift(
  theta: Mapping[str, np.ndarray],
  anchor: Mapping[str, np.ndarray],
  delta_c: Mapping[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
  """Θ - anchor + Δ_c, so that local + shift is `adopt_rebase` up to rounding.

  It does not depend on `local`: it is computed off the step's path, and only
  one tensor goes to the device.
  """
  shift = {}
  for name, value in theta.items():
    moved = np.subtract(value, anchor[name], out=np.empty_like(value))
    if delta_c is not None:
      np.add(moved, delta_c[name], out=moved)
    shift[name] = moved
  return shift
