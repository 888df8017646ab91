"""The transport between threads of one process.

Messages go through the same records as on the wire, so that both transports
refuse the same things; payloads are copied, as a wire would.
"""

import hmac
import threading

import numpy as np

from diloco_jax.protocol import messages as m
from diloco_jax.protocol import records
from diloco_jax.transport import base

HEADER_BYTES = 24  # counted for a message, as on the wire


class Hub:
  """A server and its clients."""

  def __init__(self, token: str, options: base.TransportOptions | None = None):
    if not token:
      raise ValueError('a token is required')
    self.token = token
    self._options = options or base.TransportOptions()
    # One for all ends: a link is made and broken at both of them at once.
    self._lock = threading.Lock()
    self._clients = 0
    self._server = _Endpoint(self._options, m.TO_ISLAND, self._lock)

  def server(self) -> base.Endpoint:
    return self._server

  def connect(self, token: str) -> base.Endpoint:
    """A client; one with a wrong token gets nothing but TokenRefused."""
    client = _Endpoint(self._options, m.TO_SYNCER, self._lock)
    if not hmac.compare_digest(token.encode(), self.token.encode()):
      client.inbox.put(base.TokenRefused(base.SYNCER))
      return client
    with self._lock:
      if not self._server.closed:
        self._clients += 1
        name = f'c{self._clients}'
        self._server.link(name, client, base.SYNCER)
        client.link(base.SYNCER, self._server, name)
    return client


def _nbytes(payload: base.Payload | None) -> int:
  return HEADER_BYTES + (0 if payload is None else payload.nbytes)


class _Endpoint:
  """One end, linked to others by name."""

  def __init__(
    self,
    options: base.TransportOptions,
    sends: tuple[type, ...],
    lock: threading.Lock,
  ):
    self._options = options
    self._sends = sends
    self.inbox = base.Inbox(options.queue_max, options.inflight_bytes_max)
    self.closed = False
    self._lock = lock
    self._links: dict[str, tuple[_Endpoint, str]] = {}
    self._bytes_in = 0
    self._bytes_out = 0

  def link(self, name: str, other: '_Endpoint', our_name: str) -> None:
    """With the lock held."""
    self._links[name] = (other, our_name)
    self.inbox.put(base.PeerUp(name))

  def send(
    self,
    peer: str,
    message: m.Message,
    payload: base.Payload | None = None,
    priority: int = 0,
  ) -> bool:
    """See base.Endpoint; nothing queues here, so priority has no effect."""
    del priority
    if not isinstance(message, self._sends):
      raise ValueError(f'{type(message).__name__} goes the other way')
    base.check_payload(message, payload)
    message = records.message_from_plain(records.to_plain(message))
    if payload is not None:
      if payload.nbytes > self._options.payload_bytes_max:
        return False
      payload = base.Payload(
        payload.kind, tuple(np.array(x) for x in payload.buffers)
      )
    with self._lock:
      link = self._links.get(peer)
      if link is None:
        return False
      other, our_name = link
      if not other._deliver(our_name, message, payload):
        return False
      self._bytes_out += _nbytes(payload)
      return True

  def _deliver(
    self, peer: str, message: m.Message, payload: base.Payload | None
  ) -> bool:
    """With the lock held."""
    nbytes = _nbytes(payload)
    item = base.Delivery(peer, message, payload)
    if not self.inbox.offer_message(item, nbytes):
      return False
    self._bytes_in += nbytes
    return True

  def receive(self, timeout_s: float | None) -> list[base.Incoming]:
    return self.inbox.take(timeout_s)

  def wake(self) -> None:
    self.inbox.wake()

  def disconnect(self, peer: str) -> None:
    with self._lock:
      self._unlink(peer)

  def _unlink(self, peer: str) -> None:
    """With the lock held."""
    if peer not in self._links:
      return
    other, our_name = self._links.pop(peer)
    del other._links[our_name]
    self.inbox.put(base.PeerDown(peer, 'closed here'))
    other.inbox.put(base.PeerDown(our_name, 'closed by the peer'))

  def traffic(self) -> base.Traffic:
    with self._lock:
      return base.Traffic(self._bytes_in, self._bytes_out)

  def close(self) -> None:
    with self._lock:
      self.closed = True
      for peer in list(self._links):
        self._unlink(peer)
    self.inbox.close()
