"""What an island keeps of each fragment, and how it moves to the device.

Anchors are NumPy arrays in host memory. A capture is a jitted copy on the
device; its pseudo-gradient is computed off the step's path, where it lands.
Of an unresolved capture only what was sent is kept.
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax import algorithm as A
from diloco_jax.protocol import messages as m
from diloco_jax.protocol.settings import BLEND
from diloco_jax.protocol.settings import OVERWRITE
from diloco_jax.protocol.settings import REBASE
from diloco_jax.transport import base as transport

Host = dict[str, np.ndarray]
Device = dict[str, jax.Array]


@dataclasses.dataclass
class Staged:
  """A version that is ready to be put in place."""

  version: m.Version
  mode: str
  theta: Host
  operand: Device  # Θ, or for rebase the shift Θ - anchor + Δ_c


class _Boundary:
  """What runs on the device at a step boundary, compiled for one fragment."""

  def __init__(self, alpha: float, shardings: Any):
    # Output shardings are given, so that XLA cannot choose others than those
    # that the training step was compiled for.
    given = {} if shardings is None else {'out_shardings': shardings}
    self.copy = jax.jit(lambda local: jax.tree.map(jnp.copy, local), **given)
    # Θ is copied into place: the next step donates its parameters, and a
    # buffer that came from the host may not be written to.
    self.overwrite = jax.jit(
      lambda local, theta: jax.tree.map(
        jnp.copy, A.adopt_overwrite(local, theta)
      ),
      **given,
    )
    self.blend = jax.jit(
      lambda local, theta: A.adopt_blend(local, theta, alpha),
      donate_argnums=0,
      **given,
    )
    self.shift = jax.jit(
      lambda local, shift: jax.tree.map(
        lambda x, y: (x.astype(jnp.float32) + y).astype(x.dtype),
        local,
        shift,
      ),
      donate_argnums=0,
      **given,
    )


@functools.cache
def _boundary(alpha: float, shardings: tuple[Any, ...] | None) -> _Boundary:
  """One compilation for all islands of a process that are sharded alike."""
  return _Boundary(alpha, None if shardings is None else dict(shardings))


class Fragments:
  """The arrays behind an island's machine.

  Thread-safety: `capture` and `adopt` run on the training thread; `delta` and
  `stage` on the driver's worker. The machine orders them: an anchor is
  replaced only by an adoption, and a version prepared against another anchor
  is prepared again.
  """

  def __init__(
    self,
    partition: A.Partition,
    *,
    alpha: float,
    upload: str,
    download: str,
    shardings: Any = None,
  ):
    self.partition = partition
    self.upload = upload
    self.download = download
    count = len(partition.sizes)
    self.anchors: list[Host | None] = [None] * count
    self._shardings = [
      partition.take(shardings, p) if shardings is not None else None
      for p in range(count)
    ]
    self._staged: dict[int, Staged] = {}
    self._captured: dict[m.CaptureId, tuple[int, Host, Device]] = {}
    self._sent: dict[m.CaptureId, Host] = {}
    self._jits = [
      _boundary(alpha, None if x is None else tuple(sorted(x.items())))
      for x in self._shardings
    ]

  # At a step boundary.

  def capture(self, params: Any, fragment: int, capture: m.CaptureId) -> None:
    """Enqueue a copy, before the next step donates its source."""
    anchor = self.anchors[fragment]
    assert anchor is not None
    local = self.partition.take(params, fragment)
    copied = self._jits[fragment].copy(local)
    self._captured[capture] = (fragment, anchor, copied)

  def adopt(self, params: Any, fragment: int, version: m.Version) -> Any:
    """Put a staged version in place; returns the parameters."""
    staged = self._staged.pop(fragment)
    assert staged.version == version, (staged.version, version)
    if params is not None:
      local = self.partition.take(params, fragment)
      jits = self._jits[fragment]
      adopters = {
        OVERWRITE: jits.overwrite,
        BLEND: jits.blend,
        REBASE: jits.shift,
      }
      new = adopters[staged.mode](local, staged.operand)
      params = self.partition.put(params, fragment, new)
    self.anchors[fragment] = staged.theta
    return params

  def assembled(self, params_like: Any) -> Any:
    """All anchors in the structure of the parameters, on the host."""
    for p, anchor in enumerate(self.anchors):
      assert anchor is not None
      params_like = self.partition.put(params_like, p, anchor)
    return params_like

  def warm_up(self, params: Any) -> None:
    """Compile what boundaries run, so that no step waits for a compiler."""
    for p in range(len(self.partition.sizes)):
      local = self.partition.take(params, p)
      zeros = {name: np.zeros(x.shape, np.float32) for name, x in local.items()}
      operand = self._to_device(p, zeros)
      jits = self._jits[p]
      jits.overwrite(local, operand)
      jits.blend(jits.copy(local), operand)
      jits.shift(jits.copy(local), operand)

  # On the worker.

  def delta(self, capture: m.CaptureId) -> tuple[transport.Payload, bool]:
    """Δ = anchor - capture, encoded; and whether it is finite."""
    _, anchor, copied = self._captured.pop(capture)
    delta = {
      name: anchor[name] - np.asarray(x, dtype=np.float32)
      for name, x in copied.items()
    }
    healthy = all(bool(np.isfinite(x).all()) for x in delta.values())
    encoded = A.encode(delta, self.upload)
    # Δ_c is what the syncer will decode, not what was meant.
    self._sent[capture] = (
      delta if self.upload == 'f32' else _on_host(A.decode(encoded))
    )
    payload = transport.Payload(self.upload, A.to_buffers(encoded))
    return payload, healthy

  def seed(self, params: Any, fragment: int) -> transport.Payload:
    """The own value of a fragment, for a syncer without a task."""
    values = _on_host(self.partition.take(params, fragment))
    floats = {k: np.asarray(x, np.float32) for k, x in values.items()}
    return transport.Payload('f32', A.to_buffers(A.encode(floats, 'f32')))

  def stage(
    self,
    fragment: int,
    version: m.Version,
    digest: str,
    mode: str,
    capture: m.CaptureId | None,
    payload: transport.Payload,
  ) -> bool:
    """Decode, verify and move a received value; False: it is not as told."""
    specs = self.partition.specs(fragment)
    try:
      if payload.kind != self.download:
        return False
      encoded = A.from_buffers(specs, self.download, payload.buffers)
    except ValueError:
      return False
    # Copied, because the transport takes its receive buffers back.
    theta = {
      name: np.array(x, dtype=np.float32)
      for name, x in A.decode(encoded).items()
    }
    if A.tree_digest(theta) != digest:
      return False
    operand: Mapping[str, np.ndarray] = theta
    if mode == REBASE:
      anchor = self.anchors[fragment]
      assert anchor is not None
      sent = self._sent[capture] if capture is not None else None
      operand = A.rebase_shift(theta, anchor, sent)
    self._staged[fragment] = Staged(
      version=version,
      mode=mode,
      theta=theta,
      operand=self._to_device(fragment, operand),
    )
    return True

  def forget(self, capture: m.CaptureId) -> None:
    """A capture is resolved."""
    self._captured.pop(capture, None)
    self._sent.pop(capture, None)

  def _to_device(self, fragment: int, values: Mapping[str, Any]) -> Device:
    shardings = self._shardings[fragment]
    if shardings is None:
      return {name: jnp.asarray(x) for name, x in values.items()}
    return {
      name: jax.device_put(x, shardings[name]) for name, x in values.items()
    }


def _on_host(fragment: Mapping[str, Any]) -> Host:
  return {name: np.asarray(x) for name, x in fragment.items()}
