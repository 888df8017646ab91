"""Weights and means of pseudo-gradients Δ = anchor - capture."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

# A mean direction shorter than this is no direction: the islands cancel.
DIRECTION_MIN = 1e-6


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


def _norm(tensor: jax.Array) -> jax.Array:
  """The 2-norm, scaled so that no finite tensor overflows or underflows."""
  x = tensor.astype(jnp.float32)
  top = jnp.max(jnp.abs(x), initial=0.0)
  scale = jnp.where(top > 0, top, 1.0)
  return scale * jnp.sqrt(jnp.sum(jnp.square(x / scale)))


def _radial_directional(
  tensors: Sequence[jax.Array], w: jax.Array
) -> jax.Array:
  norms = [_norm(x) for x in tensors]
  radius = w[0] * norms[0]
  for k, norm in enumerate(norms[1:], start=1):
    radius = radius + w[k] * norm
  # φ(0) = 0: a tensor without a direction adds none.
  inverse = [jnp.where(n > 0, 1.0 / jnp.where(n > 0, n, 1.0), 0.0) for n in norms]
  direction = _mean(tensors, w * jnp.stack(inverse))
  length = _norm(direction)
  safe = jnp.where(length > DIRECTION_MIN, length, 1.0)
  return jnp.where(
    length > DIRECTION_MIN, direction * (radius / safe), _mean(tensors, w)
  )


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
  cancel, the weighted mean; zeros where all weights are 0.

  Returns:
    A pytree of f32 arrays.

  Reference: Decoupled DiLoCo (arXiv 2604.21428), section 3.2.
  """
  w = _normalized(weights)
  return jax.tree.map(lambda *x: _radial_directional(x, w), *deltas)
