"""The outer optimizer, and one merge of a fragment as a single function."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

import jax
import optax

from diloco_jax.algorithm import pseudogradient

MEAN = 'mean'
RDA = 'rda'
MERGE_RULES = (MEAN, RDA)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OuterOptions:
  """How the syncer steps Θ."""

  rule: str = 'nesterov'  # nesterov, sgd
  lr: float = 1.0
  momentum: float = 0.5


def outer_optimizer(
  lr: float, momentum: float, nesterov: bool = True
) -> optax.GradientTransformation:
  """SGD with (Nesterov) momentum, fed the merged pseudo-gradient Δ.

  b <- μ b + Δ; Θ <- Θ - η (Δ + μ b), where η -> lr and μ -> momentum; without
  Nesterov Θ <- Θ - η b. Apply with optax.apply_updates.

  Reference: DiLoCo (arXiv 2311.08105), section 3; Decoupled DiLoCo
  (arXiv 2604.21428), section 3.2.
  """
  return optax.sgd(lr, momentum=momentum or None, nesterov=nesterov)


def merge(
  theta: Any,
  outer_state: Any,
  deltas: Sequence[Mapping[str, jax.Array]],
  weights: Any,
  *,
  tx: optax.GradientTransformation,
  is_embedding: Mapping[str, bool],
  rule: str = RDA,
) -> tuple[Any, Any]:
  """One outer step of one fragment.

  Args:
    theta: the fragment, name -> f32 array.
    outer_state: of `tx` for this fragment.
    deltas: a Δ of each island, in the order of their ids.
    weights: [M] f32, of each island.
    tx: the outer optimizer.
    is_embedding: name -> whether the tensor is merged by the plain mean.
    rule: 'rda' or 'mean' for the other tensors.

  Returns:
    The new fragment and state.
  """
  assert rule in MERGE_RULES, rule
  merged = {}
  for name in theta:
    plain = rule == MEAN or is_embedding.get(name, False)
    one = [{name: delta[name]} for delta in deltas]
    mean = (
      pseudogradient.weighted_mean
      if plain
      else pseudogradient.radial_directional_mean
    )
    merged.update(mean(one, weights))
  updates, outer_state = tx.update(merged, outer_state, theta)
  return optax.apply_updates(theta, updates), outer_state


def make_merge(
  tx: optax.GradientTransformation,
  is_embedding: Mapping[str, bool],
  rule: str = RDA,
) -> Callable[..., tuple[Any, Any]]:
  """`merge` as one fused jit that takes (theta, outer_state, deltas, weights).

  Θ and the outer state are donated: the memory of the old ones is the new.
  """
  return jax.jit(
    functools.partial(merge, tx=tx, is_embedding=dict(is_embedding), rule=rule),
    donate_argnums=(0, 1),
  )
