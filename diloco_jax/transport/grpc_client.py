"""An island's end of the gRPC transport."""

import random
import threading
import time
from typing import Any
import uuid

import grpc

from diloco_jax.protocol import messages as m
from diloco_jax.transport import base
from diloco_jax.transport import frames
from diloco_jax.transport import grpc_peer
from diloco_jax.transport import grpc_settings
from diloco_jax.transport.grpc_settings import STREAMS

WATCH_EVERY_S = 1.0
CLOSE_S = 5.0  # for a closing end, to wait for a server that takes nothing
DETAILS_MAX = 200  # characters


class ClientEndpoint:
  """An island's end: kept connected until closed. Made by `grpc.connect`."""

  def __init__(
    self,
    address: str,
    token: str,
    options: base.TransportOptions,
    rng: random.Random,
  ):
    self._address = address
    self._token = token
    self._options = options
    self._rng = rng
    self._credentials = grpc_settings.client_credentials(options)
    self._inbox = base.Inbox(options.queue_max, options.inflight_bytes_max)
    self._changed = threading.Condition()  # of all that follows
    self._peer: grpc_peer.Peer | None = None  # the connection that is up
    self._traffic_gone = base.Traffic(0, 0)
    self._closing = False
    self._refused = False  # the token
    self._trouble = 'no answer yet'
    self._pool = frames.Pool()
    self._keeper = grpc_peer.start('transport', self._keep_connected)

  @property
  def trouble(self) -> str:
    """Why there is no connection, as far as known; '' if there is one."""
    with self._changed:
      return self._trouble if self._peer is None else ''

  def _keep_connected(self) -> None:
    """Connect, wait for the end, try again with back-off and jitter."""
    backoff = self._options.backoff_first_s
    while True:
      began = time.monotonic()
      self._connection()
      if time.monotonic() - began > self._options.backoff_max_s:
        backoff = self._options.backoff_first_s
      with self._changed:
        if self._refused:
          self._inbox.put(base.TokenRefused(base.SYNCER))
          return
        wait_s = backoff * self._rng.uniform(0.5, 1.5)
        if self._changed.wait_for(lambda: self._closing, wait_s):
          return
      backoff = min(2 * backoff, self._options.backoff_max_s)

  def _channel(self) -> Any:
    options = grpc_settings.channel_options(self._options, is_server=False)
    if self._credentials is None:
      return grpc.insecure_channel(self._address, options)
    return grpc.secure_channel(self._address, self._credentials, options)

  def _connection(self) -> None:
    """One connection, from its beginning to its end."""
    peer = grpc_peer.Peer(base.SYNCER, self._options)
    channels = {stream: self._channel() for stream in STREAMS}
    metadata = (
      (grpc_settings.TOKEN, self._token.encode()),
      (grpc_settings.SESSION, uuid.uuid4().hex),
    )
    calls = {}
    readers = []
    for stream, channel in channels.items():
      method = channel.stream_stream(f'/{grpc_settings.SERVICE}/{stream}')
      calls[stream] = method(peer.outboxes[stream], metadata=metadata)
      readers.append(
        grpc_peer.start(
          'transport stream', self._read, peer, stream, calls[stream]
        )
      )
    if self._wait_until_up(peer):
      self._wait_for_end(peer)
    self._drop(peer)
    for call in calls.values():
      call.cancel()
    for reader in readers:
      reader.join()
    for channel in channels.values():
      channel.close()

  def _wait_until_up(self, peer: grpc_peer.Peer) -> bool:
    def is_up() -> bool:
      return len(peer.open) == len(STREAMS)

    with self._changed:
      self._changed.wait_for(
        lambda: is_up() or peer.over or self._closing,
        self._options.connect_timeout_s,
      )
      if not is_up() or peer.over or self._closing:
        return False
      self._inbox.put(base.PeerUp(base.SYNCER))
      self._peer = peer
      self._changed.notify_all()
      return True

  def _wait_for_end(self, peer: grpc_peer.Peer) -> None:
    with self._changed:
      while not peer.over and not self._closing:
        trouble = peer.trouble()
        if trouble:
          peer.reason, peer.failed = trouble, True
          return
        self._changed.wait(WATCH_EVERY_S)
      if self._closing:
        peer.end()
        before, sent = -1, peer.traffic().bytes_out
        while not peer.over and sent > before:
          self._changed.wait_for(lambda: peer.over, CLOSE_S)
          before, sent = sent, peer.traffic().bytes_out

  def _drop(self, peer: grpc_peer.Peer) -> None:
    with self._changed:
      was_up = self._peer is peer
      self._peer = None
      self._trouble = peer.reason or 'no answer'
      peer.gone = True
      self._traffic_gone = grpc_peer.add(self._traffic_gone, peer.traffic())
      if was_up:
        reason = peer.reason or 'closed here'
        self._inbox.put(base.PeerDown(base.SYNCER, reason))
      self._changed.notify_all()
    peer.close()

  def _read(self, peer: grpc_peer.Peer, stream: str, call: Any) -> None:
    """One stream, from its beginning to its end."""
    parser = frames.Parser(
      base.SYNCER, m.TO_ISLAND, self._options.payload_bytes_max, self._pool
    )
    try:
      if grpc_settings.ACCEPTED not in map(tuple, call.initial_metadata()):
        call.code()  # in the end there is one
        raise call
      with self._changed:
        peer.open.add(stream)
        self._changed.notify_all()
        self._changed.wait_for(
          lambda: self._peer is peer or peer.gone or not call.is_active()
        )
      for frame in call:
        peer.read(stream, frame, parser, self._inbox)
    except frames.FrameError as e:
      self._ended(peer, stream, f'bad frame: {e}', failed=True)
    except MemoryError as e:
      self._ended(peer, stream, f'no memory: {e}', failed=True)
    except grpc.RpcError as error:
      with self._changed:
        self._refused |= error.code() == grpc.StatusCode.UNAUTHENTICATED
      self._ended(peer, stream, _reason(error), failed=True)
    else:
      self._ended(peer, stream, 'closed by the syncer')

  def _ended(
    self, peer: grpc_peer.Peer, stream: str, reason: str, failed: bool = False
  ) -> None:
    with self._changed:
      if not peer.reason or (failed and not peer.failed):
        peer.reason = reason
      peer.failed |= failed
      peer.ended.add(stream)
      self._changed.notify_all()

  # The interface.

  def send(
    self,
    peer: str,
    message: m.Message,
    payload: base.Payload | None = None,
    priority: int = 0,
  ) -> bool:
    """See base.Endpoint."""
    grpc_peer.check(message, payload, priority, m.TO_SYNCER)
    with self._changed:
      known = self._peer
    if known is None or peer != base.SYNCER:
      return False
    return known.send(message, payload, priority)

  def receive(self, timeout_s: float | None) -> list[base.Incoming]:
    return self._inbox.take(timeout_s)

  def wake(self) -> None:
    self._inbox.wake()

  def disconnect(self, peer: str) -> None:
    with self._changed:
      known = self._peer
    if known is not None and peer == base.SYNCER:
      known.end()

  def traffic(self) -> base.Traffic:
    with self._changed:
      if self._peer is None:
        return self._traffic_gone
      return grpc_peer.add(self._traffic_gone, self._peer.traffic())

  def close(self) -> None:
    with self._changed:
      self._closing = True
      self._changed.notify_all()
    self._keeper.join()
    self._inbox.close()


def _reason(error: Any) -> str:
  """What a failed call says, on one line."""
  details = ' '.join((error.details() or '').split())[:DETAILS_MAX]
  if error.code() == grpc.StatusCode.ABORTED:
    return f'dropped by the peer: {details}'
  return f'connection lost: {error.code().name}: {details}'
