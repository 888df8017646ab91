"""What waits to be sent on one stream to one peer."""

from collections.abc import Iterator
import heapq
import itertools
import threading
import time


class Outbox:
  """Frames in the order of priority, then of arrival; bounded.

  Iterating hands out frames and waits for more; it ends when the outbox is
  closed. Between two chunks of a message one of a higher priority may pass.
  """

  def __init__(self, queue_max: int, bytes_max: int):
    self._queue_max = queue_max
    self._bytes_max = bytes_max
    self._heap: list[tuple[int, int, Iterator[bytes], int]] = []
    self._numbers = itertools.count(1)
    self._changed = threading.Condition()
    self._queued_bytes = 0
    self._ending = False  # after what is queued
    self._last = b''  # after all else
    self._closed = False
    self._moved_at = time.monotonic()
    self.bytes_out = 0

  def next_number(self) -> int:
    """A number for a message, of which chunks will speak."""
    return next(self._numbers) & 0xFFFFFFFF

  def put(self, frames: Iterator[bytes], nbytes: int, priority: int) -> bool:
    """Queue a message; False where a bound is reached or it is closed."""
    with self._changed:
      full = (
        len(self._heap) >= self._queue_max
        or self._queued_bytes + nbytes > self._bytes_max
      )
      if full or self._ending or self._closed:
        return False
      if not self._heap:
        self._moved_at = time.monotonic()
      order = next(self._numbers)
      heapq.heappush(self._heap, (priority, order, frames, nbytes))
      self._queued_bytes += nbytes
      self._changed.notify_all()
      return True

  def __iter__(self) -> Iterator[bytes]:
    return self

  def __next__(self) -> bytes:
    while True:
      with self._changed:
        while not self._heap and not self._ending and not self._closed:
          self._changed.wait()
        if self._last and not self._heap and not self._closed:
          last, self._last = self._last, b''
          return last
        if self._closed or not self._heap:
          self._closed = True
          self._changed.notify_all()
          raise StopIteration
        _, order, frames, nbytes = self._heap[0]
        self._moved_at = time.monotonic()
      # Making a frame copies and checks its bytes; not under the lock.
      frame = next(frames, None)
      if frame is not None:
        self.bytes_out += len(frame)
        return frame
      with self._changed:
        self._queued_bytes -= nbytes
        if self._heap and self._heap[0][1] == order:
          heapq.heappop(self._heap)
        else:  # passed by one of a higher priority, or closed meanwhile
          self._heap = [x for x in self._heap if x[1] != order]
          heapq.heapify(self._heap)

  def stalled_s(self) -> float:
    """How long nothing has moved although something waits."""
    with self._changed:
      if not self._heap or self._closed:
        return 0.0
      return time.monotonic() - self._moved_at

  def end(self, last: bytes = b'') -> None:
    """Close after what is queued, and a last frame, which is not counted."""
    with self._changed:
      if not self._ending:
        self._ending = True
        self._last = last
      self._changed.notify_all()

  def close(self) -> None:
    """Close at once; what is queued is dropped."""
    with self._changed:
      self._closed = True
      self._heap.clear()
      self._changed.notify_all()
