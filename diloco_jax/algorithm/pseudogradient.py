"""Weights and means of pseudo-gradients Δ = anchor - capture."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

# A mean direction shorter than this is no direction: the islands cancel.
DIRECTION_MIN = 1e-6
# Below this sum of squares, the squares that f32 flushes to zero could matter.
SQUARES_MIN = 1e-20
# A norm that is smaller, or larger than the inverse, has no inverse in f32.
NORM_MIN = 1e-37


def token_weight(tokens: float, steps: float) -> float:
  """Weight of one contribution: quantity times quality.

  w = tokens^2 / steps = tokens x (tokens / steps), where tokens -> c_tokens
  and steps -> c_steps since the fragment's anchor; 0 where steps is 0.

  Reference: Decoupled DiLoCo (arXiv 2604.21428), section 3.2.
  """
  return tokens * tokens / steps if steps > 0 else 0.0


def _normalized(weights: Sequence[float] | jax.Array) -> jax.Array:
  """Weights that add up to 1; all zero where they add up to nothing."""
  w = jnp.asarray(weights, jnp.float32)
  top = jnp.max(w)
  w = w / jnp.where(top > 0, top, 1.0)
  total = jnp.sum(w)
  return w / jnp.where(total > 0, total, 1.0)


def _mean(tensors: Sequence[jax.Array], w: jax.Array) -> jax.Array:
  """Σ w v, in the order given, in f32."""
  total = w[0] * tensors[0].astype(jnp.float32)
  for k, tensor in enumerate(tensors[1:], start=1):
    total = total + w[k] * tensor.astype(jnp.float32)
  return total


def _square_sum(tensor: jax.Array) -> jax.Array:
  return jnp.sum(jnp.square(tensor.astype(jnp.float32)))


def _scaled_norm(tensor: jax.Array) -> jax.Array:
  """The 2-norm, scaled so that no finite tensor overflows or underflows."""
  x = tensor.astype(jnp.float32)
  top = jnp.max(jnp.abs(x), initial=0.0)
  scale = jnp.where(top > 0, top, 1.0)
  return scale * jnp.sqrt(jnp.sum(jnp.square(x / scale)))


def _norms(tensors: Sequence[jax.Array], w: jax.Array) -> jax.Array:
  """[M] 2-norms, reading each tensor once unless squares leave f32."""
  squares = jnp.stack([_square_sum(x) for x in tensors])
  inside = (squares > SQUARES_MIN) & jnp.isfinite(squares)
  norms = lax.cond(
    jnp.all(inside | (w == 0)),
    lambda: jnp.sqrt(squares),
    lambda: jnp.stack([_scaled_norm(x) for x in tensors]),
  )
  # Of a tensor without weight the norm may be infinite, and 0 times that is
  # no number: it must not touch the others.
  return jnp.where(w > 0, norms, 0.0)


@jax.jit
def _radial_directional(
  tensors: Sequence[jax.Array], w: jax.Array
) -> jax.Array:
  norms = _norms(tensors, w)
  radius = jnp.sum(w * norms)
  # φ(0) = 0: a tensor without a direction adds none. Nor does one whose
  # inverse norm f32 cannot hold.
  usable = (norms > NORM_MIN) & (norms < 1.0 / NORM_MIN)
  inverse = jnp.where(usable, 1.0 / jnp.where(usable, norms, 1.0), 0.0)
  direction = _mean(tensors, w * inverse)
  # At most 1, so the squares do not overflow; where they underflow it is
  # shorter than DIRECTION_MIN.
  length = jnp.sqrt(_square_sum(direction))
  long = length > DIRECTION_MIN
  factor = radius / jnp.where(long, length, 1.0)
  good = long & jnp.isfinite(factor)
  # A loop of at most one turn rather than a condition: a condition copies the
  # direction, a loop leaves it where it is. The mean is only computed where
  # it is needed, since it reads every contribution again.
  _, merged = lax.while_loop(
    lambda carry: ~carry[0],
    lambda carry: (jnp.ones_like(carry[0]), _mean(tensors, w)),
    (good, direction),
  )
  return merged * jnp.where(good, factor, 1.0)


def weighted_mean(deltas: Sequence[Any], weights: Sequence[float]) -> Any:
  """Weighted mean of pytrees.

  Δ = Σ w_m Δ_m / Σ w_m, where Δ_m -> deltas[m] and w_m -> weights[m]; zeros
  where all weights are 0. Summed in f32 in the order given: pass the islands
  by id.

  Returns:
    A pytree of f32 arrays.

  Reference: Decoupled DiLoCo (arXiv 2604.21428), section 3.2.
  """
  w = _normalized(weights)
  return jax.tree.map(lambda *x: _mean(x, w), *deltas)


def radial_directional_mean(
  deltas: Sequence[Any], weights: Sequence[float]
) -> Any:
  """Radial-directional averaging (RDA), tensor by tensor.

  Δ = (Σ w_m |Δ_m| / Σ w_m) φ(Σ w_m φ(Δ_m) / Σ w_m), φ(x) = x / |x|, φ(0) = 0,
  where Δ_m -> deltas[m] and w_m -> weights[m]. Keeps the norm of M orthogonal
  pseudo-gradients, which the plain mean divides by sqrt(M). Where directions
  cancel or leave f32, the weighted mean; zeros where all weights are 0.

  Returns:
    A pytree of f32 arrays.

  Reference: Decoupled DiLoCo (arXiv 2604.21428), section 3.2.
  """
  w = _normalized(weights)
  if len(deltas) == 1:  # that contribution, to the last bit
    return jax.tree.map(lambda x: _mean((x,), w), *deltas)
  return jax.tree.map(lambda *x: _radial_directional(x, w), *deltas)
