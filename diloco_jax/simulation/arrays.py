"""Real arrays behind the hosts of a simulated world.

The island's fragments and the syncer's store are those of production; what is
simulated is time, links and disks.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from diloco_jax import algorithm as A
from diloco_jax.island.anchors import Fragments
from diloco_jax.protocol import actions as a
from diloco_jax.protocol import messages as m
from diloco_jax.simulation.contents import Theta
from diloco_jax.syncer.store import Store
from diloco_jax.transport import base as transport

OUTLIER = 1e6


class InnerTrainer(Protocol):
  """The inner training of one process."""

  extra: dict[str, Any]  # what belongs to it besides the parameters

  def put(self, params: Any) -> Any:
    """Host parameters as fresh buffers, where the step wants them."""

  def begin(self, start: m.Start) -> None: ...

  def step(self, params: Any, step: int) -> tuple[Any, int, float | None]:
    """Parameters after step number `step`, tokens of its batch, and its loss."""


class SavedIsland(NamedTuple):
  """The arrays of a checkpoint."""

  params: Any
  extra: Any
  anchors: list[Any]


class Contents(abc.ABC):
  """Makes the arrays of every process of a world."""

  def __init__(
    self, partition: A.Partition, *, alpha: float, upload: str, download: str,
    tx: Any, rule: str, merges: Sequence[Any] | None, islands: int,
    start: Callable[[], Any], shardings: Any = None,
  ):  # fmt: skip
    self.partition = partition
    self._shardings = shardings
    self.start = start
    # What islands have encoded, and the largest value of the anchor behind it.
    self.encoded: dict[Any, tuple[transport.Payload, float]] = {}
    self._alpha, self._upload, self._download = alpha, upload, download
    self._tx, self._rule, self._merges = tx, rule, merges
    self._islands = islands
    self._lives = 0

  @abc.abstractmethod
  def trainer(self, life: int) -> InnerTrainer:
    """Of a new process; `life` is the host's."""

  def island(self, index: int, saved: SavedIsland | None) -> 'ArrayIsland':
    self._lives += 1  # as the world counts them
    fragments = Fragments(
      self.partition,
      alpha=self._alpha,
      upload=self._upload,
      download=self._download,
      shardings=self._shardings,
    )
    return ArrayIsland(
      f'island/{index}', self, fragments, self.trainer(self._lives), saved
    )

  def syncer(self, saved: Any | None) -> 'ArraySyncer':
    store = Store(
      self.partition,
      self._tx,
      rule=self._rule,
      islands=self._islands,
      upload=self._upload,
      download=self._download,
      merges=self._merges,
    )
    return ArraySyncer(store, self.start, saved)


class ArrayIsland:
  """One island process: its parameters, anchors and inner training."""

  def __init__(
    self, who: str, world: Contents, fragments: Fragments,
    trainer: InnerTrainer, saved: SavedIsland | None,
  ):  # fmt: skip
    self._who = who
    self._world = world
    self._fragments = fragments
    self.trainer = trainer
    self.params: Any = None
    if saved is not None:
      self.params = trainer.put(saved.params)
      trainer.extra = saved.extra
      fragments.anchors = list(saved.anchors)

  def begin(self, start: m.Start) -> None:
    if self.params is None:
      host = self._fragments.assembled(self._world.start())
      self.params = self.trainer.put(host)
    self.trainer.begin(start)

  def step(self, step: int) -> tuple[int, float | None]:
    self.params, tokens, loss = self.trainer.step(self.params, step)
    return tokens, loss

  def capture(self, fragment: int, capture: m.CaptureId) -> None:
    self._fragments.capture(self.params, fragment, capture)

  def adopt(self, fragment: int, version: m.Version) -> None:
    self.params = self._fragments.adopt(self.params, fragment, version)

  def delta(
    self, fragment: int, capture: m.CaptureId
  ) -> tuple[transport.Payload, bool] | None:
    try:
      payload, healthy = self._fragments.delta(capture)
    except KeyError:
      return None
    anchor = self._fragments.anchors[fragment]
    assert anchor is not None
    largest = max(float(np.max(np.abs(x))) for x in anchor.values())
    self._world.encoded[self._who, capture, fragment] = payload, largest
    return payload, healthy

  def forget(self, capture: m.CaptureId) -> None:
    self._fragments.forget(capture)

  def stage(self, action: a.Stage, value: Any) -> bool:
    if not isinstance(value, transport.Payload):
      return False  # altered on its way
    return self._fragments.stage(
      action.fragment,
      action.version,
      action.digest,
      action.mode,
      action.capture,
      value,
    )

  def seeds(self) -> Sequence[Any]:
    params = self.params if self.params is not None else self._world.start()
    count = len(self._world.partition.sizes)
    return [self._fragments.seed(params, p) for p in range(count)]

  def anchor(self, fragment: int) -> Any:
    anchor = self._fragments.anchors[fragment]
    assert anchor is not None
    encoded = A.encode(anchor, 'f32')
    return transport.Payload('f32', A.to_buffers(encoded))

  def donation(self) -> tuple[str, Any]:
    extra = jax.device_get(self.trainer.extra)
    return _extra_digest(extra), extra

  def take_donation(self, digest: str, value: Any) -> bool:
    if not isinstance(value, dict) or _extra_digest(value) != digest:
      return False
    self.trainer.extra = value
    return True

  def save(self) -> SavedIsland:
    return SavedIsland(
      params=jax.tree.map(np.array, self.params),
      extra=jax.device_get(self.trainer.extra),
      anchors=list(self._fragments.anchors),
    )


