"""The transport between threads of one process.

Messages go through the same records as on the wire, so that both transports
refuse the same things; payloads are copied, as a wire would.
"""

import hmac
import threading

from diloco_jax.protocol import messages as m
from diloco_jax.protocol import records
from diloco_jax.transport import base
import numpy as np

HEADER_BYTES = 24  # counted for a message, as on the wire


class Hub:
  """A server and its clients."""

  def __init__(
    self, token: str, options: base.TransportOptions | None = None
  ):
    self.token = token
    self._options = options or base.TransportOptions()
    self._lock = threading.Lock()
    self._clients = 0
    self._server = _Endpoint(self._options, m.TO_SYNCER)

  def server(self) -> base.Endpoint:
    return self._server

  def connect(self, token: str) -> base.Endpoint:
    """A client; one with a wrong token gets nothing but TokenRefused."""
    client = _Endpoint(self._options, m.TO_ISLAND)
    if not hmac.compare_digest(token.encode(), self.token.encode()):
      client.inbox.put(base.TokenRefused(base.SYNCER))
      return client
    with self._lock:
      self._clients += 1
      name = f'c{self._clients}'
    self._server.link(name, client, base.SYNCER)
    client.link(base.SYNCER, self._server, name)
    return client


class _Endpoint:
  """One end, linked to others by name."""

  def __init__(
    self, options: base.TransportOptions, allowed: tuple[type, ...]
  ):
    self._options = options
    self._allowed = allowed
    # Bounded per peer, in `deliver`: a sender may not be made to wait here.
    self.inbox = base.Inbox(1 << 62)
    self._lock = threading.Lock()
    self._links: dict[str, tuple[_Endpoint, str]] = {}
    self._held: dict[str, tuple[int, int]] = {}  # peer -> messages, bytes
    self._bytes_in = 0
    self._bytes_out = 0
    self._closed = False

  def link(self, name: str, other: '_Endpoint', our_name: str) -> None:
    with self._lock:
      if self._closed:
        return
      self._links[name] = (other, our_name)
      self._held[name] = (0, 0)
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
    assert (payload is not None) == isinstance(message, m.BULK)
    with self._lock:
      link = self._links.get(peer)
    if link is None:
      return False
    other, our_name = link
    if not isinstance(message, other._allowed):
      raise ValueError(f'{type(message).__name__} goes the other way')
    message = records.message_from_plain(records.to_plain(message))
    nbytes = HEADER_BYTES
    if payload is not None:
      if payload.nbytes > self._options.message_bytes_max:
        return False
      nbytes += payload.nbytes
      payload = base.Payload(
        payload.kind, tuple(np.array(x) for x in payload.buffers)
      )
    if not other.deliver(our_name, message, payload, nbytes):
      return False
    with self._lock:
      self._bytes_out += nbytes
    return True

  def deliver(
    self,
    peer: str,
    message: m.Message,
    payload: base.Payload | None,
    nbytes: int,
  ) -> bool:
    with self._lock:
      if peer not in self._held or self._closed:
        return False
      count, held = self._held[peer]
      if (
        count >= self._options.queue_max
        or held + nbytes > self._options.inflight_bytes_max
      ):
        return False
      self._held[peer] = (count + 1, held + nbytes)
      self._bytes_in += nbytes
    self.inbox.put(base.Delivery(peer, message, payload))
    return True

  def receive(self, timeout_s: float | None) -> list[base.Incoming]:
    items = self.inbox.take(timeout_s)
    with self._lock:
      for peer in self._held:
        self._held[peer] = (0, 0)
    return items

  def wake(self) -> None:
    self.inbox.wake()

  def disconnect(self, peer: str) -> None:
    self._unlink(peer, 'closed here')

  def _unlink(self, peer: str, reason: str) -> None:
    with self._lock:
      link = self._links.pop(peer, None)
      self._held.pop(peer, None)
    if link is None:
      return
    self.inbox.put(base.PeerDown(peer, reason))
    other, our_name = link
    other._unlink(our_name, 'closed by the peer')

  def traffic(self) -> base.Traffic:
    with self._lock:
      return base.Traffic(self._bytes_in, self._bytes_out)

  def close(self) -> None:
    with self._lock:
      self._closed = True
      peers = list(self._links)
    for peer in peers:
      self._unlink(peer, 'closed here')
    self.inbox.close()
