"""What stands for arrays where only handles matter (timing mode).

The two protocols say what a host asks of the arrays behind its machine; the
two classes answer with small tuples: a value is known by its digest.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import messages as m

# Θ(0) of a fragment in timing mode.
_START = 'd{}'


class IslandContents(Protocol):
  """The arrays of one island process."""

  def begin(self, start: m.Start) -> None:
    """Training begins, or goes on after a lapse."""

  def step(self, step: int) -> tuple[int, float | None]:
    """Inner step number `step`: tokens of its batch, and its loss."""

  def capture(self, fragment: int, capture: m.CaptureId) -> None: ...

  def adopt(self, fragment: int, version: m.Version) -> None: ...

  def delta(
    self, fragment: int, capture: m.CaptureId
  ) -> tuple[Any, bool] | None:
    """Encoded Δ and whether it is finite; None: dropped before its turn."""

  def forget(self, capture: m.CaptureId) -> None: ...

  def stage(self, action: a.Stage, value: Any) -> bool: ...

  def seeds(self) -> Sequence[Any]: ...

  def anchor(self, fragment: int) -> Any: ...

  def donation(self) -> tuple[str, Any]: ...

  def take_donation(self, digest: str, value: Any) -> bool: ...

  def save(self) -> Any: ...


class Theta(NamedTuple):
  """What a merge, a start or a restart leaves of one fragment."""

  digest_f32: str
  digest: str
  value: Any  # the encoded broadcast


class SyncerContents(Protocol):
  """The arrays of one syncer process."""

  def seed(self, values: Sequence[Any] | None) -> list[Theta]:
    """Θ(0) of every fragment; values: sent by an island."""

  def inspect(self, fragment: int, value: Any) -> tuple[str, float]: ...

  def merge(self, action: a.Merge, values: Sequence[Any]) -> Theta: ...

  def take_anchor(self, action: a.TakeAnchor, value: Any) -> bool: ...

  def restore(self, orders: Sequence[a.RestoreOrder]) -> list[Theta]: ...

  def save(self) -> tuple[tuple[str, ...], Any]:
    """Digests of what is saved, and what a later process is given."""

  def export(self) -> str: ...


class TimingIsland:
  """An island of which only digests are known."""

  TOKENS = 100  # in a batch

  def __init__(self, fragments: int, saved: list[str] | None):
    self._digests = list(saved) if saved else [''] * fragments
    self._staged: dict[tuple[int, m.Version], str] = {}

  def begin(self, start: m.Start) -> None:
    pass

  def step(self, step: int) -> tuple[int, float | None]:
    return self.TOKENS, None

  def capture(self, fragment: int, capture: m.CaptureId) -> None:
    pass

  def adopt(self, fragment: int, version: m.Version) -> None:
    self._digests[fragment] = self._staged.pop((fragment, version))

  def delta(
    self, fragment: int, capture: m.CaptureId
  ) -> tuple[Any, bool] | None:
    return ('delta',), True

  def forget(self, capture: m.CaptureId) -> None:
    pass

  def stage(self, action: a.Stage, value: Any) -> bool:
    if value != ('theta', action.digest):
      return False
    self._staged[action.fragment, action.version] = action.digest
    return True

  def seeds(self) -> Sequence[Any]:
    return [('theta', _START.format(p)) for p in range(len(self._digests))]

  def anchor(self, fragment: int) -> Any:
    return 'theta', self._digests[fragment]

  def donation(self) -> tuple[str, Any]:
    return 'inner', ('inner', 'inner')

  def take_donation(self, digest: str, value: Any) -> bool:
    return value == ('inner', digest)

  def save(self) -> Any:
    return tuple(self._digests)


class TimingSyncer:
  """A syncer of which only digests are known."""

  def __init__(self, fragments: int, saved: tuple[str, ...] | None):
    self._saved = saved
    self._digests = [_START.format(p) for p in range(fragments)]
    self._aside: dict[int, str] = {}

  def _theta(self, fragment: int) -> Theta:
    digest = self._digests[fragment]
    return Theta(digest, digest, ('theta', digest))

  def _all(self) -> list[Theta]:
    return [self._theta(p) for p in range(len(self._digests))]

  def seed(self, values: Sequence[Any] | None) -> list[Theta]:
    return self._all()

  def inspect(self, fragment: int, value: Any) -> tuple[str, float]:
    if value[0] == 'delta':
      return '', 1.0
    if value[:2] == ('spoiled', 'outlier'):
      return '', 1e6
    return (
      'nonfinite' if value[:2] == ('spoiled', 'nonfinite') else 'shape'
    ), 0.0

  def merge(self, action: a.Merge, values: Sequence[Any]) -> Theta:
    version = action.version
    self._digests[action.fragment] = (
      f'd{action.fragment}-{version.incarnation}-{version.merges}'
    )
    return self._theta(action.fragment)

  def take_anchor(self, action: a.TakeAnchor, value: Any) -> bool:
    if value != ('theta', action.digest):
      return False
    self._aside[action.fragment] = action.digest
    return True

  def restore(self, orders: Sequence[a.RestoreOrder]) -> list[Theta]:
    for order in orders:
      if order.source == a.ANCHOR:
        self._digests[order.fragment] = self._aside.pop(order.fragment)
      elif order.source == a.SNAPSHOT:
        assert self._saved is not None
        self._digests[order.fragment] = self._saved[order.fragment]
      else:
        self._digests[order.fragment] = _START.format(order.fragment)
    return self._all()

  def save(self) -> tuple[tuple[str, ...], Any]:
    return tuple(self._digests), tuple(self._digests)

  def export(self) -> str:
    return '/'.join(self._digests)
