"""Θ and the outer optimizer's state, and what is done to them.

Everything is kept in f32 on the syncer's default device. The store is used by
one worker thread only.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax import algorithm as A

Fragment = dict[str, jax.Array]


def bucket(contributions: int, islands: int) -> int:
  """How many contributions the compiled merge takes.

  Absent ones are zeros with weight 0, which add nothing; so there is one
  compilation for each fragment and not one for each number of islands. Above
  the configured number of islands the bucket doubles.
  """
  size = max(1, islands)
  while size < contributions:
    size *= 2
  return size


class Store:
  """The syncer's parameters: fragments of Θ, momentum, merge functions."""

  def __init__(
    self,
    partition: A.Partition,
    tx: Any,
    *,
    rule: str,
    islands: int,
    upload: str,
    download: str,
    merges: Sequence[Any] | None = None,
  ):
    """Holds nothing yet.

    Args:
      partition: of the parameters.
      tx: the outer optimizer.
      rule: how contributions are combined, see `algorithm.merge`.
      islands: configured; the compiled merge takes so many contributions.
      upload: codec of contributions.
      download: codec of broadcasts.
      merges: compiled merges of the fragments, where many stores share them.
    """
    self.partition = partition
    self.upload = upload
    self.download = download
    self._tx = tx
    self._islands = islands
    self._theta: list[Fragment] = []
    self._outer: list[Any] = []
    self._zeros: list[Fragment] = []
    self._merges = merges or [
      A.make_merge(tx, dict(partition.is_embedding), rule=rule)
      for _ in partition.sizes
    ]
    self._look = jax.jit(_finite_and_norm)

  def seed(self, fragments: Sequence[Mapping[str, Any]]) -> None:
    """Θ(0): copies, since merges donate what is here."""
    assert len(fragments) == len(self.partition.sizes)
    self._theta = [
      {name: jnp.array(x, jnp.float32) for name, x in fragment.items()}
      for fragment in fragments
    ]
    self._outer = [self._tx.init(theta) for theta in self._theta]
    self._zeros = [jax.tree.map(jnp.zeros_like, theta) for theta in self._theta]

  def warm_up(self, contributions: int) -> None:
    """Compile every fragment's merge before the first round needs it."""
    size = bucket(contributions, self._islands)
    for p, theta in enumerate(self._theta):
      copies = jax.tree.map(jnp.copy, (theta, self._outer[p]))
      zeros = (self._zeros[p],) * size
      self._merges[p](*copies, zeros, jnp.zeros(size, jnp.float32))
      self._look(self._zeros[p])

  def decode(self, fragment: int, payload: Any, codec: str) -> Fragment:
    """A payload from the wire as f32 arrays on the device.

    Raises:
      ValueError: it is not what this fragment in this codec looks like.
    """
    if payload.kind != codec:
      raise ValueError(f'codec {payload.kind!r}, expected {codec!r}')
    specs = self.partition.specs(fragment)
    encoded = A.from_buffers(specs, codec, payload.buffers)
    return {
      name: jnp.asarray(x, jnp.float32) for name, x in A.decode(encoded).items()
    }

  def look(self, delta: Fragment) -> tuple[bool, float]:
    """Whether every value is finite, and the norm."""
    finite, norm = self._look(delta)
    return bool(finite), float(norm)

  def merge(
    self, fragment: int, deltas: Sequence[Fragment], weights: Sequence[float]
  ) -> None:
    """One outer step of a fragment; Θ and its state are donated."""
    size = bucket(len(deltas), self._islands)
    missing = size - len(deltas)
    padded = (*deltas, *(self._zeros[fragment],) * missing)
    # Weights are tokens squared by steps: scaled, so that f32 is enough.
    top = max(weights) or 1.0
    scaled = [w / top for w in weights] + [0.0] * missing
    self._theta[fragment], self._outer[fragment] = self._merges[fragment](
      self._theta[fragment],
      self._outer[fragment],
      padded,
      jnp.asarray(scaled, jnp.float32),
    )

  def digest(self, fragment: int) -> str:
    """Of Θ in f32."""
    return A.tree_digest(_on_host(self._theta[fragment]))

  def encode(self, fragment: int) -> tuple[Any, str]:
    """The broadcast of a fragment, and the digest of what it decodes to.

    The digest is '' where the broadcast is lossless: it is that of Θ.
    """
    encoded = A.encode(self._theta[fragment], self.download)
    # The buffers of Θ are donated by the next merge while this may still be
    # on its way to an island, so the broadcast owns its bytes.
    buffers = tuple(np.array(x) for x in A.to_buffers(encoded))
    if self.download == 'f32':
      return buffers, ''
    return buffers, A.tree_digest(_on_host(A.decode(encoded)))

  def copies(self) -> list[tuple[Any, Any]]:
    """Θ and the outer state of every fragment, on the host."""
    return [
      jax.tree.map(np.array, (theta, outer))
      for theta, outer in zip(self._theta, self._outer, strict=True)
    ]

  def params_digest(self) -> str:
    """Of Θ as a whole, in f32."""
    flat: dict[str, Any] = {}
    for theta in self._theta:
      flat.update(_on_host(theta))
    return A.tree_digest(flat)

  def put_back(
    self, fragment: int, theta: Mapping[str, Any] | None, outer: Any | None
  ) -> None:
    """Values that were kept elsewhere; None: it stays as it was seeded."""
    if theta is not None:
      self._theta[fragment] = {
        name: jnp.array(x, jnp.float32) for name, x in theta.items()
      }
    if outer is not None:
      self._outer[fragment] = jax.tree.map(jnp.array, outer)

  def parameters(self, params_like: Any) -> Any:
    """Θ as a whole, in the structure of `params_like`."""
    for p, theta in enumerate(self._theta):
      params_like = self.partition.put(params_like, p, _on_host(theta))
    return params_like


def _on_host(fragment: Mapping[str, Any]) -> dict[str, np.ndarray]:
  return {name: np.asarray(x) for name, x in fragment.items()}


def _finite_and_norm(delta: Fragment) -> tuple[jax.Array, jax.Array]:
  leaves = jax.tree.leaves(delta)
  finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves]))
  # Scaled by the largest value, so that no finite delta has an infinite norm.
  top = jnp.max(jnp.stack([jnp.max(jnp.abs(x), initial=0.0) for x in leaves]))
  scale = jnp.where(top > 0, top, 1.0)
  squares = sum(jnp.sum(jnp.square(x / scale)) for x in leaves)
  return finite, jnp.minimum(
    scale * jnp.sqrt(squares), jnp.finfo(jnp.float32).max
  )
