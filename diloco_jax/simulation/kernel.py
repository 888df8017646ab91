"""An event heap, a virtual clock and named random streams."""

from collections.abc import Callable
import hashlib
import heapq
import random


class Kernel:
  """Runs callbacks in the order of virtual time.

  Two callbacks at one time run in the order in which they were scheduled, so
  that a seed determines everything.
  """

  def __init__(self, seed: int):
    self._seed = seed
    self._heap: list[tuple[float, int, Callable[[], None]]] = []
    self._count = 0
    self.now = 0.0

  def stream(self, name: str) -> random.Random:
    """A random stream of its own for each purpose.

    A new consumer does not shift the numbers that the others draw.
    """
    digest = hashlib.sha256(f'{self._seed}/{name}'.encode()).digest()
    return random.Random(int.from_bytes(digest[:8]))

  def at(self, time: float, callback: Callable[[], None]) -> None:
    """Schedule a callback; a time in the past means now."""
    self._count += 1
    heapq.heappush(self._heap, (max(time, self.now), self._count, callback))

  def after(self, delay: float, callback: Callable[[], None]) -> None:
    self.at(self.now + delay, callback)

  def run(self, until: float, events_max: int = 10_000_000) -> int:
    """Run until the heap is empty or the clock reaches `until`.

    Returns:
      The number of callbacks that ran.

    Raises:
      RuntimeError: after events_max callbacks, so that no test hangs.
    """
    ran = 0
    while self._heap and self._heap[0][0] <= until:
      self.now, _, callback = heapq.heappop(self._heap)
      callback()
      ran += 1
      if ran > events_max:
        raise RuntimeError(f'more than {events_max} events')
    return ran