def _extra_digest(extra: dict[str, Any]) -> str:
  leaves = jax.tree.leaves(extra)
  return A.tree_digest({str(k): np.asarray(x) for k, x in enumerate(leaves)})


class ArraySyncer:
  """One syncer process: Θ and the outer optimizer's state."""

  def __init__(self, store: Store, start: Callable[[], Any], saved: Any | None):
    self.store = store
    self._start = start
    self._saved = saved
    self._aside: dict[int, dict[str, np.ndarray]] = {}
    self._count = len(store.partition.sizes)

  def _theta(self, fragment: int) -> Theta:
    digest_f32 = self.store.digest(fragment)
    buffers, digest = self.store.encode(fragment)
    payload = transport.Payload(self.store.download, buffers)
    return Theta(digest_f32, digest or digest_f32, payload)

  def _all(self) -> list[Theta]:
    return [self._theta(p) for p in range(self._count)]

  def _start_fragment(self, fragment: int) -> Any:
    return self.store.partition.take(self._start(), fragment)

  def seed(self, values: Sequence[Any] | None) -> list[Theta]:
    if values is None:
      made = [self._start_fragment(p) for p in range(self._count)]
    else:
      made = [self.store.decode(p, x, 'f32') for p, x in enumerate(values)]
    self.store.seed(made)
    return self._all()

  def inspect(self, fragment: int, value: Any) -> tuple[str, float]:
    try:
      delta = self._decoded(fragment, value)
    except ValueError:
      return 'shape', 0.0
    finite, norm = self.store.look(delta)
    return ('', norm) if finite else ('nonfinite', 0.0)

  def _decoded(self, fragment: int, value: Any) -> Any:
    how, payload = '', value
    if not isinstance(value, transport.Payload):
      how, payload = value[1:] if value[0] == 'spoiled' else ('shape', value[1])
    delta = self.store.decode(fragment, payload, self.store.upload)
    if how == 'nonfinite':
      return {name: x * np.float32(np.nan) for name, x in delta.items()}
    if how == 'outlier':
      return {name: x * np.float32(OUTLIER) for name, x in delta.items()}
    if how:
      raise ValueError(how)
    return delta

  def merge(self, action: a.Merge, values: Sequence[Any]) -> Theta:
    p = action.fragment
    deltas = [self._decoded(p, x) for x in values]
    self.store.merge(p, deltas, [x.weight for x in action.inputs])
    return self._theta(p)

  def take_anchor(self, action: a.TakeAnchor, value: Any) -> bool:
    if not isinstance(value, transport.Payload):
      return False
    decoded = self.store.decode(action.fragment, value, 'f32')
    anchor = {name: np.asarray(x) for name, x in decoded.items()}
    if A.tree_digest(anchor) != action.digest:
      return False
    self._aside[action.fragment] = anchor
    return True

  def restore(self, orders: Sequence[a.RestoreOrder]) -> list[Theta]:
    self.store.seed([self._start_fragment(p) for p in range(self._count)])
    for order in orders:
      p = order.fragment
      theta, outer = None, None
      if order.source == a.ANCHOR:
        theta = self._aside.pop(p)
      elif order.source == a.SNAPSHOT:
        theta = self._saved[p][0]
      if order.momentum:
        outer = self._saved[p][1]
      self.store.put_back(p, theta, outer)
    return self._all()

  def save(self) -> tuple[tuple[str, ...], Any]:
    digests = tuple(x.digest for x in self._all())
    return digests, self.store.copies()

  def export(self) -> str:
    return self.store.params_digest()
