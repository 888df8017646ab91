"""The syncer's end of the gRPC transport."""

from collections.abc import Callable, Iterator
import concurrent.futures
import hmac
import logging
import threading
import time
from typing import Any

import grpc

from diloco_jax.errors import Problem
from diloco_jax.errors import UserError
from diloco_jax.protocol import messages as m
from diloco_jax.transport import base
from diloco_jax.transport import frames
from diloco_jax.transport import grpc_peer
from diloco_jax.transport import grpc_settings
from diloco_jax.transport.grpc_settings import STREAMS

PEERS_MAX = 256
SESSION_MAX = 64  # characters
LOOPBACK = ('127.0.0.1', '[::1]', 'localhost')
WATCH_EVERY_S = 1.0
CLOSE_S = 5.0  # for a closing end, to wait for peers that take nothing
CANCEL_S = 1.0  # for calls that are over to end by themselves


class _Threads(concurrent.futures.Executor):
  """A thread for each stream; none of them holds up the end of the process."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._running: set[threading.Thread] = set()

  def submit(  # type: ignore[override]
    self, fn: Callable[..., Any], /, *args: Any
  ) -> concurrent.futures.Future[Any]:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
      try:
        future.set_result(fn(*args))
      except BaseException as e:
        future.set_exception(e)
      with self._lock:
        self._running.discard(threading.current_thread())

    with self._lock:
      self._running.add(grpc_peer.start('transport stream', run))
    return future

  def join(self, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    with self._lock:
      running = list(self._running)
    for thread in running:
      thread.join(max(0.0, deadline - time.monotonic()))


class _Session(grpc_peer.Peer):
  """A peer, and the name that its two streams share."""

  def __init__(self, name: str, key: str, options: base.TransportOptions):
    super().__init__(name, options)
    self.key = key
    self.since = time.monotonic()
    self.whole = threading.Event()  # both streams are here, or it is gone
    self.fault = ''  # what it is told, where it is dropped for something
    self.contexts: list[Any] = []
    self.went: set[str] = set()  # streams on which all has been sent


class ServerEndpoint:
  """The syncer's end. Made by `grpc.serve`."""

  def __init__(self, address: str, token: str, options: base.TransportOptions):
    if not token:
      raise ValueError('a token is required')
    self._options = options
    self._token = token.encode()
    self._inbox = base.Inbox(options.queue_max, options.inflight_bytes_max)
    self._lock = threading.Lock()
    self._peers: dict[str, _Session] = {}
    self._sessions: dict[str, _Session] = {}  # by key
    self._names = 0
    self._traffic_gone = base.Traffic(0, 0)  # of peers that are gone
    self._closing = threading.Event()
    self._changed = threading.Condition(self._lock)  # a peer is gone
    self._dropped: list[_Session] = []  # since the watcher last looked
    self._pool = frames.Pool()
    self._threads = _Threads()
    self._server = grpc.server(
      self._threads,
      options=grpc_settings.channel_options(options, is_server=True),
      maximum_concurrent_rpcs=2 * PEERS_MAX,
    )
    handlers = {stream: self._handler(stream) for stream in STREAMS}
    self._server.add_generic_rpc_handlers(
      [grpc.method_handlers_generic_handler(grpc_settings.SERVICE, handlers)]
    )
    self.address = self._bind(address)
    self._server.start()
    self._watcher = grpc_peer.start('transport watch', self._watch)

  def _bind(self, address: str) -> str:
    credentials = grpc_settings.server_credentials(self._options)
    host, _, number = address.rpartition(':')
    # gRPC would take a port modulo 2**16.
    if not (host and number.isdecimal() and int(number) < 1 << 16):
      raise UserError(
        [
          Problem(
            f'launch.address and launch.port: {address}',
            'not an address and a port',
            'HOST:PORT, with a port below 65536',
            '',
          )
        ]
      )
    if credentials is None and host not in LOOPBACK:
      logging.warning('%s without TLS: token and data can be read', address)
    try:
      if credentials is None:
        port = self._server.add_insecure_port(address)
      else:
        port = self._server.add_secure_port(address, credentials)
    except RuntimeError:
      port = 0
    if not port:
      self._server.stop(None)
      raise UserError(
        [
          Problem(
            f'launch.address and launch.port: {address}',
            'this address cannot be listened on: the port is in use, or it is '
            'not an address of this machine',
            'a free port',
            'choose another launch.port, or 0 for any free one',
          )
        ]
      )
    return f'{host}:{port}'

  # One stream of one peer.

  def _handler(self, stream: str) -> Any:
    def handle(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
      peer = self._admit(stream, context)
      self._threads.submit(self._read, peer, stream, requests)
      yield from peer.outboxes[stream]
      if peer.fault:
        context.abort(grpc.StatusCode.ABORTED, peer.fault)
      peer.went.add(stream)

    return grpc.stream_stream_rpc_method_handler(handle)

  def _admit(self, stream: str, context: Any) -> _Session:
    """Check the token; the two streams of a session make one peer."""
    metadata = dict(context.invocation_metadata())
    token = bytes(metadata.get(grpc_settings.TOKEN, b''))
    key = str(metadata.get(grpc_settings.SESSION, ''))
    if not hmac.compare_digest(token, self._token):
      logging.warning('%s showed a wrong token, or none', context.peer())
      context.abort(grpc.StatusCode.UNAUTHENTICATED, 'token refused')
    if not 0 < len(key) <= SESSION_MAX:
      context.abort(grpc.StatusCode.INVALID_ARGUMENT, 'no session')
    peer = self._enter(stream, key, context)
    if peer is None:
      context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, 'no place left')
      raise AssertionError  # abort has raised

    def on_end() -> None:
      if stream in peer.went:
        self._stream_ended(peer, stream, 'closed here')
      else:
        self._drop(peer, 'connection lost')

    if not context.add_callback(on_end):
      on_end()
    context.send_initial_metadata((grpc_settings.ACCEPTED,))
    return peer

  def _enter(self, stream: str, key: str, context: Any) -> _Session | None:
    with self._lock:
      peer = self._sessions.get(key)
      if peer is None:
        if len(self._peers) >= PEERS_MAX or self._closing.is_set():
          return None
        self._names += 1
        peer = _Session(f'c{self._names}', key, self._options)
        self._sessions[key] = self._peers[peer.name] = peer
      if stream in peer.open:
        return None
      peer.open.add(stream)
      peer.contexts.append(context)
      if len(peer.open) == len(STREAMS):
        self._inbox.put(base.PeerUp(peer.name))
        peer.whole.set()
      return peer

  def _read(
    self, peer: _Session, stream: str, requests: Iterator[bytes]
  ) -> None:
    parser = frames.Parser(
      peer.name, m.TO_SYNCER, self._options.payload_bytes_max, self._pool
    )
    peer.whole.wait()
    while not peer.gone:
      try:
        frame = next(requests, None)
      except Exception:  # gRPC raises a bare Exception when a call is over
        self._drop(peer, 'connection lost')
        return
      if frame is None:
        if parser.is_ended or stream in peer.went:
          self._stream_ended(peer, stream, 'closed by the peer')
        else:
          self._drop(peer, 'connection lost')
        return
      try:
        peer.read(stream, frame, parser, self._inbox)
      except (frames.FrameError, MemoryError) as e:
        self._drop(peer, f'bad frame: {e}', is_fault=True)
        return

  def _stream_ended(self, peer: _Session, stream: str, reason: str) -> None:
    """The other stream may still have something to carry."""
    with self._lock:
      peer.reason = peer.reason or reason
      peer.ended.add(stream)
      both = len(peer.ended) == len(STREAMS)
    if both:
      self._drop(peer, peer.reason)

  def _drop(self, peer: _Session, reason: str, is_fault: bool = False) -> None:
    with self._lock:
      if peer.gone:
        return
      peer.gone = True
      peer.fault = reason if is_fault else ''
      self._dropped.append(peer)
      del self._peers[peer.name], self._sessions[peer.key]
      self._traffic_gone = grpc_peer.add(self._traffic_gone, peer.traffic())
      if peer.whole.is_set():
        self._inbox.put(base.PeerDown(peer.name, reason))
      self._changed.notify_all()
    peer.whole.set()
    peer.close()

  def _watch(self) -> None:
    """Give up streams that do not move, and halves of connections."""
    ending: list[_Session] = []
    while not self._closing.wait(WATCH_EVERY_S):
      # The calls of one that is gone end by themselves, unless it takes
      # nothing of what was handed to gRPC.
      for context in [x for peer in ending for x in peer.contexts]:
        context.cancel()
      with self._lock:
        peers = list(self._peers.values())
        ending, self._dropped = self._dropped, []
      for peer in peers:
        trouble = peer.trouble()
        age = time.monotonic() - peer.since
        if trouble:
          self._drop(peer, trouble, is_fault=True)
        elif not peer.whole.is_set() and age > self._options.connect_timeout_s:
          self._drop(peer, 'only half a connection', is_fault=True)

  # The interface.

  def send(
    self,
    peer: str,
    message: m.Message,
    payload: base.Payload | None = None,
    priority: int = 0,
  ) -> bool:
    """See base.Endpoint."""
    grpc_peer.check(message, payload, priority, m.TO_ISLAND)
    with self._lock:
      known = self._peers.get(peer)
    if known is None or not known.whole.is_set():
      return False
    return known.send(message, payload, priority)

  def receive(self, timeout_s: float | None) -> list[base.Incoming]:
    return self._inbox.take(timeout_s)

  def wake(self) -> None:
    self._inbox.wake()

  def disconnect(self, peer: str) -> None:
    with self._lock:
      known = self._peers.get(peer)
    if known is not None:
      known.end()

  def traffic(self) -> base.Traffic:
    with self._lock:
      total = self._traffic_gone
      for peer in self._peers.values():
        total = grpc_peer.add(total, peer.traffic())
      return total

  def close(self) -> None:
    with self._lock:
      if self._closing.is_set():
        return
      self._closing.set()
      peers = list(self._peers.values())
    for peer in peers:
      peer.end()
    # Handlers end when their outboxes are empty; then their readers do.
    before, sent = -1, self.traffic().bytes_out
    while self._peers and sent > before:
      with self._changed:
        self._changed.wait_for(lambda: not self._peers, CLOSE_S)
      before, sent = sent, self.traffic().bytes_out
    self._server.stop(CANCEL_S).wait()
    for peer in peers:
      self._drop(peer, 'closed here')
    self._inbox.close()
    self._threads.join(CLOSE_S)
    self._watcher.join()
