"""The transport between processes: two gRPC streams of raw bytes a peer.

One stream carries control, one bulk, each over a connection of its own, so
that a report never waits behind a gigabyte. No generated code: handlers take
and give frames (see `frames`). Islands open the connections, outbound only.

Threads: a client has one that keeps the connection up and one that reads
each stream, besides gRPC's own; a server has two for each stream of a peer
and one that watches for streams that do not move.
"""

from collections.abc import Callable, Iterator
import concurrent.futures
import hmac
import pathlib
import random
import threading
import time
from typing import Any
import uuid

from diloco_jax.errors import Problem
from diloco_jax.errors import UserError
from diloco_jax.protocol import messages as m
from diloco_jax.transport import base
from diloco_jax.transport import frames
from diloco_jax.transport.outbox import Outbox
import grpc

SERVICE = 'diloco_jax.Exchange'
CONTROL = 'control'
BULK = 'bulk'
STREAMS = (CONTROL, BULK)
PEERS_MAX = 256
WATCH_EVERY_S = 1.0
CLOSE_S = 5.0  # to send what is queued, when an end is closed
FRAME_SLACK = 1 << 20  # header and JSON beyond the chunk


def _channel_options(
  options: base.TransportOptions, *, is_server: bool
) -> list[tuple[str, Any]]:
  most = options.chunk_bytes + FRAME_SLACK
  keepalive_ms = int(options.keepalive_s * 1000)
  settings: list[tuple[str, Any]] = [
    ('grpc.max_send_message_length', most),
    ('grpc.max_receive_message_length', most),
    ('grpc.keepalive_time_ms', keepalive_ms),
    ('grpc.keepalive_timeout_ms', keepalive_ms),
    ('grpc.keepalive_permit_without_calls', 1),
    ('grpc.http2.max_pings_without_data', 0),
    ('grpc.http2.max_frame_size', 1 << 20),
    ('grpc.http2.lookahead_bytes', 1 << 24),
  ]
  if is_server:
    # Two servers on one port would each get half of the islands.
    settings.append(('grpc.so_reuseport', 0))
    settings.append(
      ('grpc.http2.min_ping_interval_without_data_ms', keepalive_ms // 2)
    )
  else:
    # Each stream has a connection of its own.
    settings.append(('grpc.use_local_subchannel_pool', 1))
  return settings


def _read(path: str, where: str) -> bytes | None:
  if not path:
    return None
  try:
    return pathlib.Path(path).read_bytes()
  except OSError as e:
    raise UserError(
      [Problem(where, path, 'a readable PEM file', str(e.strerror))]
    ) from e


def _server_credentials(options: base.TransportOptions) -> Any:
  where = 'launch.transport.tls'
  certificate = _read(options.tls_cert, f'{where}_cert')
  if certificate is None:
    return None
  key = _read(options.tls_key, f'{where}_key')
  authority = _read(options.tls_ca, f'{where}_ca')
  if key is None or (options.mutual_tls and authority is None):
    raise UserError(
      [
        Problem(
          f'{where}_key and {where}_ca',
          'not given',
          'PEM files for TLS; the authority too for mutual TLS',
          'give them, or leave tls_cert empty',
        )
      ]
    )
  return grpc.ssl_server_credentials(
    [(key, certificate)],
    root_certificates=authority if options.mutual_tls else None,
    require_client_auth=options.mutual_tls,
  )


def _client_credentials(options: base.TransportOptions) -> Any:
  where = 'launch.transport.tls'
  authority = _read(options.tls_ca, f'{where}_ca')
  if authority is None:
    return None
  certificate = key = None
  if options.mutual_tls:
    certificate = _read(options.tls_cert, f'{where}_cert')
    key = _read(options.tls_key, f'{where}_key')
  return grpc.ssl_channel_credentials(
    authority, private_key=key, certificate_chain=certificate
  )


class _Peer:
  """What both ends keep of one connection: an outbox for each stream."""

  def __init__(self, name: str, options: base.TransportOptions):
    self.name = name
    self.options = options
    self.outboxes = {
      stream: Outbox(options.queue_max, options.inflight_bytes_max)
      for stream in STREAMS
    }
    self.here: set[str] = set()  # streams that are connected
    self.since = time.monotonic()

  def send(
    self, message: m.Message, payload: base.Payload | None, priority: int
  ) -> bool:
    assert (payload is not None) == isinstance(message, m.BULK)
    if payload is None:
      frame = frames.control_frame(message)
      return self.outboxes[CONTROL].put(iter((frame,)), len(frame), 0)
    if payload.nbytes > self.options.message_bytes_max:
      return False
    outbox = self.outboxes[BULK]
    pieces = frames.bulk_frames(
      outbox.next_number(), message, payload, self.options.chunk_bytes
    )
    return outbox.put(pieces, payload.nbytes, priority)

  def stalled_s(self) -> float:
    return max(x.stalled_s() for x in self.outboxes.values())

  def end(self) -> None:
    for outbox in self.outboxes.values():
      outbox.end()

  def close(self) -> None:
    for outbox in self.outboxes.values():
      outbox.close()

  @property
  def bytes_out(self) -> int:
    return sum(x.bytes_out for x in self.outboxes.values())


class _Counter:
  """Bytes that have come in; several threads add."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self.total = 0

  def add(self, nbytes: int) -> None:
    with self._lock:
      self.total += nbytes


class ServerEndpoint:
  """The syncer's end. Made by `serve`."""

  def __init__(
    self, address: str, token: str, options: base.TransportOptions
  ):
    self._options = options
    self._token = token.encode()
    self._inbox = base.Inbox(options.queue_max)
    self._lock = threading.Lock()
    self._peers: dict[str, _Peer] = {}
    self._sessions: dict[str, str] = {}  # session -> peer
    self._names = 0
    self._bytes_in = _Counter()
    self._bytes_gone = 0  # sent to peers that are gone
    self._closing = threading.Event()
    self._pool = frames.Pool()
    self._executor = concurrent.futures.ThreadPoolExecutor(
      2 * PEERS_MAX, 'transport'
    )
    self._server = grpc.server(
      self._executor,
      options=_channel_options(options, is_server=True),
      maximum_concurrent_rpcs=2 * PEERS_MAX,
    )
    self._server.add_generic_rpc_handlers(
      [
        grpc.method_handlers_generic_handler(
          SERVICE,
          {stream: self._handler(stream) for stream in STREAMS},
        )
      ]
    )
    self.address = self._bind(address)
    self._server.start()
    self._watcher = threading.Thread(
      target=self._watch, name='transport watch', daemon=True
    )
    self._watcher.start()

  def _bind(self, address: str) -> str:
    credentials = _server_credentials(self._options)
    try:
      if credentials is None:
        port = self._server.add_insecure_port(address)
      else:
        port = self._server.add_secure_port(address, credentials)
    except RuntimeError:
      port = 0
    if not port:
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
    return f'{address.rsplit(":", 1)[0]}:{port}'

  def _handler(self, stream: str) -> Any:
    def handle(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
      peer = self._admit(stream, context)
      reader = threading.Thread(
        target=self._read, args=(peer, stream, requests), daemon=True
      )
      reader.start()
      yield from peer.outboxes[stream]

    return grpc.stream_stream_rpc_method_handler(handle)

  def _admit(self, stream: str, context: Any) -> _Peer:
    """Check the token; the two streams of a session make one peer."""
    metadata = dict(context.invocation_metadata())
    token = metadata.get('token', '')
    session = metadata.get('session', '')
    if not hmac.compare_digest(str(token).encode(), self._token):
      context.abort(grpc.StatusCode.UNAUTHENTICATED, 'token refused')
    with self._lock:
      name = self._sessions.get(session)
      new = name is None
      if name is None:
        if len(self._peers) >= PEERS_MAX or self._closing.is_set():
          context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, 'no place left')
        self._names += 1
        name = f'c{self._names}'
        self._sessions[session] = name
        self._peers[name] = _Peer(name, self._options)
      peer = self._peers[name]
      if stream in peer.here or not session or len(session) > 64:
        context.abort(grpc.StatusCode.ALREADY_EXISTS, 'session in use')
      peer.here.add(stream)
    context.add_callback(lambda: self._drop(name, 'connection lost'))
    if new:
      self._inbox.put(base.PeerUp(name))
    context.send_initial_metadata(())
    return peer

  def _read(self, peer: _Peer, stream: str, requests: Iterator[bytes]) -> None:
    reason = 'closed by the peer'
    parser = frames.Parser(
      peer.name, m.TO_SYNCER, self._options.message_bytes_max, self._pool
    )
    try:
      for frame in requests:
        self._bytes_in.add(len(frame))
        delivery = parser.feed(frame)
        if delivery is not None:
          self._inbox.put(delivery)
    except frames.FrameError as e:
      reason = f'bad frame: {e}'
    except Exception:  # gRPC raises a bare Exception when a call is over
      reason = 'connection lost'
    self._drop(peer.name, reason)

  def _drop(self, name: str, reason: str) -> None:
    with self._lock:
      peer = self._peers.pop(name, None)
      if peer is None:
        return
      self._sessions = {k: v for k, v in self._sessions.items() if v != name}
      self._bytes_gone += peer.bytes_out
    peer.close()
    self._inbox.put(base.PeerDown(name, reason))

  def _watch(self) -> None:
    """Give up streams that do not move, and halves of connections."""
    while not self._closing.wait(WATCH_EVERY_S):
      now = time.monotonic()
      with self._lock:
        peers = list(self._peers.values())
      for peer in peers:
        if peer.stalled_s() > self._options.deadline_s:
          self._drop(peer.name, 'does not take what is sent')
        half = len(peer.here) < len(STREAMS)
        if half and now - peer.since > self._options.connect_timeout_s:
          self._drop(peer.name, 'only half a connection')

  # The interface.

  def send(
    self,
    peer: str,
    message: m.Message,
    payload: base.Payload | None = None,
    priority: int = 0,
  ) -> bool:
    """See base.Endpoint."""
    if not isinstance(message, m.TO_ISLAND):
      raise ValueError(f'{type(message).__name__} goes the other way')
    with self._lock:
      known = self._peers.get(peer)
    return known is not None and known.send(message, payload, priority)

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
      sent = sum(x.bytes_out for x in self._peers.values())
      return base.Traffic(self._bytes_in.total, self._bytes_gone + sent)

  def close(self) -> None:
    if self._closing.is_set():
      return
    self._closing.set()
    with self._lock:
      peers = list(self._peers.values())
    for peer in peers:
      peer.end()
    self._server.stop(CLOSE_S).wait(2 * CLOSE_S)
    for peer in peers:
      peer.close()
    self._inbox.close()
    self._executor.shutdown(wait=False)
    self._watcher.join()


class ClientEndpoint:
  """An island's end: kept connected until it is closed. Made by `connect`."""

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
    self._credentials = _client_credentials(options)
    self._inbox = base.Inbox(options.queue_max)
    self._lock = threading.Lock()
    self._peer: _Peer | None = None
    self._bytes_in = _Counter()
    self._bytes_gone = 0
    self._closing = threading.Event()
    self._pool = frames.Pool()
    self._keeper = threading.Thread(
      target=self._keep_connected, name='transport', daemon=True
    )
    self._keeper.start()

  def _keep_connected(self) -> None:
    """Connect, wait for the end, try again with back-off and jitter."""
    backoff = self._options.backoff_first_s
    while not self._closing.is_set():
      began = time.monotonic()
      try:
        self._session()
      except grpc.RpcError as error:
        if _code(error) == grpc.StatusCode.UNAUTHENTICATED:
          self._inbox.put(base.TokenRefused(base.SYNCER))
          return
      if time.monotonic() - began > self._options.backoff_max_s:
        backoff = self._options.backoff_first_s
      self._closing.wait(backoff * self._rng.uniform(0.5, 1.5))
      backoff = min(2 * backoff, self._options.backoff_max_s)

  def _channel(self) -> Any:
    options = _channel_options(self._options, is_server=False)
    if self._credentials is None:
      return grpc.insecure_channel(self._address, options)
    return grpc.secure_channel(self._address, self._credentials, options)

  def _session(self) -> None:
    """One connection, from its beginning to its end."""
    peer = _Peer(base.SYNCER, self._options)
    ended = threading.Event()
    reasons: list[str] = []
    channels = {stream: self._channel() for stream in STREAMS}
    calls = {}
    metadata = (('token', self._token), ('session', uuid.uuid4().hex))
    try:
      for stream, channel in channels.items():
        self._wait_ready(channel)
        method = channel.stream_stream(f'/{SERVICE}/{stream}')
        calls[stream] = method(peer.outboxes[stream], metadata=metadata)
        # The server answers with its metadata once it has taken the token.
        calls[stream].initial_metadata()
        _raise_if_ended(calls[stream])
      with self._lock:
        self._peer = peer
      self._inbox.put(base.PeerUp(base.SYNCER))
      readers = [
        threading.Thread(
          target=self._read, args=(call, ended, reasons), daemon=True
        )
        for call in calls.values()
      ]
      for reader in readers:
        reader.start()
      self._wait_for_end(peer, ended, reasons)
      for reader in readers:
        reader.join(0.1)
    finally:
      with self._lock:
        was_up = self._peer is peer
        self._peer = None
        self._bytes_gone += peer.bytes_out
      peer.close()
      for call in calls.values():
        call.cancel()
      for channel in channels.values():
        channel.close()
    if was_up:
      reason = reasons[0] if reasons else 'closed here'
      self._inbox.put(base.PeerDown(base.SYNCER, reason))

  def _wait_ready(self, channel: Any) -> None:
    ready = grpc.channel_ready_future(channel)
    deadline = time.monotonic() + self._options.connect_timeout_s
    while True:
      try:
        ready.result(0.2)
        return
      except grpc.FutureTimeoutError:
        if self._closing.is_set() or time.monotonic() > deadline:
          ready.cancel()
          raise _NotReached from None

  def _wait_for_end(
    self, peer: _Peer, ended: threading.Event, reasons: list[str]
  ) -> None:
    while not ended.wait(WATCH_EVERY_S / 4):
      if self._closing.is_set():
        peer.end()
        ended.wait(CLOSE_S)
        return
      if peer.stalled_s() > self._options.deadline_s:
        reasons.append('the syncer does not take what is sent')
        return

  def _read(
    self, call: Any, ended: threading.Event, reasons: list[str]
  ) -> None:
    parser = frames.Parser(
      base.SYNCER, m.TO_ISLAND, self._options.message_bytes_max, self._pool
    )
    try:
      for frame in call:
        self._bytes_in.add(len(frame))
        delivery = parser.feed(frame)
        if delivery is not None:
          self._inbox.put(delivery)
      reasons.append('closed by the syncer')
    except frames.FrameError as e:
      reasons.append(f'bad frame: {e}')
    except grpc.RpcError as error:
      reasons.append(f'connection lost: {_code(error).name}')
    ended.set()

  # The interface.

  def send(
    self,
    peer: str,
    message: m.Message,
    payload: base.Payload | None = None,
    priority: int = 0,
  ) -> bool:
    """See base.Endpoint."""
    if not isinstance(message, m.TO_SYNCER):
      raise ValueError(f'{type(message).__name__} goes the other way')
    with self._lock:
      known = self._peer
    if known is None or peer != base.SYNCER:
      return False
    return known.send(message, payload, priority)

  def receive(self, timeout_s: float | None) -> list[base.Incoming]:
    return self._inbox.take(timeout_s)

  def wake(self) -> None:
    self._inbox.wake()

  def disconnect(self, peer: str) -> None:
    with self._lock:
      known = self._peer
    if known is not None and peer == base.SYNCER:
      known.end()

  def traffic(self) -> base.Traffic:
    with self._lock:
      sent = self._peer.bytes_out if self._peer is not None else 0
      return base.Traffic(self._bytes_in.total, self._bytes_gone + sent)

  def close(self) -> None:
    self._closing.set()
    self._keeper.join(4 * CLOSE_S)
    self._inbox.close()


class _NotReached(grpc.RpcError):
  """Nobody answers at the address."""


def _code(error: Any) -> Any:
  code: Callable[[], Any] | None = getattr(error, 'code', None)
  return code() if code is not None else grpc.StatusCode.UNAVAILABLE


def _raise_if_ended(call: Any) -> None:
  if call.done() and call.code() != grpc.StatusCode.OK:
    raise call


def serve(
  address: str, token: str, options: base.TransportOptions | None = None
) -> ServerEndpoint:
  """Listen at HOST:PORT; port 0 takes any free one (see `.address`).

  Raises:
    UserError: the address cannot be listened on, or a TLS file is missing.
  """
  return ServerEndpoint(address, token, options or base.TransportOptions())


def connect(
  address: str,
  token: str,
  options: base.TransportOptions | None = None,
  *,
  rng: random.Random,
) -> ClientEndpoint:
  """Connect to HOST:PORT, in the background and again when it is lost.

  Args:
    address: of the server.
    token: of the run.
    options: bounds, times and TLS.
    rng: for the jitter of the back-off.

  Raises:
    UserError: a TLS file is missing.
  """
  return ClientEndpoint(
    address, token, options or base.TransportOptions(), rng
  )
