"""What every transport offers, and the bounds that it keeps.

A payload is a list of byte buffers with the name of a codec. Control messages
(without payload) and bulk (with one) travel apart: control never waits behind
bulk. Order is kept among control messages, and among bulk of one priority.
"""

from collections import deque
from collections.abc import Callable
import dataclasses
import threading
import time
from typing import NamedTuple, Protocol

import numpy as np

from diloco_jax.protocol import messages as m

SYNCER = 'syncer'  # the only peer of a client
KIND_MAX = 32  # characters in the name of a codec
BUFFERS_MAX = 1 << 16  # of a payload


class Payload(NamedTuple):
  """Bytes that belong to a message.

  Who sends it may not change the bytes afterwards: they are read as the
  stream takes them. Received buffers belong to the receiver, and their memory
  is used again when nothing refers to any part of it.
  """

  kind: str  # the codec
  buffers: tuple[np.ndarray, ...]  # [n] uint8 each, contiguous

  @property
  def nbytes(self) -> int:
    return sum(x.nbytes for x in self.buffers)


def check_payload(message: m.Message, payload: Payload | None) -> None:
  """Raises ValueError where a payload is missing, odd, or one too many."""
  name = type(message).__name__
  if payload is None:
    if isinstance(message, m.BULK):
      raise ValueError(f'{name} without its payload')
    return
  if not isinstance(message, m.BULK):
    raise ValueError(f'{name} with a payload')
  if len(payload.kind) > KIND_MAX or len(payload.buffers) > BUFFERS_MAX:
    raise ValueError('the name of the codec or the list of buffers is long')
  for x in payload.buffers:
    if x.dtype != np.uint8 or x.ndim != 1 or not x.flags.c_contiguous:
      raise ValueError(f'buffers are [n] uint8, contiguous; got {x.dtype}')


class Delivery(NamedTuple):
  """A message has arrived, whole."""

  peer: str
  message: m.Message
  payload: Payload | None


class PeerUp(NamedTuple):
  """A connection is there."""

  peer: str


class PeerDown(NamedTuple):
  """A connection is gone; what was on its way may be lost."""

  peer: str
  reason: str


class TokenRefused(NamedTuple):
  """The server does not take this token. Final: it is not tried again."""

  peer: str


Incoming = Delivery | PeerUp | PeerDown | TokenRefused


class Traffic(NamedTuple):
  """Bytes counted at the transport, headers included."""

  bytes_in: int
  bytes_out: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransportOptions:
  """Bounds and times of a transport."""

  chunk_bytes: int = 1 << 20  # of a payload in one frame, up to 16 MiB
  message_bytes_max: int = 1 << 34  # a larger payload is refused
  # Of one peer, queued for it or not yet received from it.
  inflight_bytes_max: int = 1 << 34
  queue_max: int = 4096  # messages
  connect_timeout_s: float = 10.0
  deadline_s: float = 60.0  # a stream that does not move is given up
  backoff_first_s: float = 0.1  # before connecting again; doubles
  backoff_max_s: float = 5.0
  keepalive_s: float = 10.0  # a silent peer is asked for a sign of life
  tls_cert: str = ''  # PEM files; with any of them, nothing goes without TLS
  tls_key: str = ''
  tls_ca: str = ''
  mutual_tls: bool = False  # the server wants to see certificates too

  @property
  def payload_bytes_max(self) -> int:
    """The largest payload within both bounds."""
    return min(self.message_bytes_max, self.inflight_bytes_max)

  def __post_init__(self) -> None:
    for name, value in dataclasses.asdict(self).items():
      if type(value) in (int, float) and not value > 0:
        raise ValueError(f'{name}={value}, expected more than 0')


class Endpoint(Protocol):
  """One end of any number of connections; thread-safe.

  What comes from a peer stands between its PeerUp and its PeerDown.
  """

  def send(
    self,
    peer: str,
    message: m.Message,
    payload: Payload | None = None,
    priority: int = 0,
  ) -> bool:
    """Queue a message; never blocks.

    False: not queued, because the peer is unknown or gone or a bound is
    reached. True is no promise that it arrives.

    Args:
      peer: who gets it.
      message: of a kind that goes this way.
      payload: for the kinds that carry one, and only for them.
      priority: of a payload, 0 or 1; 1 waits while there is any 0.

    Raises:
      ValueError: a message or payload that may not be sent to anybody.
    """
    ...

  def receive(self, timeout_s: float | None) -> list[Incoming]:
    """What has come; waits for the first up to timeout_s, None for ever."""
    ...

  def wake(self) -> None:
    """Make a running or the next `receive` return."""
    ...

  def disconnect(self, peer: str) -> None:
    """Close a connection, after what was sent.

    A client over gRPC connects again, until it is closed.
    """
    ...

  def traffic(self) -> Traffic: ...

  def close(self) -> None:
    """Close everything, after what was sent; ends all threads."""
    ...


class Inbox:
  """What has arrived at an endpoint and was not received yet.

  Whoever puts a message beyond the bounds of its peer waits, which stops the
  reading of its stream, and so the sender. Control and bulk have bounds of
  their own, so that bulk that nobody takes does not stop control. One message
  has room in any case.
  """

  def __init__(self, messages_max: int, bytes_max: int):
    self._messages_max = messages_max
    self._bytes_max = bytes_max
    self._items: deque[Incoming] = deque()
    # (peer, is bulk) -> messages, bytes
    self._held: dict[tuple[str, bool], tuple[int, int]] = {}
    self._changed = threading.Condition()
    self._woken = False
    self._closed = False

  def put(self, item: PeerUp | PeerDown | TokenRefused) -> None:
    with self._changed:
      self._items.append(item)
      self._changed.notify_all()

  def put_message(
    self, item: Delivery, nbytes: int, is_gone: Callable[[], bool]
  ) -> None:
    """Wait for room and put it; not if its peer is gone meanwhile."""
    key = (item.peer, item.payload is not None)
    with self._changed:
      while not self._closed and not is_gone():
        if self._put(key, item, nbytes):
          return
        self._changed.wait()

  def offer_message(self, item: Delivery, nbytes: int) -> bool:
    """Put it if there is room now."""
    key = (item.peer, item.payload is not None)
    with self._changed:
      return self._put(key, item, nbytes)

  def _put(self, key: tuple[str, bool], item: Delivery, nbytes: int) -> bool:
    messages, held = self._held.get(key, (0, 0))
    full = messages and (
      messages >= self._messages_max or held + nbytes > self._bytes_max
    )
    if not full:
      self._held[key] = (messages + 1, held + nbytes)
      self._items.append(item)
      self._changed.notify_all()
    return not full

  def take(self, timeout_s: float | None) -> list[Incoming]:
    with self._changed:
      deadline = None if timeout_s is None else time.monotonic() + timeout_s
      while not self._items and not self._woken and not self._closed:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
          break
        self._changed.wait(left)
      self._woken = False
      items = list(self._items)
      self._items.clear()
      self._held.clear()
      self._changed.notify_all()
      return items

  def wake(self) -> None:
    with self._changed:
      self._woken = True
      self._changed.notify_all()

  def close(self) -> None:
    with self._changed:
      self._closed = True
      self._changed.notify_all()
